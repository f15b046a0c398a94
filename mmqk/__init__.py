"""mmqk: an open laboratory for multimodal training instability."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Runs", "__version__", "load_runs"]

if TYPE_CHECKING:
    from mmqk.api import Runs, load_runs


def __getattr__(name: str) -> Any:
    """Import `mmqk.api`, and with it pandas, at the first use of one of its names."""
    if name in ("Runs", "load_runs"):
        from mmqk import api

        return getattr(api, name)
    raise AttributeError(f"module 'mmqk' has no attribute {name!r}")

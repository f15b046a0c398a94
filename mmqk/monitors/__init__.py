"""Measures statistics of a model while it trains. This package needs torch and numpy.

`NormMonitor`, the Lightning callback, is imported on first use, so that only its users need Lightning.
"""

from typing import TYPE_CHECKING, Any

from mmqk.monitors.attach import Watch, attach
from mmqk.monitors.collect import Statistics
from mmqk.monitors.own.probe import probe
from mmqk.monitors.preflight import preflight

if TYPE_CHECKING:
    from mmqk.monitors.lightning import NormMonitor

__all__ = ["NormMonitor", "Statistics", "Watch", "attach", "preflight", "probe"]


def __getattr__(name: str) -> Any:
    if name == "NormMonitor":
        from mmqk.monitors.lightning import NormMonitor

        return NormMonitor
    raise AttributeError(f"module 'mmqk.monitors' has no attribute {name!r}")

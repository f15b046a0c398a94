"""Grids, their runs, and the numbers, verdicts and pages of run folders. Imports no torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmqk.lab.runs import Run, read_runs
    from mmqk.lab.verdicts import Verdict, judge
    from mmqk.lab.verdicts.study import Study, load_study

__all__ = ["Run", "Study", "Verdict", "judge", "load_study", "read_runs"]
_MODULES = {"Run": "runs", "read_runs": "runs", "Study": "verdicts.study", "load_study": "verdicts.study"}


def __getattr__(name: str) -> Any:
    """Import the names above at their first use: they need numpy, which the runner and ``mmqk watch`` do not."""
    if name not in __all__:
        raise AttributeError(f"module 'mmqk.lab' has no attribute {name!r}")
    return getattr(import_module(f"mmqk.lab.{_MODULES.get(name, 'verdicts')}"), name)

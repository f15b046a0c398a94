"""Load only the part of torchmetrics that Lightning uses, so that a run starts faster and with less memory.

Lightning imports `Metric` and `MetricCollection`. The ``__init__`` of torchmetrics imports all metrics, which import
torchvision, scipy and, if it is installed, transformers. Without these imports, ``import lightning`` takes 2.1 s of
CPU time instead of 4.0 s (measured after ``import torch``), and 105 MB less memory.
"""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

# The module of each name that Lightning uses.
PLACES = {
    "__version__": "torchmetrics.__about__",
    "Metric": "torchmetrics.metric",
    "MetricCollection": "torchmetrics.collections",
}


class LeanTorchmetrics(ModuleType):
    """The package torchmetrics before its ``__init__`` has run. Access to a name that is not in `PLACES` runs the
    ``__init__``; if the name starts with two underscores, the access raises AttributeError."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in PLACES:
            raise AttributeError(name)
        try:
            if name == "Metric":
                import_module("torchmetrics.utilities")  # before torchmetrics.metric, which imports it
            value = getattr(import_module(PLACES[name]), name)
        except (KeyError, ImportError, AttributeError):
            self.__class__ = ModuleType  # type: ignore[assignment]
            assert self.__spec__ is not None and self.__spec__.loader is not None
            self.__spec__.loader.exec_module(self)
            return getattr(self, name)
        setattr(self, name, value)
        return value


def use_lean_torchmetrics() -> None:
    """Install `LeanTorchmetrics`, unless torchmetrics is already imported or is not installed.

    Only the commands of mmqk call this, so that a script that imports mmqk gets the complete torchmetrics.
    """
    if "torchmetrics" in sys.modules or (spec := find_spec("torchmetrics")) is None:
        return
    module = LeanTorchmetrics("torchmetrics")
    module.__spec__, module.__loader__, module.__file__ = spec, spec.loader, spec.origin
    module.__path__ = list(spec.submodule_search_locations or ())
    module.__package__ = "torchmetrics"
    module._logger = logging.getLogger("torchmetrics")  # type: ignore[attr-defined]
    sys.modules["torchmetrics"] = module

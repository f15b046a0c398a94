"""The model: token ids to logits. Pure torch: no logging, no files.

Names are imported on first use: the configuration (`mmqk.model.config`, `mmqk.model.backend_check`) needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backend_check import BACKENDS, check_backend
    from .backends import RowStats, kernel_name
    from .config import ModelConfig, PerModalityConfig, QKNormConfig, RopeScalingConfig
    from .dynamo import compile_blocks, keep_graphs
    from .init import init_weights
    from .linear import power_step
    from .transformer import EarlyFusionTransformer, modality_of_ids

__all__ = [
    "BACKENDS",
    "EarlyFusionTransformer",
    "ModelConfig",
    "PerModalityConfig",
    "QKNormConfig",
    "RopeScalingConfig",
    "RowStats",
    "check_backend",
    "compile_blocks",
    "init_weights",
    "keep_graphs",
    "kernel_name",
    "modality_of_ids",
    "power_step",
]
_MODULES = {
    "BACKENDS": "backend_check",
    "EarlyFusionTransformer": "transformer",
    "ModelConfig": "config",
    "QKNormConfig": "config",
    "RopeScalingConfig": "config",
    "RowStats": "backends",
    "PerModalityConfig": "config",
    "check_backend": "backend_check",
    "compile_blocks": "dynamo",
    "init_weights": "init",
    "keep_graphs": "dynamo",
    "kernel_name": "backends",
    "modality_of_ids": "transformer",
    "power_step": "linear",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

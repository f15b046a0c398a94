"""The model, from token ids to logits. It uses only torch, and writes no logs or files.

Names are imported on first use, so that the configuration (`mmqk.model.config`, `mmqk.model.backend_check`) can be
imported without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backend_check import BACKENDS as BACKENDS
    from .backend_check import check_backend as check_backend
    from .backends import RowStats as RowStats
    from .backends import kernel_name as kernel_name
    from .config import ModelConfig as ModelConfig
    from .config import PerModalityConfig as PerModalityConfig
    from .config import QKNormConfig as QKNormConfig
    from .config import RopeScalingConfig as RopeScalingConfig
    from .dynamo import compile_blocks as compile_blocks
    from .dynamo import keep_graphs as keep_graphs
    from .init import init_weights as init_weights
    from .linear import power_step as power_step
    from .transformer import EarlyFusionTransformer as EarlyFusionTransformer
    from .transformer import modality_of_ids as modality_of_ids

_MODULES = {
    "backend_check": ("BACKENDS", "check_backend"),
    "backends": ("RowStats", "kernel_name"),
    "config": ("ModelConfig", "QKNormConfig", "RopeScalingConfig", "PerModalityConfig"),
    "dynamo": ("compile_blocks", "keep_graphs"),
    "init": ("init_weights",),
    "linear": ("power_step",),
    "transformer": ("EarlyFusionTransformer", "modality_of_ids"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

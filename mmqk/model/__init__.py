"""The model, from token ids to logits. It uses only torch, and writes no logs or files.

config           the fields of a model, and the combinations that it refuses; ranges: how fields are checked, which
                 attention each backend can compute
transformer      embedding, blocks and head; attention, linear, norms: the parts of a block
backends         the attention kernels
patch            functions of a user that change a model

Names are imported on first use, so that `mmqk.model.config` can be imported without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backends import RowStats as RowStats
    from .config import ModelConfig as ModelConfig
    from .config import PerModalityConfig as PerModalityConfig
    from .config import QKNormConfig as QKNormConfig
    from .config import RopeScalingConfig as RopeScalingConfig
    from .transformer import EarlyFusionTransformer as EarlyFusionTransformer

_MODULES = {
    "backends": ("RowStats",),
    "config": ("ModelConfig", "PerModalityConfig", "QKNormConfig", "RopeScalingConfig"),
    "transformer": ("EarlyFusionTransformer",),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

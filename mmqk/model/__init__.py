"""TokenBatch to logits. Pure torch: nothing of the rest of mmqk, no logging, no files."""

from .attention import BACKENDS, check_backend
from .config import ModelConfig, QKNormConfig
from .init import init_weights
from .transformer import EarlyFusionTransformer, modality_of_ids

__all__ = [
    "BACKENDS",
    "EarlyFusionTransformer",
    "ModelConfig",
    "QKNormConfig",
    "check_backend",
    "init_weights",
    "modality_of_ids",
]

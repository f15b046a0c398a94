"""TokenBatch to logits. Pure torch: nothing of the rest of mmqk, no logging, no files."""

from .attention import BACKENDS, check_backend
from .config import ModelConfig, QKNormConfig, RopeScalingConfig, UntieConfig
from .init import init_weights
from .linear import power_step
from .transformer import EarlyFusionTransformer, modality_of_ids

__all__ = [
    "BACKENDS",
    "EarlyFusionTransformer",
    "ModelConfig",
    "QKNormConfig",
    "RopeScalingConfig",
    "UntieConfig",
    "check_backend",
    "init_weights",
    "modality_of_ids",
    "power_step",
]

"""The model: token ids to logits. Pure torch: no logging, no files."""

from .backends import BACKENDS, RowStats, check_backend, kernel_name
from .config import ModelConfig, QKNormConfig, RopeScalingConfig, UntieConfig
from .dynamo import compile_blocks, keep_graphs
from .init import init_weights
from .linear import power_step
from .transformer import EarlyFusionTransformer, modality_of_ids

__all__ = [
    "BACKENDS",
    "EarlyFusionTransformer",
    "ModelConfig",
    "QKNormConfig",
    "RopeScalingConfig",
    "RowStats",
    "UntieConfig",
    "check_backend",
    "compile_blocks",
    "init_weights",
    "keep_graphs",
    "kernel_name",
    "modality_of_ids",
    "power_step",
]

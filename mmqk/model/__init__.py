"""TokenBatch to logits. Pure torch: nothing of the rest of mmqk, no logging, no files."""

from .backends import BACKENDS, Rows, check_backend, kernel_name
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
    "Rows",
    "UntieConfig",
    "check_backend",
    "compile_blocks",
    "init_weights",
    "keep_graphs",
    "kernel_name",
    "modality_of_ids",
    "power_step",
]

"""Parses YAML files and command lines into frozen dataclasses, and computes the identity of a run.

Needs neither torch nor Lightning.
"""

from mmqk.config.fork import ForkConfig, Parent
from mmqk.config.parse import RANGES, build_parser, resolve
from mmqk.config.run import SECTIONS, RunConfig, print_yaml
from mmqk.config.trainer import TrainerConfig
from mmqk.config.training import CheckpointConfig, LossConfig, MonitorConfig, OptimConfig

__all__ = [
    "RANGES",
    "SECTIONS",
    "CheckpointConfig",
    "ForkConfig",
    "LossConfig",
    "MonitorConfig",
    "OptimConfig",
    "Parent",
    "RunConfig",
    "TrainerConfig",
    "build_parser",
    "print_yaml",
    "resolve",
]

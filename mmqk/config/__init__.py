"""What a run is: reads YAML files and command lines into frozen dataclasses, and computes the identity of a run.

Needs neither torch nor Lightning.
"""

from mmqk.config.fork import ForkConfig, Parent
from mmqk.config.run import SECTIONS, RunConfig, defaults, help_text, print_yaml, resolve
from mmqk.config.training import (
    AlarmConfig,
    CheckpointConfig,
    LossConfig,
    MonitorConfig,
    OptimConfig,
    TrainerConfig,
)

__all__ = [
    "SECTIONS",
    "AlarmConfig",
    "CheckpointConfig",
    "ForkConfig",
    "LossConfig",
    "MonitorConfig",
    "OptimConfig",
    "Parent",
    "RunConfig",
    "TrainerConfig",
    "defaults",
    "help_text",
    "print_yaml",
    "resolve",
]

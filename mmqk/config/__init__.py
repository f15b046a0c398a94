"""What a run is: reads YAML files and command lines into frozen dataclasses, and computes the identity of a run.

Needs neither torch nor Lightning.
"""

# ruff: noqa: F401
from mmqk.config.fork import ForkConfig, Parent
from mmqk.config.run import SECTIONS, RunConfig, defaults, help_text, print_yaml, resolve
from mmqk.config.training import AlarmConfig, CheckpointConfig, LossConfig, MonitorConfig, OptimConfig, TrainerConfig

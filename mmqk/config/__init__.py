"""What a run is: reads YAML files and command lines into frozen dataclasses, and computes the identity of a run.

training   the fields of loss, optim, monitor, checkpoint, alarm and trainer; those of model and data are in
           mmqk/model/config.py and mmqk/data/config.py
run        all fields together, read from a command line or from the parent of a fork; the identity of a run
parse      YAML and name=value to dataclasses
checks     combinations of fields of several sections that no run can have

A field declares its range where it is defined, and its class refuses combinations of its own fields
(`mmqk.model.ranges`). Needs neither torch nor Lightning.
"""

# ruff: noqa: F401
from mmqk.config.run import SECTIONS, Parent, RunConfig, defaults, help_text, print_yaml, resolve
from mmqk.config.training import AlarmConfig, CheckpointConfig, LossConfig, MonitorConfig, OptimConfig, TrainerConfig

"""Alarms: rules over logged series, with a state that checkpoints store.

The training callback applies the rules during the run, and the report applies them afterwards; both get the same
alarms.

divergence     `DivergenceRule`, which ends a run
steps          spike (OLMo 2), spike_median (Qwen), stall: one value per step
probes         growth, collapse: one value per probe
actions        what a run does when an alarm begins
rules          `AlarmRules`: all rules and non_finite over every series of a run
"""

# ruff: noqa: F401
from mmqk.store.alarms.actions import AlarmConfig
from mmqk.store.alarms.alarm import (
    ALARMS_NAME,
    NAMES,
    Alarm,
    append_alarms,
    read_alarms,
    truncate_alarms,
)
from mmqk.store.alarms.divergence import DivergenceRule
from mmqk.store.alarms.rules import AlarmRules, alarms_of

"""Alarms: rules over logged series, with a state that checkpoints store.

The training callback applies the rules during the run, and the report applies them afterwards; both get the same
alarms.

alarm          an alarm, its file, and what a run does when one begins
window         the base class of rules, and sliding windows
series         spike (OLMo 2), spike_median (Qwen), stall, growth, collapse: rules over one series
divergence     `DivergenceRule`, which ends a run
rules          `AlarmRules`: all rules and non_finite over every series of a run
"""

# ruff: noqa: F401
from mmqk.store.alarms.alarm import (
    ALARMS_NAME,
    NAMES,
    Alarm,
    AlarmConfig,
    append_alarms,
    read_alarms,
    truncate_alarms,
)
from mmqk.store.alarms.divergence import DivergenceRule
from mmqk.store.alarms.rules import AlarmRules, alarms_of

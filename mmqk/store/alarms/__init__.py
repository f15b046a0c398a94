"""Alarms: rules over logged series, with a state that a checkpoint carries.

Used live by the training callback and afterwards by the report, so both see the same thing.

divergence     `DivergenceRule`, which ends a run
steps          spike (OLMo 2), spike_median (Qwen), stall: a value a step
probes         growth, collapse: a value a probe
rules          `AlarmRules`, all of them and non_finite over every series of a run
"""

from mmqk.store.alarms.alarm import (
    ALARMS_NAME,
    NAMES,
    Alarm,
    append_alarms,
    read_alarms,
    truncate_alarms,
)
from mmqk.store.alarms.config import AlarmConfig
from mmqk.store.alarms.divergence import DivergenceRule
from mmqk.store.alarms.rules import AlarmRules, alarms_of
from mmqk.store.alarms.steps import spike_rate, spike_score

__all__ = [
    "ALARMS_NAME",
    "NAMES",
    "Alarm",
    "AlarmConfig",
    "AlarmRules",
    "DivergenceRule",
    "alarms_of",
    "append_alarms",
    "read_alarms",
    "spike_rate",
    "spike_score",
    "truncate_alarms",
]

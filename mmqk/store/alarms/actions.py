"""What a run does when an alarm begins."""

from __future__ import annotations

from dataclasses import dataclass, field

from mmqk.ranges import MOST_STEPS, check_fields, number
from mmqk.store.alarms.alarm import NAMES


@dataclass(frozen=True)
class AlarmConfig:
    """What a run does when an alarm begins, besides reporting it.

    The alarms are spike, spike_median, stall, growth, collapse and non_finite (docs/alarms.md). Divergence always
    ends a run and cannot be listed here.

    Args:
        checkpoint: alarms that write a permanent checkpoint ``alarm_<name>_step….ckpt`` when they first begin.
        probe: alarms after which every step is probed, for `probe_steps` steps.
        stop: alarms that end the run with the status interrupted; the same command resumes it.
        probe_steps: number of probed steps after an alarm of `probe`.
    """

    checkpoint: list[str] = field(default_factory=list)
    probe: list[str] = field(default_factory=list)
    stop: list[str] = field(default_factory=list)
    probe_steps: int = number(20, 1, MOST_STEPS)

    def __post_init__(self) -> None:
        check_fields(self, "alarm")
        for action in ("checkpoint", "probe", "stop"):
            for name in getattr(self, action):
                if name not in NAMES:
                    raise ValueError(f"alarm.{action} has '{name}': the alarms are {', '.join(NAMES)}.")
                if name == "divergence":
                    raise ValueError(
                        f"alarm.{action} has 'divergence', which always ends a run, without a checkpoint of the"
                        " diverged weights: leave it out."
                    )

    @property
    def acts(self) -> bool:
        """Whether any alarm has an action. Only then is this configuration part of a run's identity."""
        return bool(self.checkpoint or self.probe or self.stop)

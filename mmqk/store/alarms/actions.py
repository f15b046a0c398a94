"""What a run does when an alarm begins."""

from __future__ import annotations

from dataclasses import dataclass, field

from mmqk.ranges import MOST_STEPS, check_fields, number
from mmqk.store.alarms.alarm import NAMES


@dataclass(frozen=True)
class AlarmConfig:
    """What a run does when an alarm begins, besides reporting it.

    The alarms are spike, spike_median, stall, growth, collapse and non_finite (docs/alarms.md). Divergence has its
    own field and cannot be listed in the others.

    Args:
        checkpoint: alarms that write a permanent checkpoint ``alarm_<name>_step….ckpt`` when they first begin.
        probe: alarms after which every step is probed, for `probe_steps` steps.
        stop: alarms that end the run with the status interrupted; the same command resumes it.
        probe_steps: number of probed steps after an alarm of `probe`.
        stop_diverged: whether a divergence ends the run. If false, only a value that is not finite ends it.
    """

    checkpoint: list[str] = field(default_factory=list)
    probe: list[str] = field(default_factory=list)
    stop: list[str] = field(default_factory=list)
    probe_steps: int = number(20, 1, MOST_STEPS)
    stop_diverged: bool = True

    def __post_init__(self) -> None:
        check_fields(self, "alarm")
        for action in ("checkpoint", "probe", "stop"):
            for name in getattr(self, action):
                if name not in NAMES:
                    raise ValueError(f"alarm.{action} has '{name}': the alarms are {', '.join(NAMES)}.")
                if name == "divergence":
                    raise ValueError(
                        f"alarm.{action} has 'divergence', which ends a run without a checkpoint of the diverged"
                        " weights: leave it out, or set alarm.stop_diverged to false so that the run goes on."
                    )

    @property
    def acts(self) -> bool:
        """Whether this configuration can change a run. Only then is it part of the run's identity."""
        return bool(self.checkpoint or self.probe or self.stop or not self.stop_diverged)

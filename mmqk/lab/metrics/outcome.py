"""How a run ended: diverged, regime not reached, stalled, or well."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mmqk.lab.metrics.losses import final_loss, has_floor, learned, trained_modalities
from mmqk.lab.metrics.stability import divergence_step
from mmqk.lab.runs.load import Run

STALLED_NATS = 0.1


@dataclass(frozen=True)
class Outcome:
    """How one run ended.

    Attributes:
        finished: whether the run completed or diverged; otherwise the other fields have no meaning.
        diverged: step of the divergence; None if the run did not diverge.
        above_best: final loss minus the final loss of the best run on the same data, in nats, by modality; infinite
            if the run diverged.
        unlearned: trained modalities that the run did not learn (`learned`).
    """

    finished: bool
    diverged: int | None
    above_best: dict[str, float]
    unlearned: tuple[str, ...]

    @property
    def kind(self) -> Literal["diverged", "stalled", "regime not reached", "well", "not finished"]:
        """The first outcome that applies, in this order: not finished, diverged, regime not reached, stalled,
        well."""
        if not self.finished:
            return "not finished"
        if self.diverged is not None:
            return "diverged"
        if self.unlearned:
            return "regime not reached"
        return "stalled" if self.stalled else "well"

    @property
    def stalled(self) -> tuple[str, ...]:
        """Modalities whose final loss is more than 0.1 nat above that of the best run on the same data."""
        return tuple(m for m, nats in self.above_best.items() if nats > STALLED_NATS)

    @property
    def failed(self) -> bool:
        """Whether the run diverged or stalled, even if its `kind` is "regime not reached"."""
        return self.finished and (self.diverged is not None or bool(self.stalled))


def outcomes(runs: Sequence[Run]) -> list[Outcome]:
    """Return the outcome of each run.

    Each run is compared with the best run on the same data, over all seeds, by the final held-out loss of each
    modality. If the floor is known, the excess loss is compared; it differs from the loss by a constant.
    """
    ends: list[dict[str, float]] = []
    steps: list[int | None] = []
    best: dict[tuple[str, str], float] = {}
    for run in runs:
        step = divergence_step(run)
        steps.append(step)
        end = {m: _end(run, m) if step is None else math.inf for m in trained_modalities(run)}
        ends.append(end)
        for modality, nats in end.items():
            if run.status.status == "completed" and math.isfinite(nats):
                key = _data_of(run), modality
                best[key] = min(nats, best.get(key, math.inf))
    results = []
    for run, step, end in zip(runs, steps, ends, strict=True):
        above = {m: nats - best.get((_data_of(run), m), math.nan) for m, nats in end.items()}
        unlearned = tuple(m for m in end if not learned(run, m))
        results.append(Outcome(step is not None or run.status.finished, step, above, unlearned))
    return results


def _end(run: Run, modality: str) -> float:
    return final_loss(run, modality, "excess" if has_floor(run, modality) else "loss").value


def _data_of(run: Run) -> str:
    return json.dumps(run.identity.get("data", run.setting("data")), sort_keys=True, default=str)

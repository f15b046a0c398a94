"""Trained targets per optimizer step: arms with other modalities or batch sizes are matched by this number."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mmqk.analysis.formatting import listed
from mmqk.analysis.metrics import trained_modalities
from mmqk.analysis.runs.load import Run
from mmqk.analysis.verdicts.compared import Group
from mmqk.store.formatting import percent

# Largest relative difference that is not reported: seeds read different sequences.
ALIKE = 0.01


def trained_targets(run: Run) -> float:
    """Mean number of trained targets per optimizer step over all ranks, counted in the sequences of the run.

    NaN if the run did not count them. Modalities that are not trained do not count.
    """
    size = run.setting("data.batch_size")
    records = [run.data.get(modality) for modality in trained_modalities(run)]
    counts = [record.get("targets") if isinstance(record, Mapping) else None for record in records]
    numbers = [float(count) for count in (size, *counts) if isinstance(count, int | float)]
    if not counts or len(numbers) <= len(counts):
        return math.nan
    return numbers[0] * sum(numbers[1:])


def about_targets(compared: Mapping[str, Group]) -> list[str]:
    """Trained targets per step of each arm, if the arms differ in them or in the trained modalities.

    Empty if a run did not count them.
    """
    counts: dict[str, float] = {}
    trained = set()
    for members in compared.values():
        numbers = [trained_targets(run) for run in members.all]
        if not numbers or not all(math.isfinite(count) and count > 0 for count in numbers):
            return []
        counts[members.label] = sum(numbers) / len(numbers)
        trained |= {trained_modalities(run) for run in members.all}
    difference = max(counts.values()) / min(counts.values()) - 1 if counts else 0.0
    if difference <= ALIKE and len(trained) < 2:
        return []
    by_arm = listed([f"{count:,.0f} ({label})" for label, count in counts.items()])
    return [
        f"Trained targets per step, counted in the data of the runs: {by_arm}; they differ by {percent(difference)}."
    ]

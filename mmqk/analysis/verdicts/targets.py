"""How many targets a step of a run trains: what arms that train other modalities or batches are matched in."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mmqk.analysis.formatting import listed
from mmqk.analysis.metrics import trained_modalities
from mmqk.analysis.runs.load import Run
from mmqk.analysis.verdicts.compared import Group
from mmqk.store.formatting import percent

# Arms that train the same modalities are alike up to here: seeds read different sequences.
ALIKE = 0.01


def trained_targets(run: Run) -> float:
    """Mean number of trained targets in an optimizer step, over all ranks, as counted in the run's own sequences.

    NaN where the run did not count them. Targets of a modality that is not trained are left out.
    """
    size = run.setting("data.batch_size")
    known = [run.data.get(modality) for modality in trained_modalities(run)]
    counts = [record.get("targets") if isinstance(record, Mapping) else None for record in known]
    numbers = [float(count) for count in (size, *counts) if isinstance(count, int | float)]
    if not counts or len(numbers) <= len(counts):
        return math.nan
    return numbers[0] * sum(numbers[1:])


def about_targets(compared: Mapping[str, Group]) -> list[str]:
    """How many targets a step trains in each arm, where the arms train other modalities or other numbers of targets;
    nothing where a run did not count them."""
    counts: dict[str, float] = {}
    trained = set()
    for members in compared.values():
        found = [trained_targets(run) for run in members.all]
        if not found or not all(math.isfinite(count) and count > 0 for count in found):
            return []
        counts[members.label] = sum(found) / len(found)
        trained |= {trained_modalities(run) for run in members.all}
    apart = max(counts.values()) / min(counts.values()) - 1 if counts else 0.0
    if apart <= ALIKE and len(trained) < 2:
        return []
    said = listed([f"{count:,.0f} ({label})" for label, count in counts.items()])
    return [f"Trained targets a step, counted in the data of the runs: {said}; {percent(apart)} apart."]

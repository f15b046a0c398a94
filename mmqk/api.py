"""Loads runs as pandas tables: ``mmqk.load_runs("runs/demo")``. Imports neither torch nor matplotlib."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from mmqk.lab.metrics import METRICS
from mmqk.lab.metrics.outcomes import final_loss
from mmqk.lab.runs import EMPTY, Run
from mmqk.lab.study import Study, load_study
from mmqk.lab.verdicts.judge import judge

_OF_SERIES = {
    "run": "string", "arm": "string", "seed": "int64", "metric": "string", "modality": "string", "layer": "Int64",
    "head": "Int64",
}  # fmt: skip


class Runs:
    """The runs of a folder, in the order of their grid.

    ``len`` is the number of runs. Iterating yields a `mmqk.lab.runs.Run` per run, with its configuration, series and
    alarms.
    """

    def __init__(self, study: Study) -> None:
        self._study = study
        self._verdicts = judge(study)
        # Two arms can share a run.
        self._runs = list({run.name: run for run in study.runs}.values())

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs)

    def __repr__(self) -> str:
        return f"Runs({self._study.title!r}, {len(self)} runs of {len(self._study.arms)} arms)"

    def metrics(self, *names: str) -> pd.DataFrame:
        """Return one row for each logged number.

        Args:
            names: statistics to keep, such as ``loss`` or ``attn_logit_absmax``; all of them by default.

        Returns:
            Columns ``run``, ``arm``, ``seed``, ``step``, ``metric``, ``modality`` ("text-image" for queries of text
            and keys of image), ``layer``, ``head`` and ``value``. A tag without a modality, layer or head has <NA>
            in that column. docs/statistics.md defines the metrics and their units.
        """
        kept = [
            (run, tag, *run.series(name))
            for run in self._runs
            for name, tag in run.tags.items()
            if not names or tag.statistic in names
        ]
        # One row per series, repeated for each of its values.
        series = pd.DataFrame(
            ((run.name, run.arm, run.seed, *tag) for run, tag, *_ in kept), columns=list(_OF_SERIES)
        ).astype(_OF_SERIES)
        table = series.loc[series.index.repeat([len(steps) for *_, steps, _ in kept])].reset_index(drop=True)
        table.insert(3, "step", np.concatenate([EMPTY[0], *(steps for *_, steps, _ in kept)]))
        table["value"] = np.concatenate([EMPTY[1], *(values for *_, values in kept)])
        return table

    def summary(self) -> pd.DataFrame:
        """Return one row per run.

        Returns:
            Columns ``run``, ``arm``, ``label``, ``seed``, ``status`` with its ``reason``, ``step``, ``seconds``,
            ``final_loss/MODALITY`` for each modality, ``largest_attention_logit``, ``alarms``, ``notes``, ``id`` and
            ``path``. ``final_loss`` is in nats per token: the loss on held-out data if it was measured, otherwise the
            mean of the last training steps. ``alarms`` is the number of alarms, ``notes`` has sentences about missing
            or damaged files, and ``id`` identifies the configuration.
        """
        study = self._study
        logit = METRICS["largest_attention_logit"].measure
        losses = [f"final_loss/{modality}" for modality in study.modalities]
        rows = (
            (
                run.name, run.arm, study.label(run.arm), run.seed, run.status.status, run.status.reason,
                max(run.status.step, run.last_step), run.status.seconds,
                *(final_loss(run, modality).value for modality in study.modalities),
                logit(run, None), len(run.alarms), "; ".join(run.notes), run.id, str(run.path),
            )
            for run in self._runs
        )  # fmt: skip
        first = ["run", "arm", "label", "seed", "status", "reason", "step", "seconds"]
        last = ["largest_attention_logit", "alarms", "notes", "id", "path"]
        return pd.DataFrame(rows, columns=[*first, *losses, *last])

    def verdicts(self) -> pd.DataFrame:
        """Return one row per claim, as in verdicts.json of a report; the table is empty if the grid has no claims.

        Returns:
            Columns ``claim``, ``statement``, ``metric``, ``treatment``, ``control``, ``verdict``, ``effect``,
            ``low``, ``high``, ``min_effect``, ``tested``, ``p``, ``adjusted_p``, ``n``, ``status``, ``why`` and
            ``note``. ``low`` to ``high`` is the 95 % interval of the effect. If the metric is on a log scale, the
            effect and its interval are differences of logarithms. ``n`` is the number of compared runs. ``status``
            is confirmatory, exploratory or shown.
        """
        rows = []
        for verdict in self._verdicts:
            record = verdict.as_record()
            low, high = record["interval"] or (None, None)
            adjusted = (record["adjusted"] or {}).get("p")
            of_claim = {"low": low, "high": high, "min_effect": record["threshold"], "n": len(record["runs"])}
            rows.append(vars(verdict.claim) | record | of_claim | {"adjusted_p": adjusted})
        columns = [
            "claim", "statement", "metric", "treatment", "control", "verdict", "effect", "low", "high", "min_effect",
            "tested", "p", "adjusted_p", "n", "status", "why", "note",
        ]  # fmt: skip
        numbers = ["effect", "low", "high", "min_effect", "p", "adjusted_p"]
        return pd.DataFrame(rows, columns=columns).astype({**dict.fromkeys(numbers, "float64"), "n": "int64"})


def load_runs(folder: str | Path) -> Runs:
    """Return the runs in the folder of a grid, an arm or a run, or in a pack. The runs may be unfinished.

    Raises:
        mmqk.store.UserError: the folder does not exist or has no runs, or a record cannot be read.
    """
    return Runs(load_study(folder))

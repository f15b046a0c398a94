"""Logs of other tools and of mmqk as one table: `read_log`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd


@dataclass(frozen=True)
class Log:
    """One run, read from files of any supported tool.

    Attributes:
        source: the path as given.
        format: "W&B export", "TensorBoard", "trainer_state.json", ...
        metrics: a row per step and a column per tag of docs/statistics.md. The index ``step`` is int, increasing and
            unique. NaN means not logged; a value that the log gives as NaN or infinite is ``np.inf``.
        columns: the file's name of each column that was used, and its tag.
        unused: columns that no tag was found for.
        notes: gaps, restarts, repeated steps, units of step and logging intervals, a sentence each.
        config: fields that the files state, flat and dotted, by mmqk's names where known; empty if there are none.
    """

    source: str
    format: str
    metrics: pd.DataFrame
    columns: dict[str, str]
    unused: list[str]
    notes: list[str]
    config: dict[str, Any]

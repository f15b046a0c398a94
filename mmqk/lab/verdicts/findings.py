"""What a report says about a folder of runs, computed once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mmqk.lab.verdicts.study import Study, load_study
from mmqk.lab.verdicts.verdicts import Verdict, judge


@dataclass(frozen=True)
class Findings:
    """The content of a page: the study and its verdicts."""

    study: Study
    verdicts: tuple[Verdict, ...]


def read(folder: str | Path) -> Findings:
    """Return the findings of a folder or pack.

    Raises:
        UserError: the folder has no runs, or a record cannot be read.
    """
    study = load_study(folder)
    return Findings(study, tuple(judge(study)))

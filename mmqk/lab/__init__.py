"""Metrics and verdicts from run folders. Imports no torch and no matplotlib."""

from mmqk.lab.runs.load import Run, load_runs
from mmqk.lab.verdicts.study import Study, load_study
from mmqk.lab.verdicts.verdicts import Verdict, judge

__all__ = ["Run", "Study", "Verdict", "judge", "load_runs", "load_study"]

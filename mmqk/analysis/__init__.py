"""Metrics and verdicts from run folders. Imports no torch and no matplotlib."""

from mmqk.analysis.runs.load import Run, load_runs
from mmqk.analysis.verdicts.study import Study, load_study
from mmqk.analysis.verdicts.verdicts import Verdict, judge

__all__ = ["Run", "Study", "Verdict", "judge", "load_runs", "load_study"]

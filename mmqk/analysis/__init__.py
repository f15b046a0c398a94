"""Run folders to numbers, verdicts, figures and pages. Imports no torch."""

from mmqk.analysis.page import write_report
from mmqk.analysis.runs import Run, load_runs
from mmqk.analysis.study import Study, load_study
from mmqk.analysis.verdicts import Verdict, judge

__all__ = ["Run", "Study", "Verdict", "judge", "load_runs", "load_study", "write_report"]

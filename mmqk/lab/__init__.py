"""Grids, their runs, and the numbers, verdicts and pages of run folders. Imports no torch."""

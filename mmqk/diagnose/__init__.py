"""Diagnoses runs that failed: logs, checkpoints and pairs of runs of other tools and of mmqk."""

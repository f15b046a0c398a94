"""Compute the verdict of each claim from its runs: study, measure, checks, assess; `judge` of `verdicts` decides."""

"""Compute the verdict of each claim from its runs: study, assess, controls; `verdicts._judge` chooses the word."""

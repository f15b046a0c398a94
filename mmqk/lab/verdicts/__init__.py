"""The verdict of each claim of a grid.

judge           the verdicts: corrected levels, controls, rules
assess          one claim: its effect, interval and p-value
measure         the values of its metric by arm and seed; the best learning rate of each arm, from selection runs
checks          the conditions that its runs must meet
words           the texts of verdicts
"""

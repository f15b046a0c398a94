"""The verdict of each claim of a grid.

judge           the verdicts: corrected levels, controls, rules
assess          one claim: its effect, interval and p-value
measure         the values of its metric by arm and seed
checks          the conditions that its runs must meet
learning_rates  the best learning rate of each arm, from selection runs
words           the texts of verdicts
"""

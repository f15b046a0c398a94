"""Checks a model and a batch before training: leaks, attention, loss and parameters."""

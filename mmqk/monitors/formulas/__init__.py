"""Definitions of the statistics, as functions of tensors that do not depend on a model."""

"""Tensors in, numbers out: the definitions of the statistics, apart from any model."""

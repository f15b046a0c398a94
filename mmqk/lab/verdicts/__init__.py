"""Compute the verdict of each claim from its runs."""

"""Monitors of mmqk's runs: when to probe, and statistics of gradients and of the optimizer."""

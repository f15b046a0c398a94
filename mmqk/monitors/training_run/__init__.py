"""Monitors of mmqk's own runs: when to probe, and statistics from gradients and the optimizer."""

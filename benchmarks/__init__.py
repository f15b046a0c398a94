"""Measures the speed of mmqk: `python -m benchmarks`."""

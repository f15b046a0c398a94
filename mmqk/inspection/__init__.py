"""The page of ``python -m mmqk.inspect``."""

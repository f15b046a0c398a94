"""The page of ``mmqk inspect``."""

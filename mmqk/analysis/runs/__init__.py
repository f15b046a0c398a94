"""Run folders as records."""

"""The verdict of each claim of a grid: `judge.judge`."""

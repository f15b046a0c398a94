"""``python -m mmqk`` is the command ``mmqk``."""

from mmqk.cli import run

run()

"""Numbers as every command's progress says them."""

from __future__ import annotations

import os
import shlex


def clock(seconds: float) -> str:
    """Minutes and seconds as m:ss; a negative time is 0:00."""
    whole = max(0, round(seconds))
    return f"{whole // 60}:{whole % 60:02d}"


def dashboards(folder: str | os.PathLike[str]) -> str:
    """How to open the dashboards of a folder of runs.

    TensorBoard samples 1,000 steps of a series unless it is told how many to keep, and a spike of one step would be
    left out; 0, which its help calls all, shows nothing in 2.21.
    """
    return (
        f"dashboards: python -m tensorboard.main --logdir {shlex.quote(os.fspath(folder))}"
        " --samples_per_plugin scalars=1000000, then open http://localhost:6006/#custom_scalars"
    )

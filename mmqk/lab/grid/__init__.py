"""The grid file: arms, axes, seeds, claims and rules, read from YAML."""

from mmqk.lab.grid.arms import Arm, Job
from mmqk.lab.grid.grid import Grid, load_grid

__all__ = ["Arm", "Grid", "Job", "load_grid"]

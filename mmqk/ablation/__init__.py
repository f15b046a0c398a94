"""From a grid of runs in one YAML file to finished run folders."""

from mmqk.ablation.arms import Arm, Job
from mmqk.ablation.grid import Grid, load_grid

__all__ = ["Arm", "Grid", "Job", "load_grid"]

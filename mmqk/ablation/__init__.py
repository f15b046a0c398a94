"""From a grid of runs in one YAML file to finished run folders."""

from mmqk.ablation.grid import Arm, Grid, Job, load_grid

__all__ = ["Arm", "Grid", "Job", "load_grid"]

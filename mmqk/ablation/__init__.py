"""From a grid to finished run folders."""

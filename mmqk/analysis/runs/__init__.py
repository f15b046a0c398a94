"""Read run folders."""

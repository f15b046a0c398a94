"""From runs to the verdict of a claim."""

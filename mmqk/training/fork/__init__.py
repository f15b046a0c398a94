"""A fork: a run that starts from the checkpoint of another run."""

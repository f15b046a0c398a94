"""A fork: a run that begins at a checkpoint of another run, converted to the configuration of the fork."""

"""Token folders, which store documents as arrays of ids: how they are made and read."""

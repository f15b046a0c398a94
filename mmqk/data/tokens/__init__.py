"""Token folders, which have documents as arrays of ids, and the cache of token folders."""

"""Token folders: arrays of ids, and the cache of them."""

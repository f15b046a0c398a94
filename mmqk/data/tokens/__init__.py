"""Token folders, which store documents as arrays of ids, and the token cache."""

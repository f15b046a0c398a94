"""Reads run folders."""

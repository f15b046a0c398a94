"""Trains a model: one step, the loop around it, logging, and forks."""

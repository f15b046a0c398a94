"""One training step: loss, optimizer, QK-Clip."""

"""The training step around the model: loss, optimizer, schedule."""

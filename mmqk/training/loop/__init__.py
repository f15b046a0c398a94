"""What surrounds a training step: device, processes, signals, step log, alarms, checkpoints."""

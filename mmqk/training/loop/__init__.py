"""The training loop: device, processes, signals, step log, alarms, checkpoints."""

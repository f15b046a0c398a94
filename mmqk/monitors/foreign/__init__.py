"""The parts of `attach` that read inputs, layers and attention calls of third-party models."""

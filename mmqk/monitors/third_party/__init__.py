"""Models that mmqk did not build: inputs, layers and attention calls, caught from outside."""

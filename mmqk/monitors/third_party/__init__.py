"""The parts of `attach`: reads inputs, layers and attention calls of models that mmqk did not build."""

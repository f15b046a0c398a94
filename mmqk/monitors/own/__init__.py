"""Monitors of mmqk's own runs.

callback   `RunMonitor`, Lightning's callback: measures at the steps that `updates.probe_is_due` names; agreement of
           gradients, their noise, and the sharpness of the loss
probe      one forward pass of the model with an observer, to `Statistics`; the first place in a step whose values are
           not finite
updates    gradients and updates of the optimizer, from inside a step
"""

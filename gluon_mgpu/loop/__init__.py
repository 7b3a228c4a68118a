"""Epochs: fit, evaluate, predict, callbacks, resume."""

"""Ours, plain Gluon, d2l, GluonCV and PyTorch, measured in turns, each in a process of its own."""

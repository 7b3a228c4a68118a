"""One network on all devices: parameters, gradients, their reduction, and the update."""

from .trainer import Trainer

__all__ = ["Trainer"]

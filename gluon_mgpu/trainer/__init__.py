"""One network on all devices: parameters, gradients, their reduction, and the update."""

from ..runtime import loaded as loaded
from .trainer import Trainer

__all__ = ["Trainer"]

"""Networks that the training programs use."""

from .resnet import Residual, resnet18

__all__ = ["Residual", "resnet18"]

"""ResNet-18 for small images, d2l's variant: a 3x3 stem with stride 1, and no max-pooling."""

from __future__ import annotations

from typing import Any

from mxnet.gluon import nn

from ..checks import flag, whole_number
from .hybrid_block import HybridBlock, named


class Residual(HybridBlock):
    """Two 3x3 convolutions with BatchNorm, and the input added to their output.

    Parameters
    ----------
    num_channels : int
        Channels of the output.
    use_1x1conv : bool
        Convert the input to the output's shape with a 1x1 convolution.
    strides : int

    Source: He, Zhang, Ren, Sun, "Deep residual learning for image recognition", 2016; attribute names as in d2l, so that
    parameter files fit both.
    """

    def __init__(self, num_channels: int, use_1x1conv: bool = False, strides: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        whole_number("Residual", "num_channels", num_channels, advice="64 is usual.")
        whole_number("Residual", "strides", strides, advice="1 or 2 is usual.")
        flag("Residual", "use_1x1conv", use_1x1conv)
        with named(self):
            self.conv1 = nn.Conv2D(num_channels, kernel_size=3, padding=1, strides=strides)
            self.conv2 = nn.Conv2D(num_channels, kernel_size=3, padding=1)
            self.conv3 = nn.Conv2D(num_channels, kernel_size=1, strides=strides) if use_1x1conv else None
            self.bn1 = nn.BatchNorm()
            self.bn2 = nn.BatchNorm()
            self.relu = nn.Activation("relu")

    def compute(self, F: Any, X: Any) -> Any:
        """Return the block's output, shape (B, num_channels, H / strides, W / strides)."""
        Y = self.relu(self.bn1(self.conv1(X)))
        Y = self.bn2(self.conv2(Y))
        if self.conv3 is not None:
            X = self.conv3(X)
        return self.relu(Y + X)


def resnet18(num_classes: int) -> nn.HybridSequential:
    """Return d2l's variant of ResNet-18: images of shape (B, channels, H, W) to scores of shape (B, num_classes).

    It has about 11 million parameters, which are not initialised. It takes legacy or np arrays, by the mode of its creation.

    Parameters
    ----------
    num_classes : int

    Raises
    ------
    TrainerError
        `num_classes` is not a whole number of 1 or more.

    Source: d2l, chapter "Concise Implementation for Multiple GPUs".
    """
    whole_number("resnet18", "num_classes", num_classes, advice="Pass the number of different labels.")
    net = nn.HybridSequential()
    net.add(nn.Conv2D(64, kernel_size=3, strides=1, padding=1), nn.BatchNorm(), nn.Activation("relu"))
    for stage, num_channels in enumerate((64, 128, 256, 512)):
        blocks = nn.HybridSequential()
        first = Residual(num_channels, use_1x1conv=True, strides=2) if stage else Residual(num_channels)
        blocks.add(first, Residual(num_channels))
        net.add(blocks)
    net.add(nn.GlobalAvgPool2D(), nn.Dense(num_classes))
    return net

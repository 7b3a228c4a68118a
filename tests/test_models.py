import gluon_mgpu as mgpu
import numpy as np

from .versions import nd


def test_the_parameters_are_those_of_the_paper_s_18_layers():
    """Counted by hand: convolutions with bias, BatchNorm's gamma and beta, and the dense layer."""

    def conv(inputs, outputs, kernel):
        return inputs * outputs * kernel * kernel + outputs

    def block(inputs, outputs):
        shortcut = conv(inputs, outputs, 1) if inputs != outputs else 0
        return conv(inputs, outputs, 3) + conv(outputs, outputs, 3) + shortcut + 4 * outputs

    widths = [64, 64, 128, 256, 512]
    by_hand = conv(1, 64, 3) + 2 * 64 + 512 * 10 + 10
    by_hand += sum(block(inputs, outputs) + block(outputs, outputs) for inputs, outputs in zip(widths, widths[1:]))
    net = mgpu.models.resnet18(10)
    net.initialize()
    net(nd.ones((1, 1, 8, 8)))
    trainable = [param for param in net.collect_params().values() if param.grad_req != "null"]
    assert sum(int(np.prod(param.shape)) for param in trainable) == by_hand == 11175818
    assert len(trainable) == 2 * (1 + 16 + 3 + 1) + 2 * (1 + 16)

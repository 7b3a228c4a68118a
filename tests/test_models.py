import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.errors import TrainerError


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
    net(mx.nd.ones((1, 1, 8, 8)))
    trainable = [param for param in net.collect_params().values() if param.grad_req != "null"]
    assert sum(int(np.prod(param.shape)) for param in trainable) == by_hand == 11175818
    assert len(trainable) == 2 * (1 + 16 + 3 + 1) + 2 * (1 + 16)


@pytest.mark.pairwise
@pytest.mark.parametrize("shape", [(2, 1, 28, 28), (1, 3, 8, 8)])
@pytest.mark.parametrize("hybridize", [False, True])
def test_shapes(arrays, shape, hybridize):
    net = mgpu.models.resnet18(7)
    net.initialize(mx.init.Xavier())
    if hybridize:
        net.hybridize()
    out = net(arrays.ones(shape))
    assert out.shape == (shape[0], 7)
    assert isinstance(out, mx.np.ndarray) == (arrays is mx.np)
    assert np.isfinite(out.asnumpy()).all()


def test_strides_and_shortcut():
    block = mgpu.models.Residual(8, use_1x1conv=True, strides=2)
    block.initialize()
    assert block(mx.nd.ones((1, 4, 6, 6))).shape == (1, 8, 3, 3)
    plain = mgpu.models.Residual(4)
    plain.initialize(mx.init.Zero())  # both branches give 0: what comes out is relu(0 + X)
    x = mx.nd.array(np.random.randn(2, 4, 5, 5))
    np.testing.assert_array_equal(plain(x).asnumpy(), np.maximum(x.asnumpy(), 0))


def test_a_network_needs_a_class():
    with pytest.raises(TrainerError, match="resnet18: got num_classes=0; expected a whole number of 1 or more"):
        mgpu.models.resnet18(0)

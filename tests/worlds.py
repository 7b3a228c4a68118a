"""On what several test files train, a layer of theirs, and how they wait."""

import time

import mxnet as mx
import pytest
from mxnet import gluon


@pytest.fixture(params=[1, 3])
def devices(request):
    """1 and 3 CPU contexts, in the place of conftest's 1, 2 and 3."""
    return [mx.cpu(i) for i in range(request.param)]


class Scale(gluon.Block):
    """Weights of a dtype, between float32."""

    def __init__(self, dtype):
        super().__init__()
        self.scale = self.params.get("scale", shape=(3,), dtype=dtype, init="ones")

    def forward(self, x):
        return (x.astype(self.scale.dtype) * self.scale.data(x.context)).astype("float32")


def until(condition):
    """Wait for something that happens sooner or later, on a busy machine in a minute."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)

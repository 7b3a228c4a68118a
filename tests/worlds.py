"""On what several test files train, a layer of theirs, and how they wait."""

import time

import pytest
from gluon_mgpu.models.hybrid_block import new_parameter
from mxnet import gluon

from .conftest import cpus


@pytest.fixture(params=[1, 3])
def devices(request):
    """1 and 3 CPU contexts, in the place of conftest's 1, 2 and 3."""
    return cpus(request.param)


class Scale(gluon.Block):
    """Weights of a dtype, between float32."""

    def __init__(self, dtype):
        super().__init__()
        self.scale = new_parameter(self, "scale", shape=(3,), dtype=dtype, init="ones")

    def forward(self, x):
        return (x.astype(self.scale.dtype) * self.scale.data(x.context)).astype("float32")


def until(true, seconds=120.0):
    """Wait for something to become true, on a busy machine in a minute; return whether it has."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True

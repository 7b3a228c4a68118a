"""gluon-mgpu agree --bits: the same bits everywhere, or the first step and the tensors that differ."""

import json
import textwrap

import pytest
from click.testing import CliRunner
from gluon_mgpu.cli import main
from gluon_mgpu.tuning.agreement import NETWORKS as OURS

NETWORKS = """
import sys
import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, init
from mxnet.gluon import nn

class Layer(nn.Block):
    def __init__(self, noise):
        super().__init__()
        self.noise, self.calls = noise, 0
    def forward(self, x):
        self.calls += autograd.is_recording()
        return x * (1 + self.noise(x.context.device_id, self.calls))

def of(layers, batch_size, ctx):
    net = nn.Sequential() if layers else nn.HybridSequential()
    net.add(nn.Dense(16, activation="relu"), nn.BatchNorm(), *layers, nn.Dropout(0.3), nn.Dense(3))
    net.initialize(init.Xavier(), ctx=ctx)
    net.hybridize()
    numbers = np.random.RandomState(1)
    X = numbers.normal(size=(batch_size, 8)).astype("float32")
    trainer = mgpu.Trainer(net, "adam", {"learning_rate": 0.01})
    return net, gluon.loss.SoftmaxCrossEntropyLoss(), trainer, X, numbers.randint(0, 3, batch_size)

def alike(batch_size, ctx):
    return of([nn.Dense(16), Layer(lambda device, calls: 0.5)], batch_size, ctx)
def forward(batch_size, ctx):
    return of([Layer(lambda device, calls: device)], batch_size, ctx)
def drawn(batch_size, ctx):
    return of([Layer(lambda device, calls: np.random.uniform())], batch_size, ctx)
def third_step(batch_size, ctx):
    return of([Layer(lambda device, calls: device * (calls > 16))], batch_size, ctx)
def data(batch_size, ctx):
    net, loss, trainer, X, y = of([], batch_size, ctx)
    return net, loss, trainer, X + len(ctx), y
"""


@pytest.fixture
def agree(tmp_path):
    (tmp_path / "networks.py").write_text(textwrap.dedent(NETWORKS))

    def run(name, *options, exit_code, devices="cpu*2", processes=1):
        network = name if name in OURS else f"{tmp_path / 'networks.py'}:{name}"
        given = ["--network", network, "--devices", devices, "--processes", processes, "--output", tmp_path / "out", *options]
        words = [str(word) for word in ("agree", "--bits", *given)]
        result = CliRunner().invoke(main, words, prog_name="gluon-mgpu")
        assert result.exit_code == exit_code, (result.output, result.exception)
        return result.output.splitlines()

    run.found = lambda: json.loads((tmp_path / "out" / "bits.json").read_text())
    return run


@pytest.mark.parametrize("name", ["mlp", "alike"])
def test_the_bits_are_the_same(name, agree):
    lines = agree(name, "--steps", 3, devices="cpu*4", exit_code=0)
    assert lines[-1] == "the same bits on cpu(0); cpu(0), cpu(1); cpu(0), cpu(1), cpu(2), cpu(3)"
    found = agree.found()
    one, two, four = found["hashes"].values()
    assert one == two == four and len(one) == 3 and found["differences"] == {}
    assert len({step["gradient 1.weight" if name == "mlp" else "gradient 0.weight"] for step in one}) == 3  # it trains


@pytest.mark.parametrize("name, step", [("forward", 1), ("third_step", 3), ("drawn", 1), ("data", 1)])
def test_the_first_difference_is_named(name, step, agree):
    lines = agree(name, "--steps", 4, exit_code=1)
    assert lines[-1].startswith(f"cpu(0), cpu(1): other bits than cpu(0) from step {step} on: weight 0.weight, "), lines[-1]
    difference = agree.found()["differences"]["cpu(0), cpu(1)"]
    assert difference["step"] == step and "gradient 0.weight" in difference["tensors"]

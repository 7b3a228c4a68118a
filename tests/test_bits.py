"""gluon-mgpu agree --bits: the same bits everywhere, or the first step, layer and tensor that differ."""

import json
import textwrap

import numpy as np
import pytest
from click.testing import CliRunner
from gluon_mgpu.cli import agree as module
from gluon_mgpu.cli import main
from gluon_mgpu.trainer.virtual_shards import TreeReduction
from gluon_mgpu.tuning import bits

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

class Steeper(autograd.Function):
    def forward(self, x):
        self.device = x.context.device_id
        return x * 1
    def backward(self, gradient):
        return gradient * (1 + self.device)

class Backward(nn.Block):
    def forward(self, x):
        return Steeper()(x)

class Branch(nn.Block):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Dropout(0.1), nn.Activation("tanh")
    def forward(self, x):
        return (self.other if x.context.device_id else self.one)(x)

def of(layers, batch_size, ctx):
    net = nn.Sequential() if layers else nn.HybridSequential()
    net.add(nn.Dense(16, activation="relu"), nn.BatchNorm(), *layers, nn.Dropout(0.3), nn.Dense(3))
    net.initialize(init.Xavier(), ctx=ctx)
    net.hybridize()
    numbers = np.random.RandomState(1)
    X = numbers.normal(size=(batch_size, 8)).astype("float32")
    trainer = mgpu.Trainer(net, "adam", {"learning_rate": 0.01})
    return net, gluon.loss.SoftmaxCrossEntropyLoss(), trainer, X, numbers.randint(0, 3, batch_size)

def once(device, calls):
    if not device or hasattr(sys, "seen_by_test_bits"):
        return 0
    sys.seen_by_test_bits = True
    return 0.1

def alike(batch_size, ctx):
    return of([nn.Dense(16), Layer(lambda device, calls: 0.5)], batch_size, ctx)
def forward(batch_size, ctx):
    return of([Layer(lambda device, calls: device)], batch_size, ctx)
def drawn(batch_size, ctx):
    return of([Layer(lambda device, calls: np.random.uniform())], batch_size, ctx)
def third_step(batch_size, ctx):
    return of([Layer(lambda device, calls: device * (calls > 16))], batch_size, ctx)
def backward(batch_size, ctx):
    return of([Backward()], batch_size, ctx)
def branch(batch_size, ctx):
    return of([Branch()], batch_size, ctx)
def transient(batch_size, ctx):
    return of([Layer(once)], batch_size, ctx)
def data(batch_size, ctx):
    net, loss, trainer, X, y = of([], batch_size, ctx)
    return net, loss, trainer, X + len(ctx), y
def weights(batch_size, ctx):
    mx.random.seed(len(ctx))
    return of([], batch_size, ctx)
def step(batch_size, ctx):
    return lambda: None
def alone(batch_size, ctx):
    if mgpu.distributed.process.this_process().num_processes > 1:
        raise ValueError("not in a job")
    return of([], batch_size, ctx)
"""


@pytest.fixture
def agree(tmp_path):
    (tmp_path / "networks.py").write_text(textwrap.dedent(NETWORKS))

    def run(name, *options, exit_code, devices="cpu:2", processes=1):
        network = name if name in bits.NETWORKS else f"{tmp_path / 'networks.py'}:{name}"
        given = ["--network", network, "--devices", devices, "--processes", processes, "--output", tmp_path / "out", *options]
        words = [str(word) for word in ("agree", "--bits", *given)]
        result = CliRunner().invoke(main, words, prog_name="gluon-mgpu")
        assert result.exit_code == exit_code, (result.output, result.exception)
        return result.output.splitlines()

    run.found = lambda: json.loads((tmp_path / "out" / "bits.json").read_text())
    return run


@pytest.mark.parametrize("name", ["mlp", "alike"])
def test_the_bits_are_the_same(name, agree):
    lines = agree(name, "--steps", 3, devices="cpu:4", exit_code=0)
    assert lines[-1] == "the same bits on 1, 2, 4 devices"
    found = agree.found()
    assert list(found["hashes"]) == ["cpu(0)", "cpu(0), cpu(1)", "cpu(0), cpu(1), cpu(2), cpu(3)"]
    ends = [one["at_end"] for one in found["hashes"].values()]
    assert ends[0] == ends[1] == ends[2] and found["differences"] == {}
    assert all(len(one["steps"]) == 3 for one in found["hashes"].values())
    assert all(f" {ends[0][kind][:12]} " in lines[4] for kind in ("losses", "weights", "states"))


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_processes_are_compared(agree, tmp_path):
    lines = agree("alike", "--steps", 3, devices="cpu:2", processes=2, exit_code=0)
    assert lines[-1] == "the same bits on 1, 2 devices, and in 2 processes"
    assert "2 processes" in agree.found()["hashes"]


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_a_layer_that_differs_in_processes_is_named(agree):
    (*_, last) = agree("drawn", "--steps", 2, devices="cpu:1", processes=2, exit_code=1)
    assert "the output of layer 2 (Layer)" in last and "process 1" in last


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_a_process_that_fails_is_reported(agree):
    (*_, last) = agree("alone", "--steps", 1, devices="cpu:1", processes=2, exit_code=1)
    assert "agree: got 2 processes that ended with exit status 1" in last and "pass --processes 1" in last


BEFORE = "the first tensor of step {} that differs: "
SECOND_DEVICE = " Virtual shards: 4, 5, 6, 7; the first one on cpu(1)."
BETWEEN = "1 (BatchNorm), 2 (Backward), 3 (Dropout), 4 (Dense)."
BACKWARD = f"backward: the gradient of 1.beta; it comes from the backward pass of {BETWEEN}"


@pytest.mark.parametrize(
    "name, step, told",
    [
        ("forward", 1, BEFORE + "forward: the output of layer 2 (Layer)." + SECOND_DEVICE),
        ("third_step", 3, BEFORE + "forward: the output of layer 2 (Layer)."),
        ("drawn", 1, BEFORE + "forward: the output of layer 2 (Layer)."),
        ("backward", 1, BEFORE + BACKWARD + SECOND_DEVICE),
        pytest.param(
            "branch",
            1,
            BEFORE + "forward: the output of layer 2.other (Activation), where the first device computed ",
            marks=pytest.mark.exhaustive,
        ),
        ("data", 1, BEFORE + "the shard's data input[0]. Virtual shards: 0, 1, 2, 3, 4, 5, 6, 7; the first one on cpu(0)."),
        pytest.param("weights", 1, BEFORE + "the weight before the step 0.weight.", marks=pytest.mark.exhaustive),
        pytest.param(
            "transient", 1, "step {} has the same bits when it is computed again layer by layer.", marks=pytest.mark.exhaustive
        ),
    ],
)
def test_the_first_difference_is_named(name, step, told, agree):
    lines = agree(name, "--steps", 4, exit_code=1)
    assert lines[-1].startswith(told.format(step)), lines[-1]
    assert f"than cpu(0) from step {step} on" in lines[-2]
    difference = agree.found()["differences"]["cpu(0), cpu(1)"]
    assert difference["step"] == step
    assert ("losses" in difference["kinds"]) == (name != "backward")


def test_a_sum_that_differs_is_named(agree, monkeypatch):
    def add_to(self, left, right):
        right_add(self, left, right)
        left.arrays[0] += left.replica != right.replica

    right_add = TreeReduction._add_to
    monkeypatch.setattr(TreeReduction, "_add_to", add_to)
    (*_, last) = agree("mlp", "--steps", 1, exit_code=1)
    assert last == BEFORE.format(1) + "the sum of the gradients over the virtual shards."


def test_an_update_that_differs_is_named(agree, monkeypatch):
    def train(training, contexts, traced=0):
        found = right_train(training, contexts, traced)
        found.steps[-1]["states"][0] += "0" * (len(contexts) - 1)
        return found

    right_train = bits.train_bits
    monkeypatch.setattr(bits, "train_bits", train)
    (*_, last) = agree("mlp", "--steps", 2, exit_code=1)
    assert last == BEFORE.format(2) + "the update: gradients are equal, and weights or states differ."


def test_hashes_depend_on_values_shapes_and_dtypes():
    array = np.arange(6, dtype="float32")
    hashes = [bits._hash(one) for one in (array, array.reshape(2, 3), array.view("int32"), np.nextafter(array, 9))]
    assert len(set(hashes)) == 4
    assert bits._hash(array.copy()) == hashes[0]
    assert bits._hash(np.float32([0.0])) != bits._hash(np.float32([-0.0]))


@pytest.mark.parametrize(
    "options, told",
    [
        (["--steps", "3"], "got --steps without --bits"),
        (["--network", "networks.py:make"], "without --bits; expected mlp or resnet18"),
        (["--network", "nonsense"], "expected mlp, resnet18 or FILE.py:FUNCTION"),
        (["--bits", "--seeds", "3"], "got --seeds with --bits; expected --steps, --virtual-shards, --processes"),
        (["--bits", "--no-larger"], "got --larger with --bits"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(options, told, tmp_path):
    result = CliRunner().invoke(module.agree, [*options, "--output", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert told in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name, options, told",
    [
        ("step", [], "agree: got function from"),
        ("missing", [], "agree: got"),
        ("mlp", ["--virtual-shards", "3"], "got virtual_shards=3 on 2 devices; expected a multiple of 2"),
    ],
    ids=lambda value: str(value)[:9],
)
def test_networks_that_cannot_be_trained_are_reported(name, options, told, agree):
    assert told in " ".join(agree(name, *options, exit_code=1))

"""Fixtures: a seed, lists of CPU contexts, legacy and np arrays; and what several test files compare with."""

import gc
import math
import os
import random
import re
import signal
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")  # CPU contexts of all numbers run in one process here

import gluon_mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.distributed.process import Process
from gluon_mgpu.mxnet_internals.versions import is_mxnet2
from gluon_mgpu.trainer.precision import can_compute_bf16
from hypothesis import HealthCheck, settings
from mxnet import autograd, gluon
from mxnet.gluon import nn

from .combinations import chosen_of

collect_ignore = ["without"]  # stand-ins of packages
# from nohup or a shell's &: child processes would ignore what tests send them
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
for ignored in (signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(ignored) is signal.SIG_IGN:
        signal.signal(ignored, lambda *_: None)
os.fsync = os.fstat  # no test sees whether the disk has data; those of its order replace it themselves
# searches of blocks pass over what the modules before have left
freeze_count, gc.get_freeze_count = gc.get_freeze_count, lambda: 0

SEED = int(os.environ.get("GLUON_MGPU_TEST_SEED", "0"))
LOSS = gluon.loss.SoftmaxCrossEntropyLoss()
HYBRIDIZE = {"plain": None, "hybrid": {}, "static": {"static_alloc": True, "static_shape": True}}
OPTIMIZERS = {"momentum": ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-3}), "adam": ("adam", {"learning_rate": 0.01})}


def pytest_report_header():
    return f"seed {SEED}: set GLUON_MGPU_TEST_SEED to replay or vary it"


def pytest_addoption(parser):
    text = "run all combinations of options and tests marked exhaustive, and 500 examples of Hypothesis, not 50"
    parser.addoption("--exhaustive", action="store_true", help=text)


def pytest_configure(config):
    if is_mxnet2():  # it warns of a shared parameter in each network
        config.addinivalue_line("filterwarnings", "ignore:Parameter '.*' is already initialized:UserWarning")
    num_examples = 500 if config.getoption("exhaustive") else 50
    checks = [HealthCheck.too_slow]  # of the machine
    settings.register_profile("gluon_mgpu", deadline=None, max_examples=num_examples, suppress_health_check=checks)
    settings.load_profile("gluon_mgpu")


EXAMPLES = {  # in docstrings, of what MXNet 2 lacks
    "synchronised BatchNorm": "lockstep|batchnorm",
    "compiled passes": "compile_step",
    "Pipeline": "pipeline",
    "export": "exporters",
    "bf16 and fp16": "set_precision",
    "names of parameters": "gluon_order|write_params",
}
LONG = ("test_docs.py", "test_notebooks.py", "test_crossings.py", "test_launch_nodes.py", "test_recovery.py")


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config, items):
    if not config.getoption("exhaustive"):
        left_out = {item for item in items if "exhaustive" in item.keywords}
        left_out |= unneeded([item for item in items if item not in left_out])
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
    for item in items if is_mxnet2() else ():
        if isinstance(item, pytest.DoctestItem):
            for feature in (feature for feature, names in EXAMPLES.items() if re.search(names, item.name)):
                item.add_marker(pytest.mark.mxnet1(feature))
            for example in item.dtest.examples:
                example.source = example.source.replace("mx.nd.", "mx.np.")  # its layers take no legacy arrays
        for mark in item.iter_markers("mxnet1"):
            item.add_marker(pytest.mark.skip(reason=f"MXNet 1.9's own: {mark.args[0]}"))
    items.sort(key=lambda item: item.path.name not in LONG)  # first, so that no worker begins one at the end
    if not gluon_mgpu.devices.usable_gpus():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no GPU that MXNet can run on"))
    if not can_compute_bf16():
        for item in items:
            if item.name == "gluon_mgpu.trainer.precision.set_precision":
                item.add_marker(pytest.mark.skip(reason="MXNet cannot compute in bfloat16 on this processor"))


def pytest_collection_finish():
    gc.freeze()  # a collection of 6,000 tests and all modules takes 0.2 s, and some tests collect a hundred times


def unneeded(items):
    """The items of functions marked `each_value` or `pairwise` that hold no value, or no pair, which the others lack."""
    groups = {}
    for item in items:
        size = 1 if "each_value" in item.keywords else 2 if "pairwise" in item.keywords else 0
        if size:
            groups.setdefault((item.function, size), []).append(item)
    found = set()
    for (_, size), group in groups.items():
        chosen = chosen_of([tuple(map(id, item.callspec.params.values())) for item in group], size)
        found |= set(group) - {group[i] for i in chosen}
    return found


@pytest.fixture(autouse=True)
def seed():
    """The same random numbers in every test, whichever tests run before."""
    seed_all(SEED)
    if is_mxnet2():
        mx.npx.set_np()  # again, after a test that turned them off


def seed_all(number):
    """Seed the generators of Python, NumPy and MXNet."""
    random.seed(number)
    np.random.seed(number)
    mx.random.seed(number)


@pytest.fixture(autouse=True, scope="module")
def frozen():
    """What the modules before have left is not walked through by this one's garbage collections."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def fresh_names():
    """Layers are numbered from 0. `dense10_` sorts before `dense9_`, and Gluon updates in this order: nadam's bits show it."""
    with mx.name.NameManager():
        yield


@pytest.fixture(params=[1, 2, 3])
def devices(request):
    """1, 2 and 3 CPU contexts."""
    return cpus(request.param)


def cpus(number):
    return [mx.cpu(i) for i in range(number)]


# in the place of `devices`, where their number hardly matters
rarely = [pytest.param(cpus(number), marks=pytest.mark.exhaustive, id=str(number)) for number in (1, 3)]
mostly_two = pytest.mark.parametrize("devices", [pytest.param(cpus(2), id="2"), *rarely])


@pytest.fixture(params=["np"] if is_mxnet2() else ["nd", "np"])  # MXNet 2's layers take np arrays only
def arrays(request):
    """Legacy and np arrays; the value is `mx.nd` or `mx.np`."""
    if request.param == "np":
        mx.npx.set_np()
    yield mx.np if request.param == "np" else mx.nd
    if not is_mxnet2():
        mx.npx.reset_np()


@pytest.fixture
def without_pictures(monkeypatch):
    """A history is saved without `curves.png`, which takes longer to draw than a small network to train."""
    for name, stand_in in {"plot_history": lambda rows: None, "save": lambda figure, path: path.write_bytes(b"")}.items():
        monkeypatch.setattr(f"gluon_mgpu.loop.history.{name}", stand_in)


@pytest.fixture
def calls_to(monkeypatch):
    """A function that lists the later calls of an owner's functions, which still run: their names, or what `note` returns."""

    def watch(owner, *names, note=lambda name, *args, **options: name):
        found = []

        def noting(name, function):
            def noted(*args, **options):
                found.append(note(name, *args, **options))
                return function(*args, **options)

            return noted

        for name in names:
            monkeypatch.setattr(owner, name, noting(name, getattr(owner, name)))
        return found

    return watch


@pytest.fixture
def failing(monkeypatch):
    """A function that lets others raise an error from now on, such as that of a full disk. It returns their names, by call."""

    def fail(owner, *names, error):
        called = []

        def raising(name):
            def raise_it(*_, **__):
                called.append(name)
                raise error

            return raise_it

        for name in names:
            monkeypatch.setattr(owner, name, raising(name))
        return called

    return fail


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets: `clock[0]`, in seconds."""
    now = [1000.0]
    for name in ("monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, lambda: now[0])
    return now


@pytest.fixture
def report_every(monkeypatch):
    """A function that sets after how many batches or seconds a pass reports."""

    def use(batches=256, seconds=math.inf):
        for name, value in {"BATCHES": batches, "S": seconds}.items():
            monkeypatch.setattr(f"gluon_mgpu.loop.batch_loop.REPORT_{name}", value)

    return use


@pytest.fixture
def become(monkeypatch):
    """A function that makes this process one of a job, whose processes a stand-in answers for (None: none is asked)."""

    def join(processes=None, rank=0, num_processes=2, restart=0):
        for name, value in Process(rank, num_processes, rank, num_processes, 0, 1, restart).variables().items():
            monkeypatch.setenv(name, value)
        for name, value in {"_group": processes, "_place": (rank, num_processes)}.items():
            monkeypatch.setattr(f"gluon_mgpu.distributed.membership.{name}", lambda value=value: value)

    return join


@pytest.fixture
def without_sacrebleu(monkeypatch):
    """As with the extra `train` alone."""
    monkeypatch.setitem(sys.modules, "sacrebleu", None)


def initialized(net, ctx=None, init=None, hybridize=None):
    """The network with values, hybridized if there are options."""
    net.initialize(init or mx.init.Uniform(), ctx=ctx)  # which is Gluon's default
    if hybridize is not None:
        net.hybridize(**hybridize)
    return net


def stack(*layers, kind=nn.HybridSequential):
    """A network of these layers, without values."""
    net = kind()
    net.add(*layers)
    return net


def sequential(*layers, ctx=None, init=None, hybridize=None):
    """An initialised network of these layers."""
    return initialized(stack(*layers), ctx, init, hybridize)


def ready(net, ctx, hybridize=None, seed=SEED):
    """The network with the weights of a seed."""
    mx.random.seed(seed)
    return initialized(net, ctx, mx.init.Xavier(), hybridize)


def small_net(ctx, activation="tanh", hybridize=None, normalize=False):
    """A convolutional network without dropout, whose weights depend on the seed alone."""
    net = nn.HybridSequential()
    net.add(nn.Conv2D(4, kernel_size=3, padding=1), nn.Activation(activation))
    if normalize:
        net.add(nn.BatchNorm())
    net.add(nn.MaxPool2D(2), nn.Flatten(), nn.Dense(8, activation=activation), nn.Dense(3))
    return ready(net, ctx, hybridize)


def small_batches(sizes):
    """Batches of images (n, 1, 6, 6) and labels (n,), as NumPy arrays."""
    rng = np.random.RandomState(SEED)
    return [(rng.uniform(-1, 1, (n, 1, 6, 6)).astype("float32"), rng.randint(0, 3, n).astype("int32")) for n in sizes]


def weights_of(net, ctx=None):
    """The trainable weights on one device, in structural order, as NumPy arrays."""
    params = [param for param in net.collect_params().values() if param.grad_req != "null"]
    return [param.data(ctx or param.list_ctx()[0]).asnumpy() for param in params]


def largest_difference(left, right):
    """The largest absolute difference between two lists of NumPy arrays."""
    assert [array.shape for array in left] == [array.shape for array in right]
    return max(float(np.abs(a.astype("float64") - b).max()) for a, b in zip(left, right))


def as_array(values, ctx=None, dtype=None):
    """NumPy numbers as an array of the kind that is used now."""
    return (mx.np.array if mx.util.is_np_array() else mx.nd.array)(values, ctx=ctx, dtype=dtype or values.dtype)


def set_fresh(array, is_fresh=True):
    """Let MXNet note that a backward pass has written an array's gradient, or that a trainer has used it."""
    array._fresh_grad = is_fresh


def states_of(trainer):
    """The optimizer's states on each device, by parameter number; of a Gluon trainer as well."""
    return [updater.states for updater in trainer._updaters]


def train(net, trainer, batches, **options):
    """One step for each batch of a classification."""
    for X, y in batches:
        gluon_mgpu.train_batch(net, LOSS, trainer, X, y, **options)


def gluon_loop(net, optimizer, optimizer_params, batches):
    """The hand-written Gluon loop on one device, with the divisor that was seen: it is right, and owes us nothing."""
    (context,) = next(iter(net.collect_params().values())).list_ctx()
    trainer = gluon.Trainer(net.collect_params(), optimizer, dict(optimizer_params))
    for X, y in batches:
        data, label = as_array(X, context), as_array(y, context)
        with autograd.record():
            value = LOSS(net(data), label)
        value.backward()
        trainer.step(len(X))
    return net


def assert_house_style(error):
    """Errors read `<operation>: got <value>; expected <condition>. <What to do>.`"""
    assert re.match(r"^[\w. \-\[\]']+: got .+; expected .+[.:] .+", str(error), re.DOTALL), str(error)

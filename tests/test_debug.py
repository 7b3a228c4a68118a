"""Serial debugging: layers that are named, labels and indices that are none, numbers that stay."""

import os
import subprocess
import sys
import textwrap

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.data_parallel import debug
from gluon_mgpu.data_parallel.debug import debugging
from gluon_mgpu.errors import DataError, NonFiniteLossError, StepError, TrainerError
from gluon_mgpu.runtime import environment
from gluon_mgpu.runtime.engine import is_serial
from mxnet import autograd, gluon
from mxnet.gluon import nn

from .conftest import assert_house_style, largest_difference, small_batches, small_net, weights_of

CE = gluon.loss.SoftmaxCrossEntropyLoss


def in_a_process(code, **environment):
    """What a program says that begins with this engine."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MXNET_", "GLUON_MGPU_"))}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env={**clean, **environment}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if "start using engine" not in line]


# Layers


def test_an_error_names_the_innermost_layer(devices, arrays):
    net = nn.HybridSequential()
    inner = nn.HybridSequential()
    inner.add(nn.Dense(4, in_units=3), nn.Dense(2, in_units=5))  # 4 go in
    net.add(nn.Flatten(), inner)
    net.initialize(ctx=devices)
    net.hybridize()
    xs = [arrays.ones((2, 3), ctx=context) for context in devices]
    with debugging(net):
        for context, x in zip(devices, xs):
            with pytest.raises(StepError, match=r"in layer 1\.1 \(Dense\)") as caught, autograd.record():
                net(x)
            place = f"for shard {context.device_id} on {context} at step 1, inputs of shapes (2, 4)"
            assert place in str(caught.value)
            assert_house_style(caught.value)
            assert isinstance(caught.value.__cause__, mx.MXNetError)


def test_shards_and_steps_are_counted():
    contexts = [mx.cpu(0), mx.cpu(1)]
    net = nn.Dense(1, in_units=1)
    net.initialize(ctx=contexts)
    bad, good = ([mx.nd.array([[value]], ctx=context) for context in contexts] for value in (np.nan, 1.0))
    with debugging(net):
        for shards, told in [
            (good, ""),
            (good[:1], ""),  # fewer examples than devices
            ([good[0], bad[1]], "shard 1 on cpu(1) at step 3"),
            ([bad[0]], "shard 0 on cpu(0) at step 4"),
        ]:
            with autograd.record():
                outcome = ""
                try:
                    for x in shards:
                        net(x)
                except NonFiniteLossError as error:
                    outcome = str(error)
            assert told in outcome
            assert bool(told) == bool(outcome)
        with pytest.raises(NonFiniteLossError, match=r"shard 0 on cpu\(1\) in prediction 1"):
            net(bad[1])


def test_fit_tells_the_layer(arrays):
    net = small_net([mx.cpu(0), mx.cpu(1)], hybridize={})
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1})
    batches = small_batches([6] * 3)
    batches[2][0][5, 0, 2, 2] = np.nan
    with debugging(net, CE()), pytest.raises(NonFiniteLossError) as caught:
        mgpu.fit(net, CE(), trainer, batches, epochs=1, callbacks=[])
    told = "got 1 NaN in the inputs of HybridSequential for shard 1 on cpu(1) at step 3, inputs of shapes (3, 1, 6, 6)"
    assert told in str(caught.value)
    assert "Check the data" in str(caught.value)
    assert_house_style(caught.value)


class Log(nn.HybridBlock):
    def hybrid_forward(self, F, x):
        return F.log(x)


def test_the_cause_is_told_apart():
    net = nn.HybridSequential()
    net.add(nn.Dense(2, in_units=2), Log())
    net.initialize(mx.init.One())
    with debugging(net):
        with pytest.raises(NonFiniteLossError, match=r"2 of 4 .* layer 1 \(Log\) .* takes a logarithm of 0\.$"):
            net(mx.nd.array([[1, 1], [1, -1]]))
        net[0].weight.set_data(mx.nd.array([[1, np.inf], [1, 1]]))
        with pytest.raises(NonFiniteLossError, match=r"layer 0 \(Dense\) .* Its weight held such numbers"):
            net(mx.nd.ones((2, 2)))
        net[0].weight.set_data(mx.nd.ones((2, 2)))
        with pytest.raises(NonFiniteLossError, match=r"layer 0 \(Dense\) .* The inputs hold such numbers: check the data\.$"):
            net(mx.nd.array([[1, np.inf], [1, 1]]))
    with debugging(net, check_finite=False):
        net(mx.nd.array([[1, np.nan], [1, 1]]))


@pytest.mark.parametrize("hides", [lambda: nn.Activation("relu"), lambda: nn.Dense(3, in_units=4, activation="relu")])
def test_a_layer_that_makes_numbers_of_nan_is_told(arrays, hides):
    net = nn.HybridSequential()
    net.add(hides())
    net.initialize()
    X = np.ones((8, 4), "float32")
    X[7, 0] = np.nan
    x = arrays.array(X)
    assert np.isfinite(net(x).asnumpy()).all()  # nothing shows in what comes out
    with debugging(net), pytest.raises(NonFiniteLossError, match="got 1 NaN in the inputs of HybridSequential") as caught:
        net(x)
    assert_house_style(caught.value)
    with debugging(net, check_finite=False):
        net(x)


def test_nan_between_layers_names_the_layer_that_it_comes_into():
    class Hides(nn.Block):
        def __init__(self):
            super().__init__()
            self.inner = nn.Activation("relu")

        def forward(self, x):
            return self.inner(x / x)

    net = Hides()
    with debugging(net), pytest.raises(NonFiniteLossError, match=r"got 1 NaN in the inputs of layer inner \(Activation\)"):
        net(mx.nd.array([[0, 1]]))


def test_a_late_error_belongs_to_its_layer():
    class Fails(nn.HybridBlock):
        def hybrid_forward(self, F, x):
            return x + F.random.normal(0, -1, shape=(2, 2))  # is told only when it runs

    net = nn.HybridSequential()
    net.add(nn.Flatten(), Fails(), nn.Flatten())
    net.initialize()
    with debugging(net), pytest.raises(StepError, match=r"MXNetError .* in layer 1 \(Fails\)"):
        net(mx.nd.ones((2, 2)))


# Labels and indices


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        ([0, 99, 2, -1], r"labels 99, -1 \(2 of 4, the first at \(1,\)\)"),
        ([0, 3, 3, 3], r"labels 3 \(3 of 4, the first at \(1,\)\)"),
        ([0, 1, 2, 1.5], r"labels 1\.5 \(1 of 4, the first at \(3,\)\)"),
        ([np.nan, 1, 2, 1], r"labels nan \(1 of 4, the first at \(0,\)\)"),
    ],
)
def test_a_label_that_is_no_class(arrays, labels, told):
    loss = CE()
    net = nn.Dense(3, in_units=2)
    net.initialize()
    x, y = arrays.ones((4, 2)), arrays.array(labels, dtype="float32")
    with debugging(net, loss):
        loss(net(x), arrays.array([0, 1, 2, 1]))
        with pytest.raises(
            DataError, match=told + r" in loss .* expected whole numbers 0 to 2: one for each of 3 classes\. "
        ) as caught:
            loss(net(x), y)
    assert_house_style(caught.value)
    loss(net(x), y)  # MXNet takes the nearest one


def test_fit_tells_the_label():
    net = small_net([mx.cpu(0), mx.cpu(1)], hybridize={"static_alloc": True, "static_shape": True})
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1})
    batches = small_batches([6, 6])
    batches[1][1][4] = 3
    loss = CE()
    with debugging(net, loss), pytest.raises(DataError, match=r"labels 3 .* \(1,\)\) in loss .* shard 1 on cpu\(1\) at step 2,"):
        mgpu.fit(net, loss, trainer, batches, epochs=1, callbacks=[])


def test_labels_along_another_axis_and_probabilities(arrays):
    loss, dense = CE(axis=1), CE(sparse_label=False)
    pred = arrays.ones((2, 3, 4))
    with debugging(loss):
        loss(pred, arrays.array(np.full((2, 4), 2)))
        with pytest.raises(DataError, match="one for each of 3 classes"):
            loss(pred, arrays.array(np.full((2, 4), 3)))
    with debugging(dense):
        dense(pred, arrays.ones((2, 3, 4)) * 7)


def test_labels_of_weight_0_may_be_anything(arrays):
    """As d2l's masked loss gives them: weights (batch, steps, 1) beside labels (batch, steps)."""
    loss = CE()
    pred, label = arrays.ones((2, 2, 3)), arrays.array([[0, -1], [1, 2]])
    with debugging(loss):
        loss(pred, label, arrays.array([[[1], [0]], [[1], [1]]]))
        with pytest.raises(DataError, match="labels -1"):
            loss(pred, label, arrays.ones((2, 2, 1)))


def test_an_index_that_is_in_no_table(arrays):
    net = nn.HybridSequential()
    net.add(nn.Embedding(5, 2), nn.Dense(1, flatten=False))
    net.initialize()
    net.hybridize()
    with debugging(net):
        net(arrays.array([[0, 4]]))
        with pytest.raises(
            DataError, match=r"indices 5, -1 \(2 of 3, the first at \(0, 1\)\) in layer 0 \(Embedding\)"
        ) as caught:
            net(arrays.array([[0, 5, -1]]))
    assert_house_style(caught.value)


def test_ctc_labels():
    loss = gluon.loss.CTCLoss()
    pred = mx.nd.ones((1, 6, 4))
    with debugging(loss):
        loss(pred, mx.nd.array([[0, 2, -1]]))
        with pytest.raises(DataError, match="labels 3 .* 3 symbols without the blank"):
            loss(pred, mx.nd.array([[0, 3, -1]]))
        loss(pred, mx.nd.array([[0, 2, 9]]), None, mx.nd.array([2]))


# Nothing changes


@pytest.mark.parametrize("hybridize", [None, {}, {"static_alloc": True, "static_shape": True}], ids=["plain", "hybrid", "static"])
def test_weights_are_what_they_would_be(arrays, hybridize):
    devices = [mx.cpu(0), mx.cpu(1)]
    batches = small_batches([6, 7, 1, 6, 6])

    def train(context_manager):
        net = small_net(devices, hybridize=hybridize, normalize=True)
        trainer = mgpu.Trainer(net, "adam", {"learning_rate": 0.01})
        loss = CE()
        mgpu.train_batch(net, loss, trainer, *batches[0])  # its graph is there, and is used again afterwards
        with context_manager(net, loss):
            for X, y in batches:
                mgpu.train_batch(net, loss, trainer, X, y)
        for X, y in batches:
            mgpu.train_batch(net, loss, trainer, X, y)
        return weights_of(net)

    assert largest_difference(train(debugging), train(lambda net, loss: debug.ExitStack())) <= 1e-6


def sync_weights(num_devices, batches, bn="sync", inside=False):
    """The weights of a network with BatchNorm over its devices, converted by fit."""
    devices = [mx.cpu(i) for i in range(num_devices)]
    net, loss = small_net(devices, hybridize={}, normalize=True), CE()
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.5})
    with debugging(net, loss) if inside else debug.ExitStack():
        mgpu.fit(net, loss, trainer, batches, epochs=2, callbacks=[], bn=bn)
    mgpu.fit(net, loss, trainer, batches, epochs=1, callbacks=[], bn=bn)  # and afterwards
    return weights_of(net)


def test_a_network_is_synchronised_inside_of_debugging():
    batches = small_batches([8, 8])
    found = sync_weights(2, batches, inside=True)
    assert largest_difference(found, sync_weights(2, batches)) <= 1e-6
    assert largest_difference(found, sync_weights(1, batches)) <= 1e-4
    assert largest_difference(found, sync_weights(2, batches, bn="local")) > 1e-3


def test_synchronising_ends_inside_of_debugging():
    def train(context_manager):
        net, loss = small_net([mx.cpu(0), mx.cpu(1)], hybridize={}, normalize=True), CE()
        trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.5})
        for bn, context in (("sync", debug.ExitStack()), ("local", context_manager(net, loss)), ("local", debug.ExitStack())):
            with context:
                mgpu.fit(net, loss, trainer, small_batches([8, 8]), epochs=1, callbacks=[], bn=bn)
        return weights_of(net), [block._active for block in (net, *net._children.values())]

    found, plain = train(debugging), train(lambda net, loss: debug.ExitStack())
    assert largest_difference(found[0], plain[0]) <= 1e-6
    assert found[1] == plain[1]


def test_everything_is_put_back():
    net, loss = small_net([mx.cpu()], hybridize={}), CE()
    net[0].hybridize(False)
    loss.hybridize()
    blocks = [net, *net._children.values(), loss]
    before = [dict(vars(block)) for block in blocks]
    with pytest.raises(ZeroDivisionError), debugging(net, loss):
        assert not any(block._active for block in blocks)
        with debugging(net, loss):  # such as fit inside of it
            pass
        assert "forward" in vars(net)
        raise ZeroDivisionError
    assert [dict(vars(block)) for block in blocks] == before


def test_a_network_with_state_and_words_in_its_output():
    class Odd(nn.Block):
        def forward(self, x, note):
            return x, [None, x * 2], note

    net = Odd()
    with debugging(net):
        assert net(mx.nd.ones((1,)), "note")[2] == "note"


def test_what_is_no_network():
    with pytest.raises(TrainerError) as caught, debugging({}):
        pass
    assert_house_style(caught.value)


# The engine


@pytest.mark.parametrize("before, told", [(None, "ThreadedEnginePerDevice;"), ("ThreadedEngine", "ThreadedEngine;")])
def test_run_serially_too_late(monkeypatch, before, told):
    if is_serial():
        pytest.skip("the engine is serial")
    environ = {name: value for name, value in os.environ.items() if name != "MXNET_ENGINE_TYPE"}
    monkeypatch.setattr(os, "environ", {**environ, **({"MXNET_ENGINE_TYPE": before} if before else {})})
    with pytest.raises(TrainerError, match=f"started {told} expected NaiveEngine before the first operation") as caught:
        debug.run_serially()
    assert_house_style(caught.value)
    assert os.environ.get("MXNET_ENGINE_TYPE") == before
    assert not is_serial()


def test_run_serially_after_the_import_and_debugging_changes_no_bit():
    program = """
        import gluon_mgpu as mgpu, mxnet as mx, numpy as np
        from gluon_mgpu import debug, readiness
        from mxnet import gluon
        from mxnet.gluon import nn
        debug.run_serially()
        print(readiness.is_serial(), readiness.is_ready(mx.nd.ones((2,)) + 1))
        def train(debugged):
            mx.random.seed(0)
            net = nn.HybridSequential()
            net.add(nn.Dense(8, activation="relu"), nn.BatchNorm(), nn.Dropout(0.5), nn.Dense(3))
            net.initialize(mx.init.Xavier(), ctx=[mx.cpu(0), mx.cpu(1)])
            net.hybridize()
            loss = gluon.loss.SoftmaxCrossEntropyLoss()
            trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1, "momentum": 0.9})
            rng = np.random.RandomState(0)
            with debug.debugging(net, loss) if debugged else debug.ExitStack():
                for _ in range(5):
                    X, y = rng.uniform(-1, 1, (6, 4)).astype("float32"), rng.randint(0, 3, 6)
                    mgpu.train_batch(net, loss, trainer, X, y)
            return [param.data(mx.cpu(1)).asnumpy().tobytes() for param in net.collect_params().values()]
        print(train(True) == train(False))
        """
    assert in_a_process(program, OMP_NUM_THREADS="1") == ["True True", "True"]


@pytest.mark.parametrize(
    ("value", "asked"), [("1", True), ("yes", True), ("", False), ("0", False), ("off", False), ("OFF", False)]
)
def test_the_environment_asks(monkeypatch, value, asked):
    monkeypatch.setenv("GLUON_MGPU_DEBUG", value)
    net = nn.Dense(1, in_units=1)
    assert environment.is_debug() == asked
    with debug.debugging_if_asked(net):
        assert ("forward" in vars(net)) == asked

"""Each test tells the story of one trap of MXNet 1.9.1: what plain Gluon does, and what this toolkit does instead."""

import os
import subprocess
import sys
import textwrap
import warnings

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.errors import StaleGradientError, TrainerError
from gluon_mgpu.mxnet_internals.versions import is_mxnet2
from gluon_mgpu.trainer.slab import slice_of
from mxnet import autograd, gluon
from mxnet.gluon import nn

from .conftest import initialized, sequential, stack
from .versions import nd

CTX = [mx.cpu(0), mx.cpu(1)]
BOTH = pytest.mark.parametrize("trainer_class", [gluon.Trainer, mgpu.Trainer], ids=["gluon", "ours"])


def linear(ctx=CTX, value=1.0, **kwargs):
    """y = w x with one weight: gradients can be worked out on paper."""
    return initialized(nn.Dense(1, in_units=1, use_bias=False, **kwargs), ctx, mx.init.Constant(value))


def backward(net, inputs):
    """Record y = w x on one device for each (device, x), and go backward: dy/dw = x."""
    with autograd.record():
        outputs = [net(nd.array([[x]], ctx=context)) for context, x in inputs]
    autograd.backward(outputs)


def number(array):
    """The value of an array of one element."""
    return float(array.asnumpy().reshape(-1)[0])


def weight(net, context=CTX[0]):
    return number(net.weight.data(context))


@BOTH
def test_a_device_without_data_repeats_its_old_gradient(trainer_class):
    """A last batch that is too small for all devices: with Gluon the idle one pushes its gradient of the step before again."""
    net = linear(value=0.0)
    trainer = trainer_class(net.collect_params(), "sgd", {"learning_rate": 2.0})
    backward(net, [(CTX[0], 2.0), (CTX[1], 5.0)])
    trainer.step(2)  # w = -(2 + 5)
    backward(net, [(CTX[0], 3.0)])  # the second device is idle
    trainer.step(2)
    right, with_old_gradient = -10.0, -15.0
    assert weight(net) == (with_old_gradient if trainer_class is gluon.Trainer else right)
    if trainer_class is mgpu.Trainer:
        assert mgpu.replica_difference(net) == 0.0


def test_a_parameter_that_no_device_used_is_refused_before_anything_changes():
    net = stack(linear(), linear(), kind=nn.Sequential)
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 2.0})
    backward(net[0], [(CTX[0], 2.0), (CTX[1], 5.0)])
    with pytest.raises(StaleGradientError, match=r"1\.weight on any device"):
        trainer.step(2)
    assert (weight(net[0]), number(net[0].weight.grad(CTX[0]))) == (1.0, 2.0)
    trainer.step(2, ignore_stale_grad=True)
    assert (weight(net[0]), weight(net[1])) == (-6.0, 1.0)


def test_the_mean_of_uneven_shards_is_refused():
    """`loss.mean()` on shards of 2 and 1 examples counts the third one double; nothing in Gluon says so."""
    net = linear()
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.5})
    with pytest.raises(TrainerError, match="expected one number for each example"):
        mgpu.train_batch(net, lambda out, y: ((out - y) ** 2).mean(), trainer, np.ones((3, 1)), np.zeros((3, 1)))
    assert weight(net) == 1.0


@BOTH
def test_without_a_kvstore_every_device_goes_its_own_way(trainer_class):
    net = linear(value=0.0)
    trainer = trainer_class(net.collect_params(), "sgd", {"learning_rate": 2.0}, kvstore=None)
    backward(net, [(CTX[0], 2.0), (CTX[1], 5.0)])
    trainer.step(2)
    together = trainer_class is mgpu.Trainer
    assert [weight(net, context) for context in CTX] == ([-7.0, -7.0] if together else [-2.0, -5.0])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # MXNet leaves the file open
@BOTH
def test_states_are_loaded_into_other_layers(trainer_class, tmp_path):
    """Gluon orders parameters by their names as strings: dense10_ < dense9_, but dense10_ < dense11_. MXNet 2 has no names."""

    def named(number):
        return {} if is_mxnet2() else {"prefix": f"dense{number}_"}

    saved, loaded = nn.Sequential(), nn.Sequential()
    saved.add(*(linear(**named(number)) for number in (9, 10)))
    loaded.add(*(linear(**named(number)) for number in (10, 11)))  # the same network, made a little later
    gluons = trainer_class is gluon.Trainer
    options = ("sgd", {"learning_rate": 2.0, "momentum": 0.5})
    trainer = trainer_class(saved.collect_params() if gluons else saved, *options)
    backward(saved[0], [(context, 1.0) for context in CTX])
    backward(saved[1], [(context, 10.0) for context in CTX])
    trainer.step(2)  # momenta -2 in the first layer, -20 in the second
    trainer.save_states(str(tmp_path / "states"))
    trainer = trainer_class(loaded.collect_params() if gluons else loaded, *options)
    trainer.load_states(str(tmp_path / "states"))
    for layer in loaded:
        backward(layer, [(context, 0.0) for context in CTX])
    trainer.step(2)  # no gradient: each weight moves by half of its momentum
    moved = [weight(layer) - 1.0 for layer in loaded]
    assert moved == ([-10.0, -1.0] if gluons and not is_mxnet2() else [-1.0, -10.0])


@BOTH
def test_the_first_step_overwrites_running_statistics(trainer_class):
    """Gluon's kvstore is filled at the first step, and context 0's BatchNorm statistics are broadcast over the others'.

    Here each step moves all by the mean.
    """
    net = initialized(nn.BatchNorm(in_channels=1, momentum=0.0), CTX)
    trainer = trainer_class(net.collect_params(), "sgd", {"learning_rate": 0.1})
    with autograd.record():
        outputs = [net(nd.array([[mean - 1.0], [mean + 1.0]], ctx=context)) for context, mean in zip(CTX, (3.0, 7.0))]
    autograd.backward(outputs)
    trainer.step(4)
    means = [number(net.running_mean.data(context)) for context in CTX]
    assert means == ([3.0, 3.0] if trainer_class is gluon.Trainer else [5.0, 5.0])


@pytest.mark.parametrize("static", [False, True])
def test_what_was_evaluated_is_what_is_saved(static, tmp_path):
    """Gluon evaluates with each device's own statistics, and saves their mean."""
    net = sequential(nn.BatchNorm(in_channels=1, momentum=0.5), ctx=CTX)
    if static:
        net.hybridize(static_alloc=True, static_shape=True)
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.0})
    for _ in range(20):  # with static memory, these are written behind the engine's back
        with autograd.record():
            outputs = [net(nd.array([[mean - 1.0], [mean + 1.0]], ctx=context)) for context, mean in zip(CTX, (3.0, 7.0))]
        autograd.backward(outputs)
        trainer.step(4)
    x = np.array([[4.0], [6.0]], "float32")
    mgpu.evaluate(net, [(x, np.zeros(2))], {"sum": lambda out, y: (out.sum(), 1)})
    evaluated = [net(nd.array(x, ctx=context)).asnumpy() for context in CTX]
    net.save_parameters(str(tmp_path / "params"))
    fresh = stack(nn.BatchNorm(in_channels=1))
    fresh.load_parameters(str(tmp_path / "params"), ctx=mx.cpu(0))
    np.testing.assert_array_equal(evaluated[0], evaluated[1])
    np.testing.assert_array_equal(evaluated[0], fresh(nd.array(x)).asnumpy())
    assert number(fresh[0].running_mean.data()) == pytest.approx(5.0, abs=1e-4)


@BOTH
def test_adam_forgets_its_count_on_more_devices(trainer_class, tmp_path):
    """Gluon's states hold the update counts of the devices there were; new devices begin at 1, with larger steps."""
    options = ("adam", {"learning_rate": 0.1})

    def train(net, trainer, steps):
        for step in steps:
            backward(net, [(context, 1.0 + step) for context in net.weight.list_ctx()[:1]])
            for context in net.weight.list_ctx()[1:]:  # so that gluon's trainer takes the idle devices
                backward(net, [(context, 0.0)])
            trainer.step(2)

    one = linear(CTX[:1])
    trainer = trainer_class(one.collect_params(), *options)
    train(one, trainer, range(5))
    trainer.save_states(str(tmp_path / "states"))
    two = linear(CTX, value=weight(one))
    other = trainer_class(two.collect_params(), *options, update_on_kvstore=False)
    other.load_states(str(tmp_path / "states"))
    train(one, trainer, range(5, 8))
    train(two, other, range(5, 8))
    differences = [abs(weight(two, context) - weight(one)) for context in CTX]
    if trainer_class is gluon.Trainer:
        assert max(differences) > 1e-2
    else:
        assert max(differences) <= 1e-6


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
@BOTH
def test_set_data_between_steps_loses_the_states(trainer_class, optimizer):
    """As a WGAN clips its weights: with Gluon on several devices, the store that holds the states is made again each time."""

    def trained(trainer_class, ctx):
        net, rng = initialized(nn.Dense(2, in_units=3, use_bias=False), ctx, mx.init.One()), np.random.RandomState(0)
        trainer = trainer_class(net.collect_params(), optimizer, {"learning_rate": 0.05})
        for _ in range(4):
            with autograd.record():
                losses = [(net(x) ** 2).sum() for x in mgpu.split_and_load(rng.randn(8, 3).astype("float32"), ctx)]
            autograd.backward(losses)
            trainer.step(8)
            net.weight.set_data(net.weight.data(ctx[0]).clip(-0.9, 0.9))
        return net.weight.data(ctx[0]).asnumpy()

    off = np.abs(trained(trainer_class, CTX) - trained(gluon.Trainer, CTX[:1])).max()
    assert off > 1e-3 if trainer_class is gluon.Trainer else off < 1e-6


def test_two_shards_through_one_batch_norm_need_a_joint_backward():
    net = initialized(nn.BatchNorm(in_channels=1), CTX[:1])
    with autograd.record():
        losses = [net(nd.array([[1.0], [value]])) for value in (2.0, 4.0)]
    autograd.backward(losses)
    assert net.gamma.grad().shape == (1,)
    assert np.isfinite(net.gamma.grad().asnumpy()).all()


def test_numpy_integers_lose_their_last_digit():
    """mx.nd.array makes float32 of everything: 2**24 + 1 becomes 2**24."""
    big = np.array([2**24 + 1, 5])
    assert int(gluon.utils.split_and_load(big, CTX)[0].asnumpy()[0]) == 2**24
    assert int(mgpu.split_and_load(big, CTX)[0].asnumpy()[0]) == 2**24 + 1


def test_devices_of_one_number_count_their_updates_apart(monkeypatch):
    """MXNet counts an optimizer's updates by device number, which cpu(0) and gpu(0) share: Adam's steps would count double."""
    for trainer_class in (gluon.Trainer, mgpu.Trainer):
        net = linear(CTX)
        trainer = trainer_class(net.collect_params(), "adam", {"learning_rate": 0.1}, update_on_kvstore=False)
        for _ in range(3):
            backward(net, [(context, 1.0) for context in CTX])
            with monkeypatch.context() as patch:
                # as MXNet sees cpu(0) and gpu(0)
                patch.setattr(type(CTX[0]), "device_id", property(lambda _: 0, lambda *_: None), raising=False)
                trainer.step(1)
        if trainer_class is gluon.Trainer:
            assert is_mxnet2() or trainer.optimizer._all_index_update_counts == {0: {0: 6}}
        else:
            assert trainer.steps.update.counts() == {0: 3}
            assert mgpu.replica_difference(net) == 0.0


DOT = """
    {first}
    import gluon_mgpu as mgpu
    import mxnet as mx
    with mgpu.use_devices("cpu*2") as ctx:
        matrices = [mx.nd.ones((256, 256), ctx=context) for context in ctx]
        for _ in range(100):
            for matrix in matrices:
                mx.nd.dot(matrix, matrix)
    print("finished", mgpu.runtime.threads_of(0), mgpu.runtime.threads_of(1))
"""


def run_python(program, timeout, **environment):
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "timeout": timeout, "text": True}
    return subprocess.run([sys.executable, "-c", textwrap.dedent(program)], env={**os.environ, **environment}, **options)


NEEDS_OLD_NUMPY = pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) >= "1.24.0", reason="needs a NumPy before 1.24")


@pytest.mark.parametrize(
    "first",
    [pytest.param("pass", marks=pytest.mark.exhaustive), pytest.param("import mxnet", marks=NEEDS_OLD_NUMPY)],
    ids=["ours first", "mxnet first"],
)
def test_dot_on_two_cpu_contexts_does_not_hang(first):
    """With OMP_NUM_THREADS=2, OpenBLAS waits indefinitely; OPENBLAS_NUM_THREADS=1 does not help, and use_devices does."""
    told = run_python(DOT.format(first=first), 120, OMP_NUM_THREADS="2")
    assert "finished 1 1" in told.stdout, told.stdout


def test_threads_that_were_in_use_are_left_alone():
    """oneDNN's primitives are made for a number of threads: with another one, gradients are wrong or memory is overwritten."""
    program = """
        import gluon_mgpu as mgpu
        import mxnet as mx
        for i in range(2):
            (mx.nd.ones((2, 2), ctx=mx.cpu(i)) * 2).wait_to_read()
        with mgpu.use_devices("cpu*2"):
            print("left", mgpu.runtime.threads_of(0), mgpu.runtime.threads_of(1))
    """
    told = run_python(program, 60, OMP_NUM_THREADS="2")
    assert "left 2 2" in told.stdout
    assert "RuntimeWarning: use_devices: got contexts that have already run" in told.stdout


def test_one_thread_per_context_is_left_alone_without_a_warning():
    """This process has OMP_NUM_THREADS=1, so its contexts have run with one thread each."""
    for context in CTX:
        (nd.ones((2, 2), ctx=context) * 2).wait_to_read()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with mgpu.use_devices("cpu*2"):
            pass


@pytest.mark.parametrize("hybridize", [None, {}, {"static_alloc": True, "static_shape": True}])
def test_initialising_again_under_a_live_trainer_is_reported(hybridize):
    """A static graph goes on writing gradients into the old arrays: training stood still, without a word."""
    net = stack(linear())
    if hybridize is not None:
        net.hybridize(**hybridize)
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1})
    for _ in range(2):
        backward(net, [(context, 1.0) for context in CTX])
        trainer.step(2)
    net.initialize(mx.init.One(), ctx=CTX, force_reinit=True)
    backward(net, [(context, 1.0) for context in CTX])
    with pytest.raises(TrainerError, match="initialised again"):
        trainer.step(2)


@pytest.mark.parametrize("again", ["allreduce_grads", "step", "backward"])
def test_gradients_are_summed_once(again):
    """A second sum multiplies them by the number of devices."""
    net = linear(value=0.0)
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 1.0})
    backward(net, [(CTX[0], 2.0), (CTX[1], 5.0)])
    trainer.allreduce_grads()
    if again == "allreduce_grads":
        with pytest.raises(TrainerError, match="already summed"):
            trainer.allreduce_grads()
    elif again == "step":
        with pytest.raises(StaleGradientError):
            trainer.step(1)
    else:  # the sum was looked at and thrown away: the next one is its own
        backward(net, [(CTX[0], 1.0), (CTX[1], 1.0)])
        with pytest.raises(TrainerError, match="after allreduce_grads"):
            trainer.update(1)
        trainer.allreduce_grads()
        trainer.update(1)
        assert weight(net) == -2.0
        return
    trainer.update(1)
    assert weight(net) == -7.0


@pytest.mark.mxnet1("legacy arrays")
def test_the_divisor_is_the_number_of_examples():
    """Losses along the wrong axis of a TNC batch were counted as examples."""
    loss, tnc = gluon.loss.L2Loss(), nn.Dense(1, in_units=1, flatten=False)
    tnc.initialize(ctx=CTX)
    trainer = mgpu.Trainer(tnc, "sgd", {"learning_rate": 0.5})
    X, y = np.ones((7, 5, 1), "float32"), np.ones((7, 5, 1), "float32")

    def split(X, y, devices):
        return mgpu.split_batch(X, y, devices, batch_axis=1)

    def known(X, y, devices, batch_axis=1):
        return mgpu.split_batch(X, y, devices, batch_axis=batch_axis)

    with pytest.raises(TrainerError, match="7, 7. examples for a batch of 7"):
        mgpu.train_batch(tnc, loss, trainer, X, y, split_f=split)
    assert mgpu.train_batch(tnc, gluon.loss.L2Loss(batch_axis=1), trainer, X, y, split_f=known).num_examples == 5


def test_a_convolutions_weight_lies_in_no_bucket():
    """On a CPU, oneDNN writes it in another layout, beyond a view's end, and the gradient of a transposed convolution too."""
    net = initialized(gluon.nn.Conv2D(32, 3, in_channels=16), [mx.cpu(0), mx.cpu(1)])
    net(nd.ones((1, 16, 3, 3)))
    mgpu.Trainer(net, "sgd")
    assert slice_of(net.weight) is None and slice_of(net.bias) is not None

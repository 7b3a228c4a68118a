"""runtime/gradient_flags.py: the fresh flags of gradients, read in memory and through MXNet's C interface."""

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu import runtime
from gluon_mgpu.runtime import gradient_flags
from gluon_mgpu.runtime.gradient_flags import Flags, why_not_memory


@pytest.fixture
def decide_again():
    """Let a process decide again how it reads flags, and once more after the test."""
    why_not_memory.cache_clear()
    yield
    why_not_memory.cache_clear()


def variables(num_params, num_replicas):
    found = [[mx.nd.ones((3,), ctx=mx.cpu(replica)) for replica in range(num_replicas)] for _ in range(num_params)]
    for replicas in found:
        mx.autograd.mark_variables(replicas, [weight.copy() for weight in replicas])
    return found


@pytest.fixture(params=["memory", "another machine", "another layout", "another byte", "no memory", "switched off"])
def way(request, monkeypatch, decide_again):
    if request.param == "another machine":
        monkeypatch.setattr(gradient_flags.platform, "machine", lambda: "aarch64")
    if request.param == "another layout":
        monkeypatch.setattr(gradient_flags, "_INFO_IN_NODE", 8)  # leads to another pointer, or to none
    if request.param == "another byte":
        monkeypatch.setattr(gradient_flags, "_FLAG_IN_INFO", 81)
    if request.param == "no memory":
        monkeypatch.setattr(gradient_flags, "_MEMORY", "/proc/self/none")
    if request.param == "switched off":
        monkeypatch.setenv("GLUON_MGPU_GRADIENT_FLAGS", "api")
    return request.param


def fresh(weights):
    return [[bool(weight._fresh_grad) for weight in replicas] for replicas in weights]


def test_flags_are_those_of_mxnet(way):
    weights = variables(3, 2)
    flags = Flags(weights)
    assert (flags._memory is not None) == (way == "memory")
    assert not flags.all() and not flags.read().any()
    weights[2][1]._fresh_grad = True
    assert flags.read().tolist() == [[False, False], [False, False], [False, True]] == fresh(weights)
    with mx.autograd.record():
        losses = [sum((weight * 2).sum() for weight in column) for column in zip(*weights)]
    mx.autograd.backward(losses)
    assert flags.all() and all(map(all, fresh(weights)))
    flags.clear([True, False, True])
    assert flags.read().tolist() == [[False, False], [True, True], [False, False]] == fresh(weights)
    flags.clear()
    assert not flags.read().any() and fresh(weights) == [[False, False]] * 3


def test_finding_flags_does_not_change_them(way):
    weights = variables(2, 2)
    weights[0][1]._fresh_grad = True
    assert Flags(weights).read().tolist() == [[False, True], [False, False]] == fresh(weights)


def test_all_of_no_parameters_are_fresh(way):
    flags = Flags([])
    assert flags.all() and flags.read().size == 0
    flags.clear()


def test_marked_memory_lives_as_long_as_its_flags(way):
    """Flags must not write memory that MXNet has given to other variables."""
    weights = variables(1, 2)
    flags = Flags(weights)
    for replica, weight in enumerate(weights[0]):
        mx.autograd.mark_variables([weight], [mx.nd.zeros((3,), ctx=mx.cpu(replica))])
    others = variables(50, 2)
    for replicas in others:
        for weight in replicas:
            weight._fresh_grad = True
    flags.clear()
    assert all(map(all, fresh(others)))
    weights[0][0]._fresh_grad = True
    assert Flags(weights).read().tolist() == [[True, False]]


def step_losses(ctx):
    """The losses of three momentum steps; the last batch reaches the first device only."""
    mx.random.seed(3)
    np.random.seed(3)
    net = mx.gluon.nn.Dense(2, in_units=3)
    net.initialize(mx.init.Normal(0.1), ctx=ctx, force_reinit=True)
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1, "momentum": 0.9})
    for size in (4, 4, 1):
        x = np.arange(size * 3, dtype="float32").reshape(size, 3) / 10
        shards = [part for part in np.array_split(x, len(ctx)) if len(part)]
        with mx.autograd.record():
            losses = [(net(mx.nd.array(part, ctx=c)) ** 2).sum() for part, c in zip(shards, ctx)]
        mx.autograd.backward(losses)
        trainer.step(size)
    return [net.weight.data(c).asnumpy().tolist() for c in ctx]


def test_training_is_the_same_either_way(way):
    """A device without data takes part with zeros, however the flags are read."""
    ctx = [mx.cpu(0), mx.cpu(1)]
    found = step_losses(ctx)
    assert bool(why_not_memory()) == (way != "memory")
    assert found[0] == found[1]
    on_one_device = step_losses(ctx[:1])[0]
    assert np.abs(np.array(found[0]) - on_one_device).max() <= 1e-6


@pytest.mark.parametrize("byte", [79, 81, 0])
def test_a_failed_self_check_is_final(monkeypatch, decide_again, byte):
    """A process that found another layout reads all flags through the C interface, until it ends."""
    with monkeypatch.context() as other_layout:
        other_layout.setattr(gradient_flags, "_FLAG_IN_INFO", byte)
        assert not gradient_flags._self_check()
        assert "differ" in why_not_memory()
    assert gradient_flags._self_check()
    flags = Flags(variables(2, 2))
    assert flags._memory is None and not flags.read().any()


def test_the_self_check_compares_both_values(monkeypatch, decide_again):
    """A byte that never changes agrees with a flag half of the time."""
    for value in (0, 1):
        with monkeypatch.context() as constant:
            constant.setattr(gradient_flags, "_read_byte", lambda memory, address, value=value: value)
            assert not gradient_flags._self_check()


def test_the_self_check_compares_what_is_written(monkeypatch, decide_again):
    """Flags that can be read at their address, and not written there, are not used."""
    monkeypatch.setattr(gradient_flags, "_memory_between", lambda addresses: np.zeros(max(addresses) - min(addresses) + 1, bool))
    assert not gradient_flags._self_check()


@pytest.mark.parametrize("value", ["api", "API"])
def test_the_switch_chooses_the_c_interface(monkeypatch, decide_again, value):
    monkeypatch.setenv("GLUON_MGPU_GRADIENT_FLAGS", value)
    monkeypatch.setattr(gradient_flags, "_self_check", lambda: pytest.fail("it was switched off"))
    calls = []
    get, set_ = gradient_flags._flag_functions()
    monkeypatch.setattr(gradient_flags, "_flag_functions", lambda: (lambda *args: calls.append(1) or get(*args), set_))
    flags = Flags(variables(2, 2))
    assert flags._memory is None and not flags.read().any() and len(calls) == 4
    (setting,) = [one for one in runtime.settings() if one.name == "gradient flags"]
    assert (setting.value, setting.source) == ("C interface", "environment")
    assert "GLUON_MGPU_GRADIENT_FLAGS=api" in setting.reason


def test_settings_show_how_flags_are_read(monkeypatch, decide_again):
    def shown():
        return [(one.value, one.source) for one in runtime.settings() if one.name == "gradient flags"]

    expected = "C interface" if why_not_memory() else "memory"
    assert shown() == [(expected, "gluon_mgpu")]
    why_not_memory.cache_clear()
    monkeypatch.setattr(gradient_flags.platform, "machine", lambda: "aarch64")
    assert shown() == [("C interface", "gluon_mgpu")]


def test_memory_that_cannot_be_read_gives_no_addresses(monkeypatch):
    """A container may forbid it after the self-check has read it: flags are then read through the C interface."""
    found = variables(2, 1)
    handles = [weight.handle for weights in found for weight in weights]
    assert why_not_memory() or len(gradient_flags._addresses_of_flags(handles)) == 2
    monkeypatch.setattr(gradient_flags, "_MEMORY", "/proc/self/no such file")
    assert gradient_flags._addresses_of_flags(handles) == []

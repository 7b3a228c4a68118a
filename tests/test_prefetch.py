"""Loading ahead: the same shards as split_batch's, errors in order."""

import functools
import importlib
import traceback

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.data.prefetch import NUM_HELD, prefetch
from gluon_mgpu.data_parallel import sharding
from gluon_mgpu.devices import transfer
from gluon_mgpu.errors import DeviceError, ShardError, TrainerError
from gluon_mgpu.nested import leaves
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mxnet import autograd

from .conftest import LOSS, small_batches, small_net
from .test_no_sync import waits  # noqa: F401

module = importlib.import_module("gluon_mgpu.data.prefetch")  # a name that the package may give to the function
CPU = mx.cpu(0)
BECOMES = {  # what a NumPy dtype becomes on a device: the README's rule
    "float64": "float32",
    "float32": "float32",
    "float16": "float16",
    "int16": "int32",
    "uint16": "int32",
    "uint32": "int64",
    "int64": "int64",
    "int32": "int32",
    "uint8": "uint8",
    "int8": "int8",
    "bool": "bool",
}


def same(left, right):
    """Whether two lists of shards are the same to the bit: form, kind, dtype, device and numbers."""
    assert [path for path, _ in leaves(left)] == [path for path, _ in leaves(right)]
    for (_, a), (_, b) in zip(leaves(left), leaves(right)):
        assert (type(a), a.dtype, a.context, a.shape) == (type(b), b.dtype, b.context, b.shape)
        assert a.asnumpy().tobytes() == b.asnumpy().tobytes()


def numbered(count, size=2):
    """`count` batches, the numbers of which say which one it is."""
    return [(np.full((size, 3), i, "float32"), np.full(size, i, "int32")) for i in range(1, count + 1)]


def numbers(shards):
    """Which batches these shards are of."""
    return [int(Xs[0].asnumpy().flat[0]) for Xs, _ in shards]


@st.composite
def epochs(draw):
    """Batches of nested data of one form, the sizes and dtypes of which vary, and where the examples are."""
    axis = draw(st.sampled_from([0, 1]))
    rest = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    dtypes = draw(st.lists(st.sampled_from(sorted(BECOMES)), min_size=3, max_size=3))
    rng = np.random.RandomState(draw(st.integers(0, 99)))

    def array(size, dtype):
        shape = tuple(rest[:axis] + [size] + rest[axis:])
        return (rng.uniform(0, 100, shape)).astype(dtype)

    sizes = draw(st.lists(st.sampled_from([4, 4, 4, 7, 1]), min_size=1, max_size=8))
    batches = [({"a": array(n, dtypes[0]), "b": [array(n, dtypes[1])]}, array(n, dtypes[2])) for n in sizes]
    return axis, batches


@pytest.mark.each_value
@pytest.mark.parametrize("devices", [1, 3], indirect=True)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(epochs(), st.integers(1, 3), st.sampled_from([None, mx.cpu(7)]), st.sets(st.integers(0, 7)))
def test_shards_are_those_of_split_batch_also_when_some_are_kept(arrays, devices, epoch, num_batches, pinned, kept):
    axis, batches = epoch
    split_f = functools.partial(mgpu.split_batch, batch_axis=axis)
    given_out = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "_pinned", lambda ctx: pinned)
        for i, shards in enumerate(prefetch(batches, devices, split_f=split_f, num_batches=num_batches)):
            same(shards, split_f(*batches[i], devices))
            if i in kept:
                given_out.append((i, shards))
            del shards
    for i, (Xs, ys) in given_out:
        same((Xs, ys), split_f(*batches[i], devices))
        for X, parts in [(ys, batches[i][1]), ([x["a"] for x in Xs], batches[i][0]["a"])]:  # NumPy's own split, and our rule
            expected = [part for part in np.array_split(parts, len(devices), axis=axis) if part.shape[axis]]
            for shard, part in zip(X, expected):
                assert isinstance(shard, arrays.ndarray if arrays is mx.np else mx.nd.NDArray)
                assert np.array_equal(shard.asnumpy(), part.astype(BECOMES[parts.dtype.name]))


# ---- loading


def test_loading_waits_for_no_worker_thread_and_a_loop_that_runs_ahead_is_held_up(calls_to, devices):
    """Writing an array at once waits for a worker thread of the engine."""
    synced, waited = calls_to(mx.nd.NDArray, "_sync_copyfrom"), calls_to(module, "wait_until_unused")
    mx.nd.waitall()
    for _ in prefetch(numbered(20, size=3), devices):
        pass
    assert (len(synced), len(waited)) == (0, (20 - NUM_HELD) * 2 * len(devices))


def test_on_a_gpu_arrays_go_by_pinned_memory(monkeypatch, arrays):
    assert transfer._pinned(mx.gpu(3)) == mx.cpu_pinned(3)
    assert transfer._pinned(mx.cpu(3)) is None
    copied = []
    monkeypatch.setattr(transfer, "_pinned", lambda ctx: copied.append(ctx) or mx.cpu(9))  # stands in for pinned memory
    upload = transfer.Uploads()
    held = [upload(np.full((2, 3), number, "float32"), CPU, np.dtype("float32")) for number in range(4)]
    assert copied == [CPU] * 4
    assert [(shard.context, sorted(set(shard.asnumpy().flat))) for shard in held] == [(CPU, [number]) for number in range(4)]


def test_pinned_memory_is_used_again_and_not_before_its_copy(monkeypatch, arrays):
    """MXNet page-locked an array for every shard of every batch."""
    monkeypatch.setattr(transfer, "_pinned", lambda ctx: mx.cpu(9))
    made, empty = [], mx.nd.empty
    monkeypatch.setattr(mx.nd, "empty", lambda *args, **options: made.append(options["ctx"]) or empty(*args, **options))
    upload, slow = transfer.Uploads(), mx.nd.ones((700, 700), ctx=CPU)
    for _ in range(20):  # the copies wait behind it
        slow = mx.nd.FullyConnected(slow, slow, no_bias=True, num_hidden=700)
    held = [upload(np.full((2, size), number, "float32"), CPU, np.dtype("float32")) for number in range(9) for size in (3, 5)]
    assert made == [mx.cpu(9)] * 4  # two for each shape
    assert [sorted(set(shard.asnumpy().flat)) for shard in held] == [[number] for number in range(9) for _ in range(2)]


def test_the_shards_of_a_plan_use_the_same_pinned_memory(monkeypatch):
    monkeypatch.setattr(transfer, "_pinned", lambda ctx: mx.cpu(9))
    monkeypatch.setattr(sharding, "slicer", lambda *args: None)  # as for GPUs
    made, empty = [], mx.nd.empty
    monkeypatch.setattr(mx.nd, "empty", lambda *args, **options: made.append(options["ctx"]) or empty(*args, **options))
    for _ in prefetch(numbered(10, size=4), [mx.cpu(0), mx.cpu(1)]):
        pass
    assert len(made) == 8  # two for each device, of data and of labels


# ---- the order of work


@pytest.mark.parametrize(
    "num_batches, expected", [(1, [1, 2, 3, 4, 5]), (2, [1, 3, 4, 5, 5]), (3, [1, 4, 5, 5, 5]), (9, [1] + [5] * 4)]
)
def test_batches_are_loaded_while_the_step_before_runs(num_batches, expected):
    drawn, split = [], []

    def batches():
        for batch in numbered(5):
            drawn.append(batch)
            yield batch

    def split_f(X, y, devices):
        split.append(X)
        return mgpu.split_batch(X, y, devices)

    loaded = [(len(drawn), len(split)) for _ in prefetch(batches(), [CPU], split_f=split_f, num_batches=num_batches)]
    assert loaded == [(count, count) for count in expected]


def test_an_iterator_may_write_each_batch_into_the_same_arrays():
    def reuses():
        X, y = mx.nd.zeros((2, 3)), mx.nd.zeros(2)
        for i in range(1, 5):
            X[:], y[:] = i, i
            yield X, y

    assert numbers(prefetch(reuses(), [CPU])) == [1, 2, 3, 4]


def test_nothing_is_drawn_before_it_is_asked_for():
    drawn = []
    prefetch((drawn.append(i) for i in range(3)), [CPU])
    assert drawn == []


def test_a_step_that_draws_from_it_does_not_wait(devices, waits):  # noqa: F811
    net = small_net(devices)
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.01})
    batches = small_batches([6, 6, 5, 2])  # not more than may be in use
    mgpu.train_batch(net, LOSS, trainer, *batches[0])
    mx.nd.waitall()
    del waits[:]
    for Xs, ys in prefetch(batches, devices):
        with autograd.record():
            losses = [LOSS(net(X), y) for X, y in zip(Xs, ys)]
        trainer.backward(losses)
        trainer.step(sum(len(y) for y in ys))
    assert waits == []


# ---- errors


def broken(count):
    yield from numbered(count)
    raise OSError("disk on fire")


@pytest.mark.parametrize("num_batches", [1, 2, 5])
def test_batches_before_an_error_of_the_iterator_come_first(num_batches):
    seen = []
    with pytest.raises(OSError, match="^disk on fire$") as caught:
        for shards in prefetch(broken(3), [CPU], num_batches=num_batches):
            seen.append(shards)
    assert numbers(seen) == [1, 2, 3]
    assert "broken" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]


@pytest.mark.parametrize("bad, error", [((np.zeros(2), np.zeros(4)), ShardError), (5, TrainerError), ((1, 2, 3), TrainerError)])
def test_batches_before_one_that_cannot_be_split_come_first(bad, error):
    seen = []
    with pytest.raises(error):
        for shards in prefetch([*numbered(3), bad, *numbered(2)], [CPU], num_batches=3):
            seen.append(shards)
    assert numbers(seen) == [1, 2, 3]


@pytest.mark.parametrize("wrong", [{"data_iter": 5}, {"num_batches": 0}, {"split_f": "split"}, {"ctx": []}, {"ctx": [CPU, CPU]}])
def test_wrong_arguments_are_refused_at_once(wrong):
    arguments = {"data_iter": numbered(1), "ctx": [CPU], **wrong}
    with pytest.raises((TrainerError, DeviceError)):
        prefetch(**arguments)

"""Loading ahead: the same shards as split_batch's, memory that nobody sees change, errors in order, no thread left behind."""

import functools
import importlib
import subprocess
import sys
import threading
import time
import traceback

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.data_parallel.prefetch import Buffers, can_count_holders, num_holders, prefetch
from gluon_mgpu.errors import DeviceError, ShardError, TrainerError
from gluon_mgpu.loop.epoch import EpochOptions, run_epoch
from gluon_mgpu.loop.metrics import DeviceSums
from gluon_mgpu.nested import leaves
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mxnet import autograd, gluon

from .conftest import assert_house_style, small_batches, small_net
from .test_no_sync import waits  # noqa: F401

module = importlib.import_module("gluon_mgpu.data_parallel.prefetch")  # a name that the package may give to the function
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


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "gluon_mgpu.data_parallel.prefetch"]


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


@pytest.mark.parametrize("devices", [1, 3], indirect=True)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    epochs(),
    st.sampled_from([None, "float32", "int32"]),
    st.integers(1, 3),
    st.sampled_from([None, mx.cpu(7)]),
    st.sets(st.integers(0, 7)),
)
def test_shards_are_those_of_split_batch_also_when_some_are_kept(arrays, devices, epoch, dtype, num_batches, pinned, kept):
    axis, batches = epoch
    split_f = functools.partial(mgpu.split_batch, batch_axis=axis, dtype=dtype)
    given_out = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_pinned", lambda ctx: pinned)
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
                assert np.array_equal(shard.asnumpy(), part.astype(dtype or BECOMES[parts.dtype.name]))


def test_mxnet_arrays_and_lists_pass_as_they_do_in_a_split(arrays, devices):
    batches = [(arrays.ones((4, 2)), [1, 2, 3, 4]), (arrays.zeros((3, 2)), [5, 6, 7])]
    for shards, batch in zip(prefetch(batches, devices), batches):
        same(shards, mgpu.split_batch(*batch, devices))


def test_what_cannot_be_split_is_refused_as_by_split_batch():
    with pytest.raises(ShardError) as expected:
        mgpu.split_batch(np.zeros((0, 2)), np.zeros(0), [CPU])
    with pytest.raises(ShardError) as caught:
        list(prefetch([(np.zeros((0, 2)), np.zeros(0))], [CPU]))
    assert str(caught.value) == str(expected.value)
    with pytest.raises(ShardError, match="expected a dtype that MXNet has"):
        list(prefetch([(np.zeros(2, "complex64"), np.zeros(2))], [CPU]))


# ---- memory


@pytest.fixture
def created(monkeypatch):
    """The arrays that buffers had to make."""
    made = []
    empty = mx.nd.empty
    can_count_holders()
    monkeypatch.setattr(mx.nd, "empty", lambda *arguments, **options: made.append(arguments) or empty(*arguments, **options))
    return made


def test_this_build_of_mxnet_lets_holders_be_counted():
    assert can_count_holders()


def load(buffers, number, dtype="float32"):
    with buffers.used():
        return buffers.load(np.full((2, 3), number, dtype), CPU, np.dtype(dtype))


def test_memory_that_nobody_holds_is_written_again(arrays, created):
    buffers = Buffers(4)
    for number in range(10):
        assert load(buffers, number).asnumpy().tolist() == [[number] * 3] * 2
    assert len(created) == 1


def test_a_pass_writes_into_memory_that_earlier_batches_left(created):
    def run_batch(X, y):
        Xs, ys = mgpu.split_batch(X, y, [CPU])
        losses = [X.sum(axis=1) for X in Xs]
        mx.nd.waitall()
        return mgpu.Batch(losses, ys, losses, len(X))

    run_epoch(numbered(40), run_batch, DeviceSums(), EpochOptions("fit"))
    assert 2 <= len(created) < 40  # 80 without; the engine lets go of an array a moment after it has used it


def test_prefetch_writes_into_memory_that_earlier_batches_left(created):
    for _ in prefetch(numbered(40), [CPU]):
        pass
    assert 2 <= len(created) <= 8


@pytest.fixture
def waiting(monkeypatch):
    """How often a worker thread of the engine was waited for, to write an array."""
    calls = []
    sync = mx.nd.NDArray._sync_copyfrom
    monkeypatch.setattr(mx.nd.NDArray, "_sync_copyfrom", lambda array, data: (calls.append(1), sync(array, data))[1])
    return calls


def test_loading_waits_for_no_worker_thread(waiting):
    buffers = Buffers(4)
    for number in range(20):
        load(buffers, number)
    assert not waiting


def test_a_loop_that_runs_ahead_of_the_devices_is_held_up(waiting):
    buffers, kept = Buffers(4), []
    for number in range(20):
        kept.append(load(buffers, number))
        assert kept[-1].asnumpy().tolist() == [[number] * 3] * 2
    assert 10 <= len(waiting) <= 16


def test_other_shapes_and_dtypes_have_memory_of_their_own(created):
    buffers = Buffers(4)
    for _ in range(3):
        assert load(buffers, 1, "int32").dtype == np.int32
        assert load(buffers, 1, "float32").dtype == np.float32
    assert len(created) == 2


HOLDERS = {
    "the array": lambda x: x,
    "a slice": lambda x: x[0:1],
    "a row": lambda x: x[1],
    "another shape": lambda x: x.reshape((3, 2)),
    "another handle": lambda x: x.detach(),
    "the legacy array": lambda x: x.as_nd_ndarray(),
    "the np array": lambda x: x.as_np_ndarray(),
    "a slice of a slice": lambda x: x[0:2][1:2],
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_what_the_user_holds_does_not_change(holder):
    buffers = Buffers(3)
    held = []
    for number in range(8):
        held.append(HOLDERS[holder](load(buffers, number)))
    assert [sorted(set(one.asnumpy().flat)) for one in held] == [[number] for number in range(8)]


def test_what_another_library_holds_does_not_change():
    buffers = Buffers(3)
    capsule = load(buffers, 7).to_dlpack_for_read()
    for number in range(5):
        load(buffers, number)
    assert mx.nd.from_dlpack(capsule).asnumpy().tolist() == [[7] * 3] * 2


@pytest.mark.parametrize("hybridize", [None, {}, {"static_alloc": True}, {"static_alloc": True, "static_shape": True}])
def test_a_backward_pass_to_come_finds_what_its_forward_pass_saw(arrays, hybridize):
    """Python holds nothing of the shard any more, and nothing is queued that reads it: only the recorded graph has it."""
    net = gluon.nn.Dense(1, use_bias=False, in_units=3)
    net.initialize(mx.init.One())
    if hybridize is not None:
        net.hybridize(**hybridize)
    buffers = Buffers(3)
    with autograd.record():
        outputs = [net(load(buffers, number)) for number in (1, 10)]
    for output in outputs:
        output.wait_to_read()
    for number in range(5):
        load(buffers, 1000 + number)
    for output, number in zip(outputs, (1, 10)):
        output.backward()
        assert net.weight.grad().asnumpy().tolist() == [[2.0 * number] * 3]


def test_what_the_user_attaches_to_a_shard_is_not_on_the_next_one(arrays):
    buffers = Buffers(3)
    shard = load(buffers, 1)
    shard.attach_grad()
    with autograd.record():
        loss = (shard * shard).sum()
    loss.backward()
    loss.wait_to_read()
    del shard, loss
    mx.nd.waitall()
    assert load(buffers, 2).grad is None


def test_few_arrays_are_kept_whatever_shapes_come():
    buffers = Buffers(3)
    for size in range(1, 30):
        with buffers.used():
            mgpu.split_batch(np.zeros((size, 2)), np.zeros(size), [CPU])
        assert len(buffers._arrays) <= 6


def test_few_arrays_are_kept_for_a_user_who_keeps_all():
    buffers = Buffers(3)
    kept = [load(buffers, number) for number in range(20)]
    assert len(buffers._arrays) == 3
    assert len(kept) == 20


def test_where_holders_cannot_be_counted_every_array_is_new(monkeypatch, devices, created):
    monkeypatch.setattr(module, "can_count_holders", lambda: False)
    batches = numbered(6, size=5)
    for shards, batch in zip(prefetch(batches, devices), batches):
        same(shards, mgpu.split_batch(*batch, devices))
    assert created == []


def test_a_layout_that_is_another_is_found_out(monkeypatch):
    monkeypatch.setattr(module, "num_holders", lambda array: 1)
    assert can_count_holders.__wrapped__() is False


def test_holders_are_counted():
    x = mx.nd.ones((4, 2))
    x.wait_to_read()
    views = [x[0:2], x.reshape((8,)), x.detach()]
    assert num_holders(x) == 4
    del views
    assert num_holders(x) == 1


def test_on_a_gpu_arrays_go_by_pinned_memory(monkeypatch, arrays, created):
    assert module._pinned(mx.gpu(3)) == mx.cpu_pinned(3)
    assert module._pinned(mx.cpu(3)) is None
    monkeypatch.setattr(module, "_pinned", lambda ctx: mx.cpu(9))  # stands in for pinned memory
    buffers, held = Buffers(3), []
    for number in range(8):
        held.append(load(buffers, number))
        mx.nd.waitall()
    assert [shard.context for shard in held] == [CPU] * 8
    assert [sorted(set(shard.asnumpy().flat)) for shard in held] == [[number] for number in range(8)]
    assert {array.context for _, array in buffers._arrays} == {mx.cpu(9)}


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


def test_nothing_is_drawn_before_it_is_asked_for():
    drawn = []
    prefetch((drawn.append(i) for i in range(3)), [CPU])
    prefetch((drawn.append(i) for i in range(3)), [CPU], background=True).close()
    assert drawn == []
    assert threads() == []


def test_a_step_that_draws_from_it_does_not_wait(devices, waits):  # noqa: F811
    net = small_net(devices)
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.01})
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    batches = small_batches([6, 6, 6, 5, 6, 2])
    mgpu.train_batch(net, loss, trainer, *batches[0])
    mx.nd.waitall()
    del waits[:]
    for Xs, ys in prefetch(batches, devices):
        with autograd.record():
            losses = [loss(net(X), y) for X, y in zip(Xs, ys)]
        mgpu.backward(losses)
        trainer.step(sum(len(y) for y in ys))
    assert waits == []


# ---- errors


def broken(count):
    yield from numbered(count)
    raise OSError("disk on fire")


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("num_batches", [1, 2, 5])
def test_batches_before_an_error_of_the_iterator_come_first(background, num_batches):
    seen = []
    with pytest.raises(OSError, match="^disk on fire$") as caught:
        for shards in prefetch(broken(3), [CPU], num_batches=num_batches, background=background):
            seen.append(shards)
    assert numbers(seen) == [1, 2, 3]
    assert "broken" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert threads() == []


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(
    "bad, error", [((np.zeros((2, 3)), np.zeros(4)), ShardError), (5, TrainerError), ((1, 2, 3), TrainerError)]
)
def test_batches_before_one_that_cannot_be_split_come_first(background, bad, error):
    seen = []
    with pytest.raises(error) as caught:
        for shards in prefetch([*numbered(3), bad, *numbered(2)], [CPU], num_batches=3, background=background):
            seen.append(shards)
    assert_house_style(caught.value)
    assert numbers(seen) == [1, 2, 3]
    assert threads() == []


def test_an_interrupt_inside_the_iterator_surfaces(recwarn):
    def interrupted():
        yield from numbered(1)
        raise KeyboardInterrupt

    for background in (False, True):
        with pytest.raises(KeyboardInterrupt):
            list(prefetch(interrupted(), [CPU], background=background))
    assert threads() == []


@pytest.mark.parametrize("num_batches", [0, -1, 1.5, True, None, "2"])
def test_a_wrong_number_is_refused_at_once(num_batches):
    with pytest.raises(TrainerError, match="^prefetch: got num_batches=") as caught:
        prefetch([], [CPU], num_batches=num_batches)
    assert_house_style(caught.value)


@pytest.mark.parametrize("wrong", [{"data_iter": 5}, {"split_f": "split"}, {"devices": []}, {"devices": [CPU, CPU]}])
def test_wrong_arguments_are_refused_at_once(wrong):
    arguments = {"data_iter": numbered(1), "devices": [CPU], **wrong}
    with pytest.raises((TrainerError, DeviceError)) as caught:
        prefetch(**arguments)
    assert_house_style(caught.value)


def test_no_batch_gives_no_shards():
    assert list(prefetch([], [CPU])) == list(prefetch([], [CPU], background=True)) == []


# ---- the thread


def test_the_thread_draws_a_few_batches_ahead_and_no_more():
    drawn, enough = [], threading.Event()

    def endless():
        while True:
            drawn.append(len(drawn) + 1)
            if len(drawn) >= 4:
                enough.set()
            yield numbered(1)[0]

    shards = prefetch(endless(), [CPU], num_batches=3, background=True)
    next(shards)
    assert enough.wait(240)  # one was handed out, three more are drawn without being asked for
    assert not threading.Event().wait(0.2)
    assert len(drawn) == 4
    shards.close()
    assert threads() == []


@pytest.mark.parametrize("end", ["close", "throw", "forget"])
def test_no_thread_is_left_behind(end):
    def endless():
        while True:
            yield from numbered(5)

    shards = prefetch(endless(), [CPU], background=True)
    assert numbers([next(shards), next(shards)]) == [1, 2]
    assert len(threads()) == 1
    if end == "close":
        shards.close()
    elif end == "throw":
        with pytest.raises(KeyboardInterrupt):
            shards.throw(KeyboardInterrupt())
    del shards
    assert threads() == []


def test_closing_waits_for_the_item_that_is_being_drawn():
    """Who reads the iterator next is to be the only one."""
    drawing, drawn = threading.Event(), []

    def slow():
        yield numbered(1)[0]
        drawing.set()
        time.sleep(0.3)
        drawn.append(2)
        yield numbered(2)[1]

    shards = prefetch(slow(), [CPU], background=True)
    next(shards)
    assert drawing.wait(240)
    shards.close()
    assert drawn == [2]


def test_an_iterator_that_never_answers_does_not_hold_up_the_end(monkeypatch):
    monkeypatch.setattr(module, "CLOSE_S", 0.05)
    answer = threading.Event()

    def silent():
        yield numbered(1)[0]
        answer.wait()

    shards = prefetch(silent(), [CPU], background=True)
    next(shards)
    shards.close()
    (left,) = threads()
    answer.set()
    left.join(240)
    assert threads() == []


def test_the_iterator_runs_in_the_mode_and_on_the_device_of_the_loop(arrays):
    found = []

    def batches():
        for _ in range(2):
            found.append((mx.util.is_np_array(), mx.util.is_np_shape(), mx.current_context()))
            yield arrays.ones((2, 3)), arrays.ones((2,))

    with mx.Context(mx.cpu(1)):
        kinds = [type(Xs[0]) for Xs, _ in prefetch(batches(), [CPU], background=True)]
    np_mode = arrays is mx.np
    assert found == [(np_mode, np_mode, mx.cpu(1))] * 2
    assert kinds == [mx.np.ndarray if np_mode else mx.nd.NDArray] * 2


def test_the_thread_gives_the_same_batches_in_the_same_order(devices):
    batches = small_batches([6, 6, 5, 6, 1] * 4)
    for shards, batch in zip(prefetch(batches, devices, background=True), batches):
        same(shards, mgpu.split_batch(*batch, devices))
    assert threads() == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("ending", ["", "raise KeyboardInterrupt"])
def test_a_program_ends_that_leaves_it_in_the_middle(ending):
    program = f"""
import gluon_mgpu, mxnet as mx, numpy as np, importlib, threading
module = importlib.import_module("gluon_mgpu.data_parallel.prefetch")
module.CLOSE_S = 1e6
def silent():
    yield np.ones((2, 3)), np.ones(2)
    threading.Event().wait()
shards = module.prefetch(silent(), [mx.cpu(0)], background=True)
next(shards)
print("drawn", flush=True)
{ending}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert done.stdout == "drawn\n"
    assert (done.returncode != 0) == bool(ending)
    assert ("KeyboardInterrupt" in done.stderr) == bool(ending)

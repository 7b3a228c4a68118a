"""Contract: stop anywhere, go on from the checkpoint: the same bits on the same devices, within 1e-5 on another number.

`python scripts/faults.py kills` kills whole programs at random moments.
"""

import os
import signal
import threading
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.mxnet_internals.versions import is_mxnet2
from gluon_mgpu.runtime.file_locks import LOCK
from mxnet import gluon
from mxnet.base import _LIB
from mxnet.gluon import nn

from .conftest import LOSS, largest_difference, seed_all, small_batches, weights_of
from .test_no_sync import WAITING
from .test_weight_average import Press

# fit: in the middle of an epoch, with everything that moves


class KilledError(Exception):
    """Stands for an end that nobody has seen coming."""


class KilledAfter(mgpu.Callback):
    def __init__(self, step):
        self.step = step

    def on_batch_end(self, state):
        if state.step == self.step:
            raise KilledError


TIMES = ("seconds", "examples_per_s")


class World:
    """A network with BatchNorm and Dropout, a trainer whose schedule changes itself, and data in another order each epoch."""

    def __init__(self, ctx, optimizer="adam", *, normalize=True, dropout=0.5, hybridize=None, known=True, examples=34, **options):
        mx.random.seed(7)
        self.net = nn.HybridSequential()
        self.net.add(nn.Conv2D(4, 3, padding=1), nn.BatchNorm() if normalize else nn.Activation("tanh"), nn.Flatten())
        self.net.add(nn.Dense(12, activation="relu"), nn.Dropout(dropout), nn.Dense(3))
        self.net.initialize(mx.init.Xavier(), ctx=ctx)
        if hybridize is not None:
            self.net.hybridize(**hybridize)
        schedule = mx.lr_scheduler.FactorScheduler(step=3, factor=0.8, base_lr=0.05)
        params = {"learning_rate": 0.05, "lr_scheduler": schedule, **({"momentum": 0.9} if optimizer == "sgd" else {})}
        self.trainer = mgpu.Trainer(self.net, optimizer, params, **options)
        ((X, y),) = small_batches([examples])
        self.train_iter = mgpu.data.ArrayLoader(X, y, 8, shuffle=True, seed=3)  # 5 batches, the last of 2
        self.test_iter = mgpu.data.ArrayLoader(X[:12], y[:12], 8, shuffle=True)
        if known:
            mgpu.eval_batch(self.net, X[:4], y[:4], ctx=ctx)  # the weights are drawn now

    def fit(self, callbacks, *, train_iter=None, epochs=2, tests=True, **options):
        options = {"callbacks": callbacks, "epochs": epochs, **options}
        data = self.train_iter if train_iter is None else train_iter
        return mgpu.fit(self.net, LOSS, self.trainer, data, self.test_iter if tests else None, **options)

    def bits(self):
        """Weights and running statistics on each device, and the states of the optimizer."""
        params = [array.asnumpy() for param in self.net.collect_params().values() for array in param.list_data()]
        states = [
            state if isinstance(state, tuple) else (state,) for _, state in sorted(self.trainer.steps.update.states().items())
        ]
        return params + [array.asnumpy() for state in states for array in state]


def rows_of(history):
    return [{name: value for name, value in row.items() if name not in TIMES} for row in history.rows]


def run_in_parts(folder, make, stops, *, seed=1, every=2, background=False, monitor="test_loss", **options):
    """Bits and rows of a run that is killed after each of these steps, and resumed by a new network each time."""
    for attempt, end in enumerate([*stops, None]):
        seed_all(seed + attempt)
        world = make()
        callbacks = [mgpu.Checkpoint(folder, monitor, every=every, keep=2, background=background), KilledAfter(end)]
        try:
            history = world.fit(callbacks, resume="auto", **options)
        except KilledError:
            assert end is not None
        else:
            assert end is None
    return world.bits(), rows_of(history)


def whole_and_in_parts(folder, make, stops, **options):
    """A run without stops, and the same one in parts: bits and rows of both."""
    return run_in_parts(folder / "whole", make, [], seed=0, **options), run_in_parts(folder / "parts", make, stops, **options)


def assert_the_same(found):
    (bits, rows), (other_bits, other_rows) = found
    assert largest_difference(bits, other_bits) == 0.0
    assert rows == other_rows


@lru_cache(maxsize=None)
def uninterrupted(optimizer):
    """Bits and rows of a run without stops, made once for each optimizer."""
    with TemporaryDirectory() as folder:
        return run_in_parts(Path(folder), lambda: World([mx.cpu(0), mx.cpu(1)], optimizer), [], seed=0)


@pytest.mark.parametrize("optimizer, stops", [("adam", [1, 2]), ("sgd", [2, 7]), ("adam", [5, 10]), ("sgd", [9, 10])], ids=str)
def test_killed_after_any_step_it_ends_with_the_same_bits(tmp_path, optimizer, stops):
    ctx = [mx.cpu(0), mx.cpu(1)]
    assert_the_same([uninterrupted(optimizer), run_in_parts(tmp_path, lambda: World(ctx, optimizer), stops)])


@pytest.mark.each_value
@pytest.mark.parametrize("hybridize", [None, {}, {"static_alloc": True, "static_shape": True}], ids=["plain", "hybrid", "static"])
@pytest.mark.parametrize("num_devices", [1, 3])
def test_on_any_devices_and_with_any_arrays(tmp_path, num_devices, arrays, hybridize):
    ctx = [mx.cpu(i) for i in range(num_devices)]
    assert_the_same(whole_and_in_parts(tmp_path, lambda: World(ctx, hybridize=hybridize), [8], background=True))


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 3, "every": 1},
        {"micro_steps": 2, "every": 100, "limit_eval_batches": 1},
        {"background": True, "max_inflight": 5, "every": 3, "metrics": {"sum": lambda output, label: (output.sum(), label.size)}},
        {"tests": False, "monitor": "train_loss", "metrics": ()},
    ],
    ids=lambda options: next(iter(options)) + str(next(iter(options.values())))[:5],
)
def test_with_any_option(tmp_path, options):
    ctx = [mx.cpu(0), mx.cpu(1)]
    assert_the_same(whole_and_in_parts(tmp_path, lambda: World(ctx, clip_norm=0.5), [4, 8], **options))


@pytest.mark.parametrize("options", [{"accumulate_grad_batches": 3}, {}], ids=str)
def test_with_shapes_that_the_first_batch_decides(tmp_path, options):
    """Those of the network that goes on come from the file, and its first batch may be one of a group."""
    ctx = [mx.cpu(0), mx.cpu(1)]
    assert_the_same(whole_and_in_parts(tmp_path, lambda: World(ctx, known=False), [4], **options))


@pytest.mark.parametrize("kind", ["DataLoader that loads ahead", "sampler", "augmentation by MXNet"])
def test_with_data_that_takes_its_order_from_numpy(tmp_path, kind):
    """Gluon's samplers shuffle by NumPy's global generator, and augmentation draws from it as it goes."""
    ((X, y),) = small_batches([34])
    makes = {
        "DataLoader that loads ahead": lambda: gluon.data.DataLoader(
            gluon.data.ArrayDataset(X, y),
            8,
            shuffle=True,
            num_workers=1,
            thread_pool=True,
            **({"try_nopython": False} if is_mxnet2() else {}),
        ),
        "sampler": lambda: gluon.data.DataLoader(
            gluon.data.ArrayDataset(X, y), batch_sampler=mgpu.data.ShardedSampler(34, 8, seed=3)
        ),
        "augmentation by MXNet": lambda: gluon.data.DataLoader(
            gluon.data.ArrayDataset(X, y).transform_first(lambda x: x + mx.nd.random.normal(shape=x.shape).asnumpy()), 8
        ),
    }
    found = []
    for name, stops in (("whole", [None]), ("parts", [8, None])):
        for stop in stops:
            np.random.seed(5 if name == "whole" or stop == 8 else 99)
            world = World([mx.cpu(0), mx.cpu(1)])
            callbacks = [mgpu.Checkpoint(tmp_path / name, every=3)] + ([] if stop is None else [KilledAfter(stop)])
            try:
                history = world.fit(callbacks, train_iter=makes[kind](), resume="auto")
            except KilledError:
                continue
            found.append((world.bits(), rows_of(history)))
    assert_the_same(found)


@pytest.mark.parametrize("optimizer, before, after", [("adam", 2, 1), ("sgd", 1, 3)])
def test_on_another_number_of_devices(tmp_path, optimizer, before, after):
    """Without BatchNorm and Dropout, whose devices are no copies of each other."""
    found = []
    for ctx, end in (([mx.cpu(i) for i in range(before)], 8), ([mx.cpu(i) for i in range(after)], None)):
        world = World(ctx, optimizer, normalize=False, dropout=0.0)
        try:
            found = rows_of(world.fit([mgpu.Checkpoint(tmp_path / "parts", every=2), KilledAfter(end)], resume="auto"))
        except KilledError:
            continue
    whole = World([mx.cpu(i) for i in range(before)], optimizer, normalize=False, dropout=0.0)
    rows = rows_of(whole.fit([]))
    assert largest_difference(weights_of(whole.net), weights_of(world.net)) <= 1e-5
    assert mgpu.replica_difference(world.net) == 0.0
    for mine, other in zip(rows, found):
        assert mine == pytest.approx(other, abs=1e-5)


@lru_cache(maxsize=None)
def uninterrupted_without_checkpoints():
    world = World([mx.cpu(0), mx.cpu(1)], dropout=0.0)
    return rows_of(world.fit([])), world.bits()


@pytest.mark.parametrize("stop", [1, 4, 5])
def test_ctrl_c_at_any_step(tmp_path, stop):
    """What it saves is one checkpoint more; where nothing draws random numbers, no bit tells that there was one."""
    ctx = [mx.cpu(0), mx.cpu(1)]
    first = World(ctx, dropout=0.0)
    with pytest.raises(KeyboardInterrupt, match=f"after step {stop}$"):
        first.fit([mgpu.Checkpoint(tmp_path), Press(stop)])
    assert first.trainer.optimizer.num_update == stop
    assert_resumes_as_if_uninterrupted(World(ctx, dropout=0.0), tmp_path)


def assert_resumes_as_if_uninterrupted(resumed, folder):
    rows, bits = uninterrupted_without_checkpoints()
    assert rows_of(resumed.fit([mgpu.Checkpoint(folder), mgpu.Progress()], resume="auto")) == rows
    assert largest_difference(resumed.bits(), bits) == 0.0


def test_ctrl_c_in_the_evaluation(tmp_path):
    """The epoch has been trained: only its evaluation is done again."""

    class Pressing:
        def __init__(self, batches):
            self.batches = list(batches)

        def __iter__(self):
            yield self.batches[0]
            signal.raise_signal(signal.SIGINT)
            yield from self.batches[1:]

    ctx = [mx.cpu(0), mx.cpu(1)]
    first = World(ctx, dropout=0.0)
    first.test_iter, batches = Pressing(first.test_iter), list(first.test_iter)
    assert len(batches) == 2
    with pytest.raises(KeyboardInterrupt, match="in the evaluation after epoch 1$"):
        first.fit([mgpu.Checkpoint(tmp_path)])
    assert_resumes_as_if_uninterrupted(World(ctx, dropout=0.0), tmp_path)


def test_ctrl_c_in_an_evaluation_that_draws_its_order(tmp_path):
    """The same loader to train and to test: it shuffles in each pass, by NumPy's generator."""
    ((X, y),) = small_batches([34])
    found = []
    for name, presses in (("whole", [0]), ("parts", [-1, 0])):
        seed_all(5)
        for press in presses:
            world = World([mx.cpu(0)], dropout=0.0)
            data = world.test_iter = gluon.data.DataLoader(gluon.data.ArrayDataset(X, y), 8, shuffle=True)
            callbacks = [mgpu.Checkpoint(tmp_path / name), Press(press)]
            try:
                history = world.fit(callbacks, train_iter=data, resume="auto")
            except KeyboardInterrupt:
                continue
            found.append((world.bits(), rows_of(history)))
    assert_the_same(found)


def test_evaluations_within_an_epoch_by_the_loader_of_the_training(tmp_path):
    def make():
        world = World([mx.cpu(0)], dropout=0.0)
        world.test_iter = world.train_iter
        return world

    assert_the_same(whole_and_in_parts(tmp_path, make, [9], evaluate_every=3, epochs=3))


class Moves(mgpu.Callback):
    """A program that changes its directory."""

    def on_batch_end(self, state):
        os.chdir("/")


def test_a_relative_folder_stays_where_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saves = mgpu.Checkpoint("run", every=2)
    for epochs in (1, 2):  # the second one resumes there
        World([mx.cpu(0)]).fit([saves, Moves()], epochs=epochs, resume="auto")
        assert steps_in(tmp_path / "run")["last"] == 5 * epochs


# What is kept


class Steps(mgpu.Callback):
    """Notes what is in the folder after each batch, when it is the last callback."""

    def __init__(self, folder):
        self.folder, self.after = folder, {}

    def on_batch_end(self, state):
        self.after[state.step] = sorted(path.name for path in self.folder.iterdir() if path.name != LOCK)


def steps_in(folder):
    return {path.name: mgpu.checkpoint.rotation.step_of(path) for path in sorted(folder.iterdir())}


def test_the_last_ones_and_the_best_are_kept(tmp_path):
    world = World([mx.cpu(0)], examples=50)
    steps = Steps(tmp_path)
    world.fit([mgpu.Checkpoint(tmp_path, every=3, keep=3), steps], epochs=2)  # of 7 batches
    assert steps.after[2] == []
    assert steps.after[3] == ["last"]
    assert steps.after[6] == ["last", "step-00000003"]
    assert steps.after[8] == ["best", "last", "step-00000003", "step-00000006"]
    assert steps.after[9] == ["best", "last", "step-00000006", "step-00000007"]
    assert steps.after[12] == ["best", "last", "step-00000007", "step-00000009"]
    kept = steps_in(tmp_path)
    assert kept == {"best": kept["best"], "last": 14, "step-00000009": 9, "step-00000012": 12}
    assert kept["best"] in (7, 14)


def test_a_group_of_batches_is_not_cut(tmp_path):
    """A checkpoint is due after batches 2, 4, 6; updates come after 3, 6 and at the end, after 7."""
    world = World([mx.cpu(0)], examples=50)
    steps = Steps(tmp_path)
    world.fit([mgpu.Checkpoint(tmp_path, every=2, keep=9), steps], epochs=1, accumulate_grad_batches=3)
    assert [len(steps.after[step]) for step in range(1, 8)] == [0, 0, 1, 1, 1, 2, 2]
    assert steps_in(tmp_path) == {"best": 7, "last": 7, "step-00000003": 3, "step-00000006": 6}


def test_a_step_with_a_checkpoint_in_the_background_does_not_wait(tmp_path, calls_to, report_every):
    """Without running statistics, which MXNet writes behind its engine's back, and after the first one, whose seed is drawn."""
    called = calls_to(_LIB, *WAITING, note=lambda *_: threading.get_ident())
    report_every()
    during = {}

    def num_waits():
        return called.count(threading.get_ident())

    class First(mgpu.Callback):
        def on_batch_end(self, state):
            during[state.step] = num_waits()

    class Last(mgpu.Callback):
        def on_batch_end(self, state):
            during[state.step] = num_waits() - during[state.step]

    world = World([mx.cpu(0), mx.cpu(1)], normalize=False)
    saves = mgpu.Checkpoint(tmp_path, every=1, background=True)
    world.fit([First(), saves, Last()])
    assert during[1] != 0  # the counter counts: the first seed
    assert [during[step] for step in (2, 3, 4, 7, 8)] == [0] * 5


def test_early_stopping_goes_on(tmp_path):
    """The best epoch so far is in the history; and a run that was stopped stays so."""

    class Scripted(mgpu.Callback):
        def on_epoch_end(self, state):
            state.history.rows[-1]["test_own"] = [0.2, 0.9, 0.5, 0.4, 0.3, 0.2][state.epoch - 1]

    def callbacks(name, end=None):
        stopping = mgpu.EarlyStopping("test_own", patience=2, mode="max")
        return [Scripted(), mgpu.Checkpoint(tmp_path / name, "test_own", mode="max", keep=2), stopping, KilledAfter(end)]

    history = World([mx.cpu(0)], examples=10).fit(callbacks("whole"), epochs=6)
    with pytest.raises(KilledError):
        World([mx.cpu(0)], examples=10).fit(callbacks("parts", 7), epochs=6)
    for _ in range(2):
        parts = World([mx.cpu(0)], examples=10)
        resumed = parts.fit(callbacks("parts"), epochs=6, resume="auto")
        assert rows_of(resumed) == rows_of(history) and len(history.rows) == 5
        assert resumed.stopped == history.stopped == "test_own was best (0.9) in epoch 2"
        assert mgpu.load_checkpoint(parts.net, tmp_path / "parts" / "best")["epoch"] == 2


def test_a_run_that_is_done_is_done(tmp_path):
    world = World([mx.cpu(0)], examples=10)
    rows = world.fit([mgpu.Checkpoint(tmp_path)], epochs=2, resume="auto").rows
    before = sorted((path.name, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    again = World([mx.cpu(0)], examples=10)
    assert again.fit([mgpu.Checkpoint(tmp_path)], epochs=2, resume="auto").rows == rows
    assert largest_difference(world.bits(), again.bits()) == 0.0
    assert sorted((path.name, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == before
    assert len(World([mx.cpu(0)], examples=10).fit([mgpu.Checkpoint(tmp_path)], epochs=3, resume="auto").rows) == 3

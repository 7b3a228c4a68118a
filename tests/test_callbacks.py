"""Callbacks: history and its files, progress, early stopping, checkpoints."""

import csv
import json
import re
import sys
from contextlib import redirect_stdout
from types import SimpleNamespace

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.errors import MissingExtraError, NonFiniteLossError, TrainerError
from gluon_mgpu.loop.callbacks import Best, FitState
from gluon_mgpu.loop.metrics import direction_of
from gluon_mgpu.plots import plot_history
from mxnet import gluon
from mxnet.gluon import nn

from .conftest import LOSS, initialized
from .versions import nd
from .worlds import devices as devices

PNG = b"\x89PNG\r\n\x1a\n"


class Scripted(mgpu.Callback):
    """Writes the next value of a script into a column of each epoch's row."""

    def __init__(self, column, values):
        self.column, self.values = column, values

    def on_epoch_end(self, state):
        state.history.rows[-1][self.column] = self.values[state.epoch - 1]


class Weights(mgpu.Callback):
    """Notes the weights after each epoch."""

    def __init__(self):
        self.after = []

    def on_epoch_end(self, state):
        self.after.append(state.net.weight.data(mx.cpu(0)).asnumpy())


class Holding(mgpu.Callback):
    def __init__(self, arrays):
        self.arrays = arrays

    def state_arrays(self, state):
        return self.arrays


def make_net(ctx, in_units=2):
    return initialized(nn.Dense(2, in_units=in_units), ctx, mx.init.Xavier())


def make_batches(num_batches=2):
    rng = np.random.RandomState(0)
    return [(rng.uniform(-1, 1, (4, 2)).astype("float32"), rng.randint(0, 2, 4).astype("int32")) for _ in range(num_batches)]


def train(callbacks, *, epochs=10, ctx=None, test_iter=None, num_batches=1):
    test_iter = test_iter or make_batches(1)
    net = make_net(ctx or [mx.cpu(0), mx.cpu(1)])
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1, "momentum": 0.9})
    return mgpu.fit(net, LOSS, trainer, make_batches(num_batches), test_iter, epochs=epochs, callbacks=callbacks)


# History


def test_history_is_saved_as_csv_json_and_a_picture(tmp_path):
    history = train([], epochs=3, test_iter=make_batches(1))
    history.stopped = "enough"
    history.save(tmp_path / "a" / "new folder")
    folder = tmp_path / "a" / "new folder"
    assert sorted(path.name for path in folder.iterdir()) == ["curves.png", "history.csv", "history.json"]
    with open(folder / "history.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [{name: float(value) for name, value in row.items()} for row in rows] == history.rows
    assert [list(row) for row in rows] == [list(row) for row in history.rows]
    assert json.loads((folder / "history.json").read_text()) == {"stopped": "enough", "epochs": history.rows, "evaluations": []}
    picture = (folder / "curves.png").read_bytes()
    assert picture.startswith(PNG)
    assert len(picture) > 10_000


def test_axes_have_units_and_whole_epochs():
    """Accuracies (0 to 1) and exact matches (0 to 100) shared an axis without a unit; one epoch had ticks from 0.96 to 1.04."""
    rows = [{"epoch": 1, "train_loss": 2.0, "test_accuracy": 0.883, "test_exact_match": 0.8, "test_bleu": 10.5, "test_mae": 3.0}]
    later = plot_history([*rows, {"epoch": 2, "test_f1": 1.0}])
    assert "test f1" in [line.get_label() for axes in later.axes for line in axes.lines]
    charts = {axes.get_ylabel(): axes for axes in plot_history(rows).axes}
    assert list(charts) == ["loss", "%", "score, 0 to 100", "other metrics"]
    drawn = {line.get_label(): line.get_ydata()[0] for line in charts["%"].lines}
    assert drawn == {"test accuracy": pytest.approx(88.3), "test exact match": 0.8}
    for axes in charts.values():
        low, high = axes.get_xlim()
        assert [tick for tick in axes.get_xticks() if low <= tick <= high] == [1]


def test_without_matplotlib_the_extra_is_named_and_the_numbers_are_kept(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match="pip install 'matplotlib"):
        mgpu.loop.History([{"epoch": 1.0, "train_loss": 0.5}]).save(tmp_path)
    assert (tmp_path / "history.csv").read_text().split() == ["epoch,train_loss", "1.0,0.5"]
    assert json.loads((tmp_path / "history.json").read_text())["epochs"] == [{"epoch": 1.0, "train_loss": 0.5}]


def saved_rows(folder):
    content = json.loads((folder / "history.json").read_text())
    return content["stopped"], content["epochs"]


def test_history_is_saved_after_each_epoch_and_at_the_end(tmp_path):
    """A program that is killed in epoch 3 has its first two; one that ends says why."""
    seen = []

    class Look(mgpu.Callback):
        def on_epoch_end(self, state):
            seen.append(saved_rows(tmp_path / "h"))
            assert seen[-1] == ("", state.history.rows)
            state.stop = "enough" if state.epoch == 2 else ""

    history = train([mgpu.loop.SaveHistory(tmp_path / "h"), Look()])
    assert [len(rows) for _, rows in seen] == [1, 2]
    assert saved_rows(tmp_path / "h") == ("enough", history.rows)
    assert (tmp_path / "h" / "curves.png").read_bytes().startswith(PNG)


# Progress


def test_progress_is_lines_where_there_is_no_terminal(capsys):
    history = train([mgpu.Progress("images")], epochs=2, test_iter=make_batches(1))
    lines = capsys.readouterr().out.splitlines()[2:]
    assert len(lines) == 2
    for line, row in zip(lines, history.rows):
        assert line == (
            f"epoch {row['epoch']:.0f}/2  "
            f"train accuracy {100 * row['train_accuracy']:.2f} %  train loss {row['train_loss']:.4f}  "
            f"test accuracy {100 * row['test_accuracy']:.2f} %  test loss {row['test_loss']:.4f}  "
            f"{row['examples_per_s']:.0f} images/s  {row['seconds']:.1f} s"
        )


def test_progress_tells_of_a_long_epoch(capsys, report_every):
    report_every(batches=1)
    train([mgpu.Progress(every_s=0)], epochs=2, num_batches=2)
    lines = capsys.readouterr().out.splitlines()
    found = [re.match(r"(epoch 1/2  batch ./2)  \d+ examples/s  \d+:\d\d left  accuracy ", line) for line in lines]
    assert [one.group(1) for one in filter(None, found)][:2] == ["epoch 1/2  batch 1/2", "epoch 1/2  batch 2/2"]
    assert sum("evaluates batch 1" in line for line in lines) == 4
    with redirect_stdout(None):  # which a shell's >&- leaves
        train([mgpu.Progress(every_s=0)], epochs=1, num_batches=2)


def test_fit_shows_progress_unless_told_otherwise(capsys):
    train(None, epochs=1)
    assert "\nepoch 1/1  train accuracy " in capsys.readouterr().out
    train([], epochs=1)
    assert capsys.readouterr().out == ""


def test_progress_is_written_to_an_object_that_can_only_write():
    """Programs put one in the place of standard output, to copy it to a file."""
    written = []
    with redirect_stdout(SimpleNamespace(write=written.append, flush=bool)):
        train(None, epochs=1)
    assert "\nepoch 1/1  train accuracy " in "".join(written)


@pytest.fixture
def become_terminal(monkeypatch):
    """A function that turns standard output into a terminal of 60 columns."""
    monkeypatch.setenv("COLUMNS", "60")
    return lambda: monkeypatch.setattr(sys.stdout, "isatty", lambda: True)


def test_progress_is_a_line_that_changes_on_a_terminal(capsys, become_terminal):
    become_terminal()
    history = train([mgpu.Progress("images")], epochs=2, test_iter=make_batches(1))
    *lines, last = capsys.readouterr().out.split("\n")
    assert len(lines) == 4 and last == ""
    for row, line in zip(history.rows, lines[2:]):
        running, evaluating, finished = line.split("\r\x1b[K")
        assert evaluating.startswith(f"epoch {row['epoch']}/2  evaluates batch 1  accuracy ")
        assert len(running) < 60 and running.startswith(f"epoch {row['epoch']}/2  batch 1/1  ")
        assert finished.startswith(f"epoch {row['epoch']}/2  train accuracy {100 * row['train_accuracy']:.2f} %")
        assert finished.endswith(f"  {row['examples_per_s']:.0f} images/s  {row['seconds']:.1f} s")


def test_the_line_ends_when_training_fails(capsys, become_terminal):
    become_terminal()

    class Broken(mgpu.Callback):
        def on_report(self, state, progress):
            raise RuntimeError("mine")

    progress = mgpu.Progress()
    with pytest.raises(RuntimeError, match="^mine$"):
        train([progress, Broken()])
    assert capsys.readouterr().out.endswith("\n")


# EarlyStopping

FALLING = [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]
VALLEY = [1.0, 0.5, 0.4, 0.45, 0.41, 0.40, 0.39, 0.6, 0.6, 0.6]  # best in epochs 3 and 7


@pytest.mark.parametrize(
    "monitor, values, options, epochs, best",
    [
        ("test_loss", FALLING, {"patience": 0}, 10, None),
        ("test_loss", VALLEY, {"patience": 0}, 4, (0.4, 3)),
        ("test_loss", VALLEY, {"patience": 1}, 5, (0.4, 3)),
        ("test_loss", VALLEY, {"patience": 2}, 6, (0.4, 3)),  # as good is not better
        ("test_loss", VALLEY, {}, 10, None),  # 0.39 comes in time
        ("test_loss", [1.0] * 10, {"patience": 8}, 10, None),  # it would stop after the last epoch
        ("test_loss", VALLEY, {"patience": 2, "min_delta": 0.2}, 5, (0.5, 2)),
        ("test_loss", FALLING, {"patience": 1, "min_delta": 0.15}, 10, None),  # every second epoch is better by enough
        ("test_loss", FALLING, {"patience": 1, "min_delta": 0.25}, 3, (1.0, 1)),
        ("test_accuracy", FALLING, {"patience": 3}, 5, (1.0, 1)),  # larger is better
        ("test_accuracy", FALLING[::-1], {"patience": 0}, 10, None),
        ("test_accuracy", FALLING, {"patience": 3, "mode": "min"}, 10, None),
        ("my_loss", FALLING, {"patience": 1}, 10, None),
        ("my_loss", FALLING, {"patience": 1, "mode": "max"}, 3, (1.0, 1)),
        ("perplexity", list(map(np.float32, FALLING)), {"patience": 1, "mode": "min"}, 10, None),
        ("my_loss", [float("inf")] * 10, {"patience": 1}, 3, (float("inf"), 1)),  # as infinite is not better
    ],
)
def test_early_stopping_stops_after_the_epochs_that_are_allowed(monitor, values, options, epochs, best):
    history = train([Scripted(monitor, values), mgpu.EarlyStopping(monitor, **options)], ctx=[mx.cpu()])
    assert history.column("epoch") == list(range(1, epochs + 1))
    assert history.stopped == (f"{monitor} was best ({best[0]:.4g}) in epoch {best[1]}" if best else "")


def test_a_column_that_is_not_there_is_reported():
    with pytest.raises(TrainerError, match="^callbacks: got monitor 'f1_loss'; expected one of epoch, train_accuracy, "):
        train([mgpu.EarlyStopping("f1_loss")])


# Checkpoint

UP_AND_DOWN = [0.2, 0.6, 0.5, 0.6, 0.1]  # best in epoch 2; as good in epoch 4 is not better


def test_best_and_last_hold_the_weights_of_their_epochs(tmp_path, devices):
    weights = Weights()
    history = train([Scripted("test_accuracy", UP_AND_DOWN), weights, mgpu.Checkpoint(tmp_path)], epochs=5, ctx=devices)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "last"]
    for name, epoch in (("best", 2), ("last", 5)):
        plain = nn.Dense(2, in_units=2)
        plain.load_parameters(str(tmp_path / name / "net.params"), ctx=mx.cpu(4))
        np.testing.assert_array_equal(plain.weight.data(mx.cpu(4)).asnumpy(), weights.after[epoch - 1])
        progress = json.loads((tmp_path / name / "progress.json").read_text())
        assert progress == {"epoch": epoch, "epochs_completed": epoch, "history": history.rows[:epoch]}


def test_without_an_accuracy_the_best_epoch_has_the_smallest_loss(tmp_path):
    """The accuracy of a regression was 0.0 in every epoch, so that the first one was the best."""
    batches, loss = [(X, y.astype("float32")) for X, y in make_batches(1)], gluon.loss.L2Loss()
    net = initialized(nn.Dense(1, in_units=2), [mx.cpu(0)])
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.01})
    history = mgpu.fit(net, loss, trainer, batches, batches, epochs=2, callbacks=[mgpu.Checkpoint(tmp_path)])
    assert [name for name in history.rows[0] if name.startswith("test_")] == ["test_loss"]
    assert list(mgpu.evaluate(net, batches, loss=loss)) == ["loss"]
    assert json.loads((tmp_path / "best" / "progress.json").read_text())["epoch"] == 2


@pytest.mark.parametrize(
    "monitor, mode, best",
    [
        ("test_loss", None, 5),
        ("test_loss", "max", 2),
        ("test_f1", None, 2),
        ("test_f1", "min", 5),
        ("test_mae", None, 5),  # it kept the worst model
        ("test_perplexity", None, 5),
        ("test_own", "min", 5),
    ],
)
def test_best_follows_the_mode(tmp_path, monitor, mode, best):
    train([Scripted(monitor, UP_AND_DOWN), mgpu.Checkpoint(tmp_path, monitor, mode=mode)], epochs=5)
    assert json.loads((tmp_path / "best" / "progress.json").read_text())["epoch"] == best


SMALLER = (
    "train_loss f1_loss mae val_MAE testMSE RMSE test_error top_5_error error_rate test_perplexity ppl nll neg_log_likelihood "
    "NegativeLogLikelihood cross-entropy CrossEntropy word_error_rate wer cer ter fid brier_score hamming_loss mape fpr95 "
    "kl_divergence top5_err false_negative_rate test_negative_log_likelihood_loss"
)
LARGER = (
    "accuracy test_accuracy_top5 top_5_accuracy TopKAccuracy val_acc1 f1_macro F1Score roc_auc AUROC recall@10 average_precision "
    "bleu4 chrF rouge-L mIoU test_mAP map50 R2 pearsonr PearsonCorrelation MCC pcc ndcg@10 hit_rate valid_exact_match "
    "log_likelihood negative_mae neg_mean_squared_error neg_log_loss"  # scikit-learn's, errors with their sign changed
)
OPEN = "score test_own grad_norm seconds accuracy_drop loss_ratio inaccuracy lossless filter heatmap character error_accuracy "
OPEN += "1-accuracy one_minus_acc neg_accuracy neg_loss"


@pytest.mark.parametrize("names, direction", [(SMALLER, "min"), (LARGER, "max"), (OPEN, "")])
def test_the_names_of_metrics_say_whether_larger_is_better(names, direction):
    assert [name for name in names.split() if direction_of(name) != direction] == []


@pytest.mark.parametrize("make", [mgpu.EarlyStopping, lambda monitor: mgpu.Checkpoint("never", monitor)])
def test_a_name_that_says_nothing_takes_a_mode(make):
    with pytest.raises(TrainerError, match="got monitor 'test_own' without a mode; expected one.*Pass mode='min' or mode='max'"):
        make("test_own")


def test_without_a_monitor_only_last_is_kept(tmp_path):
    train([mgpu.Checkpoint(str(tmp_path / "new" / "folder"), monitor=None)], epochs=1)
    assert [path.name for path in (tmp_path / "new" / "folder").iterdir()] == ["last"]


@pytest.mark.parametrize(
    "moment, epoch, error, told, saved",
    [("on_epoch_begin", 3, RuntimeError, "RuntimeError", 2), ("on_epoch_end", 2, KeyboardInterrupt, "interrupted", 1)],
)
def test_what_an_error_ended_is_not_saved_and_the_history_before_it_is(tmp_path, moment, epoch, error, told, saved):
    """Ctrl-C that comes as an exception, at any moment, may have updated one device and not the other."""

    def fail(self, state):
        if state.epoch == epoch:
            raise error("mine")

    broken = type("Broken", (mgpu.Callback,), {moment: fail})()
    with pytest.raises(error, match="^mine$"):
        train([broken, mgpu.Checkpoint(tmp_path, monitor=None), mgpu.loop.SaveHistory(str(tmp_path / "h"))])
    assert json.loads((tmp_path / "last" / "progress.json").read_text())["epoch"] == saved
    stopped, rows = saved_rows(tmp_path / "h")
    assert (stopped, len(rows)) == (told, 2)


# What once lost work


def make_trainer(net):
    return mgpu.Trainer(net, "sgd", {"learning_rate": 0.1})


@pytest.mark.parametrize("make", [mgpu.EarlyStopping, lambda: mgpu.Checkpoint("never", "test_loss")])
def test_a_monitor_that_needs_a_test_set_is_reported_before_the_first_epoch(make, tmp_path, monkeypatch):
    """It was told after the first epoch, which may have taken hours."""
    monkeypatch.chdir(tmp_path)
    net = make_net([mx.cpu()])
    before = net.weight.data().asnumpy()
    with pytest.raises(TrainerError, match="without a test set"):
        mgpu.fit(net, LOSS, make_trainer(net), make_batches(), epochs=1, callbacks=[make()])
    np.testing.assert_array_equal(net.weight.data().asnumpy(), before)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_without_a_test_set_saves_only_the_last(tmp_path):
    net, checkpoint = make_net([mx.cpu()]), mgpu.Checkpoint(tmp_path / "run")
    trainer = make_trainer(net)
    for more, saved in (((), {"last"}), ((make_batches(),), {"best", "last"})):
        mgpu.fit(net, LOSS, trainer, make_batches(), *more, epochs=1, callbacks=[checkpoint])
        assert {path.name for path in (tmp_path / "run").iterdir() if path.is_dir()} == saved


def test_a_callback_that_fails_at_the_end_does_not_stop_the_others(tmp_path):
    ended = []

    class Failing(mgpu.Callback):
        def on_fit_end(self, state):
            raise OSError("disk full")

    class Last(mgpu.Callback):
        def on_fit_end(self, state):
            ended.append(state.error)

    class Stopping(mgpu.Callback):
        def on_epoch_begin(self, state):
            raise KeyError("stop")

    net = make_net([mx.cpu()])
    with pytest.raises(OSError, match="disk full"):
        mgpu.fit(net, LOSS, make_trainer(net), make_batches(), epochs=1, callbacks=[Failing(), Last()])
    with pytest.raises(KeyError, match="stop"):
        mgpu.fit(net, LOSS, make_trainer(net), make_batches(), epochs=1, callbacks=[Failing(), Stopping(), Last()])
    assert [type(error) for error in ended] == [type(None), KeyError]


def test_an_epoch_without_its_evaluation_is_drawn_and_listed(tmp_path):
    """Ctrl-C in the evaluation leaves a row without test columns."""
    history = mgpu.loop.History([{"epoch": 1, "train_loss": 1.0, "test_loss": 2.0}, {"epoch": 2, "train_loss": 0.5}])
    history.save(tmp_path)
    assert (tmp_path / "curves.png").read_bytes().startswith(PNG)
    assert history.column("train_loss") == [1.0, 0.5]
    assert np.isnan(history.column("test_loss")[1])


def test_an_interrupt_before_the_first_batch_saves_nothing(tmp_path):
    class Early(mgpu.Callback):
        def on_epoch_begin(self, state):
            raise KeyboardInterrupt

    net = initialized(mx.gluon.nn.Dense(3))
    with pytest.raises(KeyboardInterrupt):
        mgpu.fit(net, LOSS, make_trainer(net), make_batches(), epochs=1, callbacks=[Early(), mgpu.Checkpoint(tmp_path, None)])
    assert list(tmp_path.iterdir()) == []


def test_nan_is_never_the_best():
    best = Best("test_loss")
    found = []
    for epoch, value in enumerate([float("nan"), 2.0, float("nan"), 1.0, 3.0], 1):
        state = FitState(None, None, 5, 0, epoch, mgpu.loop.History([{"test_loss": value}]))
        found.append(best.improves(state))
    assert found == [False, True, False, True, False]
    assert (best.value, best.epoch) == (1.0, 4)


def test_a_test_loss_that_is_not_finite_is_not_saved(tmp_path):
    X, y = make_batches()[0]
    bad = [(X * float("inf"), y)]
    net = make_net([mx.cpu()])
    with pytest.raises(NonFiniteLossError, match=r"^evaluate: got a loss of nan at step 1 on cpu\(0\)"):
        mgpu.fit(net, LOSS, make_trainer(net), make_batches(), bad, epochs=1, callbacks=[mgpu.Checkpoint(tmp_path)])
    assert list(tmp_path.iterdir()) == []


def test_a_loss_that_is_not_finite_replaces_no_checkpoint(tmp_path):
    """Also with a column of NumPy's numbers, which JSON does not know."""
    batches = make_batches(5)
    bad = [*batches[:2], (batches[2][0] * float("nan"), batches[2][1]), *batches[3:]]
    net, column = make_net([mx.cpu()]), Scripted("mine", [np.float32(1.0)] * 3)
    saves = mgpu.Checkpoint(tmp_path, None, every=1, keep=9)
    trainer = make_trainer(net)
    mgpu.fit(net, LOSS, trainer, batches, epochs=1, callbacks=[column, saves])
    with pytest.raises(NonFiniteLossError, match=rf"step {len(batches) + 3}\b"):
        mgpu.fit(net, LOSS, trainer, bad, epochs=2, callbacks=[column, saves], resume="auto")
    assert mgpu.load_checkpoint(net, tmp_path / "last", trainer)["history"][0]["mine"] == 1.0
    assert all(np.isfinite(param.data().asnumpy()).all() for param in net.collect_params().values())


@pytest.mark.parametrize("held", [[None], [[1]], [{"a": np.ones(1)}], [{"a": nd.ones((1,))}] * 2])
def test_arrays_of_callbacks_are_kept_apart(tmp_path, held):
    net = initialized(nn.Dense(1, in_units=1))
    callbacks = [*map(Holding, held), mgpu.Checkpoint(tmp_path, monitor=None)]
    data = [(np.ones((2, 1), "float32"), np.ones((2, 1), "float32"))]
    with pytest.raises(TrainerError, match="Holding.state_arrays: got"):
        mgpu.fit(net, gluon.loss.L2Loss(), mgpu.Trainer(net, "sgd"), data, epochs=1, callbacks=callbacks)


def test_weights_that_are_nan_replace_no_checkpoint(tmp_path):
    """The loss of the batch whose gradient is NaN may be finite."""

    class Spoils(mgpu.Callback):
        def on_batch_end(self, state):
            if state.step == 3:
                state.net.weight.set_data(nd.array([[np.nan]]))

    net = initialized(nn.Dense(1, in_units=1))
    data = [(np.ones((2, 1), "float32"), np.ones((2, 1), "float32"))] * 5
    callbacks = [Spoils(), mgpu.Checkpoint(tmp_path, monitor=None, every=1, keep=1)]
    with pytest.raises(NonFiniteLossError):
        mgpu.fit(net, gluon.loss.L2Loss(), mgpu.Trainer(net, "sgd"), data, epochs=1, callbacks=callbacks)
    mgpu.load_checkpoint(net, tmp_path / "last")
    assert np.isfinite(net.weight.data().asnumpy().item())


# Learning rate


@pytest.mark.parametrize("stops", [[8], [4, 8]], ids=["at once", "resumed"])
def test_the_learning_rate_falls_on_a_plateau(tmp_path, stops):
    """After two epochs without improvement; a resumed run counts on."""
    losses = Scripted("train_loss", [3.0, 2.0, 2.0, 2.5, 2.0, 2.0, 1.0, 1.0])
    for epochs in stops:
        net = make_net([mx.cpu(0), mx.cpu(1)])
        trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1, "momentum": 0.9})
        falls = mgpu.ReduceLROnPlateau("train_loss", 0.5, 1, min_lr=0.04)
        callbacks = [losses, falls, mgpu.Checkpoint(tmp_path / "run", monitor=None)]
        history = mgpu.fit(net, LOSS, trainer, make_batches(), epochs=epochs, callbacks=callbacks, resume="auto")
    assert history.column("learning_rate") == [0.1, 0.1, 0.1, 0.1, 0.05, 0.05, 0.04, 0.04]


def test_a_schedule_and_a_plateau_exclude_each_other():
    net = make_net([mx.cpu(0)])
    trainer = mgpu.Trainer(net, "sgd", {"lr_scheduler": mx.lr_scheduler.FactorScheduler(10, base_lr=0.1)})
    with pytest.raises(TrainerError, match="ReduceLROnPlateau: got a trainer with an lr_scheduler"):
        mgpu.fit(net, LOSS, trainer, make_batches(), epochs=1, callbacks=[mgpu.ReduceLROnPlateau("train_loss")])
    with pytest.raises(TrainerError, match="got factor=1.5; expected one between 0 and 1"):
        mgpu.ReduceLROnPlateau(factor=1.5)


# What is printed


def test_progress_says_what_trains_and_fits_a_narrow_terminal(capsys, monkeypatch):
    train([mgpu.Progress()], epochs=1, num_batches=3)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("6 parameters  ") and shown[0].endswith(" KiB per device  on cpu(0), cpu(1)")
    assert shown[1] == "batch of 4  2 per device  3 steps per epoch"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "55")
    progress = mgpu.Progress()
    progress._is_line_open = False
    progress._show("epoch 1/2", "batch 3/9", "100 examples/s", "0:10 left", "accuracy 99.71 %", "loss 0.0152")
    assert capsys.readouterr().out == "epoch 1/2  batch 3/9  100 examples/s  0:10 left"


def test_a_history_is_printed_as_a_table():
    history = mgpu.loop.History([{"epoch": 1, "train_loss": 0.5, "test_bleu": 12.345}, {"epoch": 2, "train_loss": 0.25}])
    assert str(history) == "epoch  train loss  test BLEU\n    1         0.5      12.35\n    2        0.25           "
    assert history.plot().axes[0].get_ylabel() == "loss"

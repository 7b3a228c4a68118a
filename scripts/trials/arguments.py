"""Wrong arguments: a right call of a public function in which one or two arguments are replaced by values from a pool.

A finding is an error that is not in the house's words, or in more than one line; weights, states or files that differ after an
error; a result of NaN or of negative counts; and a call that takes longer than some seconds.
"""

from __future__ import annotations

import atexit
import faulthandler
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one CPU context's threads would be another's delay

import contextlib
import functools
import io
import math
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import warnings
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

LIMIT_S = 10.0  # of a call, in which the processor works for it: other programs do not count
DEADLY_S = 300.0  # on the clock, after which the whole search ends: MXNet, or NumPy, did not come back to Python
MOST_CHARACTERS = 600
CTX = [mx.cpu(0), mx.cpu(1)]
LOSS = gluon.loss.SoftmaxCrossEntropyLoss()
HOUSE = re.compile(r"^[\w. \-\[\]'()=:/]+: got .+; expected .+[.:] .+")
Call = Callable[..., Any]
_RNG = np.random.RandomState(0)
X = _RNG.uniform(-1, 1, (6, 4)).astype("float32")
Y = _RNG.randint(0, 3, 6).astype("int32")


class TookTooLong(BaseException):
    """A call was ended by the alarm."""


class World:
    """A network that has trained a step on two devices, its trainer, a checkpoint, and a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.net = gluon.nn.HybridSequential()
        self.net.add(
            gluon.nn.Dense(5, in_units=4, activation="tanh"), gluon.nn.BatchNorm(in_channels=5), gluon.nn.Dense(3, in_units=5)
        )
        self.net.initialize(mx.init.Uniform(0.5), ctx=CTX)
        self.trainer = mgpu.Trainer(self.net, "adam", {"learning_rate": 0.01})
        mgpu.train_batch(self.net, LOSS, self.trainer, X, Y)
        mgpu.save_checkpoint(folder / "saved", self.net, self.trainer)
        self.trainer.save_states(str(folder / "states"))
        (folder / "a.txt").write_text("one\ttwo\nthree\tfour\n")
        (folder / "b.txt").write_text("one\nthree\n")

    def values(self, statistics: bool) -> List[np.ndarray]:
        """Return weights and states on both devices, and BatchNorm's running statistics on request."""
        params = [param for param in self.net.collect_params().values() if statistics or param.grad_req != "null"]
        arrays = [param.data(ctx) for param in params for ctx in CTX]
        arrays += [one for updater in self.trainer._updaters for pair in updater.states.values() for one in pair]
        return [array.asnumpy() for array in arrays]

    def files(self) -> Dict[str, bytes]:
        """Return the content of every file."""
        return {str(path): path.read_bytes() for path in sorted(self.folder.rglob("*")) if path.is_file()}


def _shards(array: np.ndarray) -> List[Any]:
    return gluon.utils.split_and_load(mx.nd.array(array), CTX)


def _losses(world: World) -> List[Any]:
    with autograd.record():
        return [LOSS(world.net(x), y) for x, y in zip(_shards(X), _shards(Y))]


def _fit(world: World, **options: Any) -> Any:
    return mgpu.fit(world.net, LOSS, world.trainer, [(X, Y)], [(X, Y)], **{"epochs": 1, "callbacks": [], **options})


def _with_callback(world: World, kind: Callable[..., Any]) -> Call:
    """Return a call that makes a callback and lets a run use it."""
    return lambda **options: _fit(world, callbacks=[kind(**options)], epochs=2)


def _entered(kind: Callable[..., Any]) -> Call:
    def call(**options: Any) -> None:
        with kind(**options):
            pass

    return call


def _made_trainer(world: World, kind: Callable[..., Any]) -> Call:
    def call(**options: Any) -> None:
        net = gluon.nn.Dense(3, in_units=4)
        net.initialize(ctx=CTX)
        trainer = kind(**{"params": net, **options})
        if "params" not in options:
            mgpu.train_batch(net, LOSS, trainer, X, Y)

    return call


def _made_model(world: World) -> Call:
    def call(x: Any, **options: Any) -> None:
        mgpu.DataParallelModel(**options)(x)

    return call


def _made_criterion(**options: Any) -> None:
    y = options.pop("y")
    mgpu.DataParallelCriterion(**options)([(x,) for x in _shards(X[:, :3])], y)


def _balanced(world: World) -> Call:
    return lambda x, y, devices, **options: mgpu.Balancer(**options)(x, y, devices)


def _summed(metrics: Any, output: Any, label: Any) -> Any:
    sums = mgpu.DeviceSums(metrics)
    sums.add_shard(output, label)
    return sums.read()


def _top_k(k: Any, output: Any, label: Any) -> Any:
    return mgpu.top_k_accuracy(k)(output, label)


def _clipped(gradients: Any, max_norm: Any) -> Any:
    return mgpu.clip_global_norm(gradients, max_norm)


def _translated(**options: Any) -> Any:
    return mgpu.translate(_seq2seq(), **options)


def _seq2seq() -> Any:
    net = mgpu.models.Seq2Seq(9, 9, embed_size=4, hidden_size=4)
    net.initialize(ctx=CTX)
    return net


def _made_seq2seq(**options: Any) -> None:
    net = mgpu.models.Seq2Seq(**options)
    if max(options["source_vocab_size"], options["target_vocab_size"], options["hidden_size"], options["embed_size"]) < 100:
        net.initialize(ctx=mx.cpu(0))


def _read(loader: Any) -> None:
    for _, _batch in zip(range(20), loader):
        pass


def _lines() -> Any:
    return mgpu.data.SentencePairs(["a b", "b c d", "c", "d e"], ["1 2", "2 3 4", "3", "4 5"])


@functools.lru_cache(maxsize=None)
def _vocabulary() -> Any:
    return mgpu.data.build_vocabulary(["a b c d e 1 2 3 4 5"], "words", size=30)


def calls(world: World) -> Dict[str, Tuple[Call, Dict[str, Any]]]:
    """Return each public function, as a call, with right arguments."""
    nd, folder, net, trainer = mx.nd.array, world.folder, world.net, world.trainer
    batches = [(X, Y), (X[:3], Y[:3])]
    split = mgpu.split_batch
    source, target = [[4, 5], [5], [4, 4, 4]], [[4], [5, 5], [4]]
    data, models = mgpu.data, mgpu.models
    scaled = {"learning_rate": 0.1, "base_batch_size": 64, "batch_size": 256, "rule": "linear"}
    lengths = np.array([[3, 4], [5, 2], [2, 2]])
    return {
        "use_devices": (_entered(mgpu.use_devices), {"spec": "cpu:2", "min_free_memory": None, "wait_s": None, "tell": None}),
        "resolve_devices": (mgpu.resolve_devices, {"spec": "cpu:2", "min_free_memory": None, "wait_s": None, "tell": None}),
        "try_gpu": (mgpu.try_gpu, {"i": 0}),
        "split_and_load": (
            mgpu.split_and_load,
            {"data": X, "ctx_list": CTX, "batch_axis": 0, "even_split": True, "weights": None, "dtype": None},
        ),
        "split_batch": (
            split,
            {"X": X, "y": Y, "devices": CTX, "batch_axis": 0, "even_split": False, "weights": [1, 2], "dtype": "float32"},
        ),
        "split_batch_multi_inputs": (
            mgpu.split_batch_multi_inputs,
            {"X": [X, X], "y": Y, "devices": CTX, "batch_axis": 0, "dtype": None},
        ),
        "split_data": (
            mgpu.split_data,
            {"data": nd(X), "num_slice": 2, "batch_axis": 0, "even_split": True, "weights": None},
        ),
        "gather": (mgpu.gather, {"shards": _shards(X), "ctx": mx.cpu(0), "batch_axis": 0}),
        "plan_shards": (mgpu.plan_shards, {"num_examples": 10, "num_shards": 3, "weights": [2, 1, 1]}),
        "prefetch": (
            lambda **options: _read(mgpu.prefetch(**options)),
            {"data_iter": batches, "devices": CTX, "split_f": split, "num_batches": 2, "background": False},
        ),
        "Balancer": (_balanced(world), {"trainer": trainer, "batch_axis": 0, "every": 10, "x": X, "y": Y, "devices": CTX}),
        "copyto": (mgpu.copyto, {"data": {"x": nd(X)}, "target": mx.cpu(1)}),
        "as_in_context": (mgpu.as_in_context, {"data": [X, nd(Y)], "ctx": mx.cpu(1)}),
        "Trainer": (
            _made_trainer(world, mgpu.Trainer),
            {
                "optimizer": "sgd",
                "optimizer_params": {"learning_rate": 0.1},
                "kvstore": "device",
                "compression_params": None,
                "update_on_kvstore": None,
                "clip_norm": 1.0,
                "clip_value": 1.0,
                "measure_grad_norm": True,
                "static_graph": False,
                "find_unused_parameters": False,
                "precision": None,
                "sharded_data": False,
                "shard_optimizer": False,
                "bucket_bytes": 1024,
            },
        ),
        "Trainer of parameters": (_made_trainer(world, mgpu.Trainer), {"params": net, "optimizer": "sgd"}),
        "LocalSGD": (_made_trainer(world, mgpu.LocalSGD), {"optimizer": "sgd", "optimizer_params": {}, "every": 2}),
        "Trainer.step": (trainer.step, {"batch_size": 6, "ignore_stale_grad": False}),
        "Trainer.update": (trainer.update, {"batch_size": 6, "ignore_stale_grad": False}),
        "Trainer.flush": (trainer.flush, {"ignore_stale_grad": False}),
        "Trainer.save_states": (trainer.save_states, {"fname": str(folder / "new")}),
        "Trainer.load_states": (trainer.load_states, {"fname": str(folder / "states")}),
        "backward": (mgpu.backward, {"losses": None}),  # made below, after the state was noted
        "train_batch": (
            mgpu.train_batch,
            {
                "net": net,
                "loss": LOSS,
                "trainer": trainer,
                "X": X,
                "y": Y,
                "split_f": split,
                "ignore_stale_grad": False,
                "micro_steps": 2,
            },
        ),
        "eval_batch": (
            mgpu.eval_batch,
            {"net": net, "X": X, "y": Y, "devices": CTX, "loss": LOSS, "split_f": split},
        ),
        "DataParallelModel": (
            _made_model(world),
            {
                "module": net,
                "ctx_list": CTX,
                "sync": False,
                "batch_axis": 0,
                "output_device": None,
                "output_axis": None,
                "x": nd(X),
            },
        ),
        "DataParallelCriterion": (
            _made_criterion,
            {"module": LOSS, "ctx_list": CTX, "sync": False, "batch_axis": 0, "y": nd(Y)},
        ),
        "set_precision": (mgpu.set_precision, {"net": net, "precision": "fp32"}),
        "precision_of": (mgpu.precision_of, {"net": net}),
        "LossScaler": (mgpu.LossScaler, {"scale": 1024.0, "factor": 2.0, "every": 20}),
        "LossScaler.scale_losses": (mgpu.LossScaler().scale_losses, {"losses": _shards(X)}),
        "scaled_learning_rate": (mgpu.scaled_learning_rate, scaled),
        "scaled_params": (mgpu.scaled_params, {**scaled, "steps_per_epoch": 10, "warmup_epochs": 2, "epochs": 10}),
        "clip_global_norm": (_clipped, {"gradients": [nd([3.0]), nd([[4.0]])], "max_norm": 1.0}),
        "set_batch_norm": (mgpu.set_batch_norm, {"net": net, "bn": "average"}),
        "convert_sync_batchnorm": (mgpu.convert_sync_batchnorm, {"net": net}),
        "revert_sync_batchnorm": (mgpu.revert_sync_batchnorm, {"net": net}),
        "forward_shards": (mgpu.forward_shards, {"net": net, "Xs": _shards(X)}),
        "average_running_stats": (mgpu.average_running_stats, {"params": net}),
        "replica_difference": (mgpu.replica_difference, {"params": net}),
        "fit": (
            mgpu.fit,
            {
                "net": net,
                "loss": LOSS,
                "trainer": trainer,
                "train_iter": batches,
                "test_iter": batches,
                "epochs": 1,
                "metrics": [mgpu.accuracy],
                "callbacks": [],
                "split_f": split,
                "weights": None,
                "max_inflight": 2,
                "bn": None,
                "micro_steps": 1,
                "accumulate_grad_batches": 1,
                "resume": None,
            },
        ),
        "evaluate": (
            mgpu.evaluate,
            {"net": net, "data_iter": batches, "metrics": [mgpu.accuracy], "loss": LOSS, "split_f": split},
        ),
        "evaluate_accuracy_gpus": (mgpu.evaluate_accuracy_gpus, {"net": net, "data_iter": batches, "split_f": split}),
        "predict": (
            mgpu.predict,
            {
                "net": net,
                "data_iter": batches,
                "pairs": True,
                "batch_axis": 0,
                "output_axis": None,
                "weights": [1, 2],
                "max_inflight": 2,
                "ctx": mx.cpu(0),
                "progress": False,
            },
        ),
        "predict_batches": (
            lambda **options: list(mgpu.predict_batches(**options)),
            {
                "net": net,
                "data_iter": [X, X[:1]],
                "pairs": False,
                "batch_axis": 0,
                "output_axis": 0,
                "weights": None,
                "max_inflight": 2,
            },
        ),
        "accuracy": (mgpu.accuracy, {"output": nd(X[:, :3]), "label": nd(Y)}),
        "top_k_accuracy": (_top_k, {"k": 2, "output": nd(X[:, :3]), "label": nd(Y)}),
        "DeviceSums": (_summed, {"metrics": [mgpu.accuracy], "output": nd(X[:, :3]), "label": nd(Y)}),
        "DeviceSums.add": (mgpu.DeviceSums().add, {"name": "sum", "value": nd([1.0]), "count": 3}),
        "Progress": (_with_callback(world, mgpu.Progress), {"unit": "images", "every_s": 5.0}),
        "SaveHistory": (_with_callback(world, mgpu.SaveHistory), {"folder": folder / "history"}),
        "EarlyStopping": (
            _with_callback(world, mgpu.EarlyStopping),
            {"monitor": "test_loss", "patience": 3, "min_delta": 0.0, "mode": "min"},
        ),
        "Checkpoint": (
            _with_callback(world, mgpu.Checkpoint),
            {
                "folder": folder / "run",
                "monitor": "test_accuracy",
                "mode": None,
                "every": 1,
                "keep": 2,
                "background": False,
            },
        ),
        "LeakCheck": (
            _with_callback(world, mgpu.LeakCheck),
            {"every": 5, "contexts": [mx.cpu(0)], "tolerance_bytes": 256.0, "max_inflight": 2},
        ),
        "Monitor": (_with_callback(world, mgpu.Monitor), {"folder": None, "interval_s": 1.0, "contexts": CTX}),
        "Watchdog": (_with_callback(world, mgpu.Watchdog), {"timeout_s": 120.0, "file": None, "end_process": False}),
        "save_checkpoint": (
            mgpu.save_checkpoint,
            {"folder": folder / "new", "net": net, "trainer": trainer, "progress": {"epoch": 1}},
        ),
        "load_checkpoint": (mgpu.load_checkpoint, {"folder": folder / "saved", "net": net, "trainer": trainer}),
        "find_batch_size": (
            mgpu.find_batch_size,
            {
                "workload": "nowhere.py:make",
                "devices": "cpu",
                "options": None,
                "memory_limit_bytes": None,
                "first": 16,
                "max_batch_size": 64,
                "multiple_of": None,
                "timeout_s": 3.0,
            },
        ),
        "this_process": (mgpu.this_process, {"environ": {}}),
        "translate": (
            _translated,
            {
                "sentences": source,
                "bos": 1,
                "eos": 2,
                "source_eos": 2,
                "beam_size": 2,
                "num_best": 1,
                "alpha": 1.0,
                "penalty": "wu",
                "max_length": 5,
                "batch_size": 2,
                "attention": False,
            },
        ),
        "plot_attention": (
            mgpu.plot_attention,
            {"weights": np.ones((2, 3)) / 3, "source": ["a", "b", "c"], "target": ["d", "e"]},
        ),
        "Translator": (
            mgpu.Translator,
            {"source_vocabulary": _vocabulary(), "target_vocabulary": _vocabulary(), "embed_size": 4, "hidden_size": 4},
        ),
        "load_translator": (mgpu.load_translator, {"folder": folder / "saved", "ctx": mx.cpu(0)}),
        "debugging": (_entered(mgpu.debugging), {"net": net, "loss": LOSS, "check_finite": True}),
        "ArrayLoader": (
            lambda **options: _read(data.ArrayLoader(**options)),
            {"X": X, "y": Y, "batch_size": 4, "shuffle": True, "seed": 0, "last_batch": "keep"},
        ),
        "ShardedSampler": (
            lambda **options: _read(data.ShardedSampler(**options)),
            {"num_examples": 10, "batch_size": 4, "shuffle": True, "seed": 0, "process": None},
        ),
        "skip_first_batches": (
            lambda **options: _read(data.skip_first_batches(**options)),
            {"loader": batches, "num_batches": 1},
        ),
        "load_idx_folder": (data.load_idx_folder, {"folder": folder / "nowhere", "seed": 0, "test_fraction": 0.2}),
        "read_idx": (data.read_idx, {"path": folder / "a.txt", "num_dimensions": 1}),
        "SentencePairs": (data.SentencePairs, {"source": ["a"], "target": ["b"]}),
        "read_pairs": (
            data.read_pairs,
            {"source_path": folder / "a.txt", "target_path": folder / "b.txt", "skip_empty": False},
        ),
        "read_tsv": (
            data.read_tsv,
            {"path": folder / "a.txt", "source_column": 0, "target_column": 1, "skip_empty": False},
        ),
        "filter_pairs": (
            data.filter_pairs,
            {"pairs": _lines(), "min_length": 1, "max_length": 20, "max_ratio": 3.0, "length": len},
        ),
        "split_pairs": (data.split_pairs, {"pairs": _lines(), "sizes": [2, 1], "seed": 0}),
        "normalise": (data.normalise, {"text": "a  b"}),
        "korean_numbers": (data.korean_numbers, {"num_examples": 5, "seed": 0, "held_out": False, "max_digits": 4}),
        "exact_match": (data.exact_match, {"translations": ["a"], "references": ["a"]}),
        "build_vocabulary": (
            data.build_vocabulary,
            {"texts": ["a b c", "d e"], "kind": "words", "size": 9, "min_count": 1, "character_coverage": 0.9995},
        ),
        "load_vocabulary": (data.load_vocabulary, {"path": folder / "a.txt"}),
        "check_vocabulary": (data.check_vocabulary, {"vocabulary": _vocabulary(), "config": {}, "name": "vocabulary"}),
        "encode_pairs": (
            data.encode_pairs,
            {"pairs": _lines(), "source_vocabulary": _vocabulary(), "target_vocabulary": _vocabulary()},
        ),
        "PairLoader": (
            lambda **options: _read(data.PairLoader(**options)),
            {
                "source": source,
                "target": target,
                "batch_tokens": 30,
                "shuffle": True,
                "seed": 0,
                "batch_axis": 0,
                "num_shards": 1,
                "num_buckets": 2,
            },
        ),
        "plan_buckets": (data.plan_buckets, {"lengths": lengths, "batch_tokens": 20, "num_buckets": 2}),
        "padding_share": (data.padding_share, {"lengths": lengths, "buckets": data.plan_buckets(lengths, 20, 2)}),
        "balance_shards": (data.balance_shards, {"lengths": lengths, "num_shards": 2}),
        "Seq2Seq": (
            _made_seq2seq,
            {
                "source_vocab_size": 9,
                "target_vocab_size": 9,
                "embed_size": 4,
                "hidden_size": 4,
                "num_layers": 1,
                "cell": "gru",
                "attention": "dot",
                "input_feeding": False,
                "tied": False,
                "dropout": 0.1,
                "layout": "NTC",
                "recurrence": "auto",
            },
        ),
        "SequenceLoss": (models.SequenceLoss, {"label_smoothing": 0.1, "layout": "NTC"}),
        "Residual": (models.Residual, {"num_channels": 4, "use_1x1conv": True, "strides": 2}),
        "resnet18": (models.resnet18, {"num_classes": 10}),
    }


# Public names without arguments that could be wrong, values, and functions that are called through others.
UNTRIED = {
    *("BOS", "EOS", "PAD", "UNK", "Batch", "Callback", "FilteredPairs", "History", "ImageData", "SyncBatchNorm", "Timer"),
    *("Translation", "Vocabulary", "describe_devices", "load_digits", "run_serially", "try_all_gpus"),
    *("load_fashion_mnist", "load_mnist"),  # download missing files
    *("data", "errors", "models", "runtime"),
}
# Calls whose errors may come after an epoch, or leave a folder: a run began.
REFUSED = {
    "check_vocabulary",
    "find_batch_size",
    "load_idx_folder",
    "load_translator",
    "load_vocabulary",
    "read_idx",
}  # of no file
READS = ("evaluate", "predict")  # average BatchNorm's running statistics before they read a batch
TAKES_PATHS = ("save", "load", "read", "Trainer.", "Checkpoint", "SaveHistory", "Monitor", "History")  # may raise an OSError
MAY_CHANGE = {"EarlyStopping", "Checkpoint", "Monitor", "LeakCheck", "Watchdog", "Progress", "SaveHistory"}


# Calls that do not see the network, its trainer and its folder.
LEAVES_ALONE = (
    *("use_devices", "resolve_devices", "try_gpu", "split_", "gather", "plan_", "prefetch", "copyto", "as_in_context", "Loss"),
    *("scaled_", "clip_", "accuracy", "top_k", "DeviceSums", "find_batch_size", "this_process", "translate", "plot_attention"),
    *("Translator", "ArrayLoader", "Sharded", "skip_", "read_", "SentencePairs", "filter_", "normalise", "korean", "exact_match"),
    *("build_", "load_vocabulary", "check_", "encode_", "PairLoader", "padding_", "balance_", "Seq", "Residual", "resnet18"),
)


class _Unprintable:
    def __repr__(self) -> str:
        raise KeyError("no repr")


def _raising(*_: Any, **__: Any) -> Any:
    raise mgpu.errors.DataError("a function of the user's: got a call; expected none. It raises.")


def pool(rng: random.Random) -> List[Callable[[], Any]]:
    """Return what makes wrong values."""
    cpu = mx.cpu(0)
    return [
        *(
            lambda value=value: value
            for value in (None, True, False, -1, 0, 1, 1.5, math.nan, math.inf, -math.inf, 10**30, -(10**30))
        ),
        *(lambda value=value: value for value in (2**63, 10**400, 1e-320, 3 + 2j, np.float32(2.5), np.int64(-3), np.bool_(True))),
        *(
            lambda value=value: value
            for value in ("", "bogus", "a\nb", "x" * 5000, "0", b"x", "cpu:0", "\x00", "/", "auto", "\ud800")
        ),
        lambda: [],
        lambda: [None],
        lambda: {},
        lambda: {"a": 1},
        lambda: (),
        lambda: [[]],
        lambda: [[1, 2], [3]],
        lambda: [1, "a", None],
        lambda: [10**30],
        lambda: list(range(2000)),
        object,
        _Unprintable,
        lambda: lambda: None,
        lambda: lambda *arguments: arguments[0],
        lambda: _raising,
        lambda: (item for item in (1, 2)),
        lambda: {1},
        lambda: range(3),
        lambda: int,
        lambda: gluon.loss.SoftmaxCrossEntropyLoss,
        lambda: mx,
        lambda: np.array(3.0),
        lambda: np.array([]),
        lambda: np.zeros((0, 4), "float32"),
        lambda: np.zeros((6, 3, 2), "float32"),
        lambda: np.zeros((5,), "int32"),
        lambda: np.full((6, 4), np.nan, "float32"),
        lambda: np.array(["a"] * 6),
        lambda: np.array([None] * 6),
        lambda: np.array([1j] * 6),
        lambda: np.ones((6,), bool),
        lambda: np.ones((1000, 1000)),
        lambda: mx.nd.ones((6, 4), ctx=mx.cpu(7)),
        lambda: mx.nd.ones((1,), ctx=cpu),
        lambda: mx.nd.ones((6,), dtype="int32"),
        lambda: mx.nd.array([[0, 1], [2, 0]]).tostype("row_sparse"),
        lambda: [mx.nd.ones((2, 2)), mx.nd.ones((3, 3))],
        lambda: [mx.nd.ones((3, 4), ctx=CTX[0]), mx.nd.ones((3, 4), ctx=CTX[0])],
        lambda: {"x": X, "y": [Y, {"z": (X,)}]},
        lambda: (X, Y),
        lambda: [(X, Y, Y)],
        lambda: [(X, Y[:2])],
        lambda: [X],
        lambda: [CTX[0], CTX[0]],
        lambda: [CTX[0], mx.gpu(99)],
        lambda: mx.gpu(0),
        lambda: mx.cpu_pinned(0),
        lambda: [mx.cpu(i) for i in range(3)],
        lambda: gluon.nn.Dense(3),
        lambda: _initialised(gluon.nn.Flatten()),
        lambda: _initialised(gluon.nn.Dense(2)),
        lambda: gluon.Trainer(_initialised(gluon.nn.Dense(2, in_units=2)).collect_params(), "sgd"),
        lambda: Path("/nowhere/at/all"),
        lambda: Path("."),
        lambda: mx.optimizer.SGD(lr_scheduler=len),
        lambda: [mgpu.Checkpoint],
        lambda: _self_containing(),
        lambda: mx.sym.var("x"),
        lambda: np.array(rng.choices([-(2**31), -1, 0, 1, 7, 2**31 - 1], k=6)),
    ]


def _initialised(net: gluon.Block) -> gluon.Block:
    net.initialize(ctx=[mx.cpu(0)])
    return net


def _self_containing() -> Any:
    value: List[Any] = [1]
    value.append(value)
    return value


_world: Optional[World] = None  # which trials share until one may have changed it


def trial(seed: int) -> str:
    """Call one function with one or two wrong arguments and return the errors in its response."""
    global _world
    if _world is None:
        folder = Path(tempfile.mkdtemp(prefix="arguments_"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        (folder / "world").mkdir()
        mx.random.seed(0)
        _world = World(folder / "world")
    there, folder = Path.cwd(), _world.folder.parent
    try:
        os.chdir(folder)  # a relative path is not to be written into the repository
        name, found = _tried(seed, folder, _world)
    finally:
        os.chdir(there)
    if found or not name.startswith(LEAVES_ALONE):
        shutil.rmtree(folder)
        _world = None
    return found


def _tried(seed: int, folder: Path, world: World) -> Tuple[str, str]:
    """Return the name of the called function, and the errors."""
    rng = random.Random(seed)
    random.seed(seed), np.random.seed(seed), mx.random.seed(seed)
    table = calls(world)
    name = sorted(table)[seed % len(table)]
    function, right = table[name]
    if name in ("Trainer.step", "Trainer.update"):
        mgpu.backward(_losses(world))
    if name == "Trainer.update":
        world.trainer.allreduce_grads()
    if name == "backward":
        right = {"losses": _losses(world)}
    wrong, choices = dict(right), pool(rng)
    chosen = rng.sample(
        sorted(right), min(len(right), rng.choice([0, 1, 1, 1, 1, 2]) if seed % 50 == 0 else rng.choice([1, 1, 2]))
    )
    for argument in chosen:
        wrong[argument] = rng.choice(choices)()
    values = ", ".join(f"{argument}={mgpu.checks.short(wrong[argument])}" for argument in chosen)
    what = f"seed {seed}: {name}({values})"
    statistics = not name.startswith(READS)
    before, files = world.values(statistics), world.files()
    error, result = _answer(function, wrong, what)
    found = _judge(name, right, error, result, bool(chosen))
    if error is not None and name not in MAY_CHANGE and not isinstance(error, TookTooLong):
        with contextlib.suppress(mx.MXNetError):
            mx.nd.waitall()
        if any(not np.array_equal(one, other, equal_nan=True) for one, other in zip(before, world.values(statistics))):
            found.append("weights or states differ after the error")
        if world.files() != files or sorted(path.name for path in folder.iterdir()) != ["world"]:
            found.append("files differ after the error")
    return name, "\n  ".join([what, *found]) if found else ""


def _answer(function: Call, arguments: Dict[str, Any], what: str) -> Tuple[Any, Any]:
    """Return the error, and the result, of a call that is ended if it takes long."""

    def ring(number: int, frame: Any) -> None:
        raise TookTooLong

    signal.signal(signal.SIGPROF, ring)
    deadly = threading.Timer(DEADLY_S, _end, [what])
    deadly.daemon = True
    deadly.start()
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            result = function(**arguments)
            mx.nd.waitall()
            return None, result
    except BaseException as error:
        return error, None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        deadly.cancel()


def _end(what: str) -> None:
    """End the search, naming the call that did not come back to Python."""
    print(f"{what}\n  did not come back in {DEADLY_S:.0f} s", file=sys.__stderr__, flush=True)
    faulthandler.dump_traceback(file=2)
    os._exit(2)


def _judge(name: str, right: Dict[str, Any], error: Any, result: Any, is_wrong: bool) -> List[str]:
    if error is None:
        return [f"a result that makes no sense: {mgpu.checks.short(result)}"] if _is_nonsense(name, result) else []
    kind, text = type(error), str(error)
    if isinstance(error, TookTooLong):
        return [f"more than {LIMIT_S:.0f} s"]
    if not is_wrong and name not in REFUSED:
        return [f"right arguments were refused: {kind.__name__}: {text[:300]}"]
    if "of the user's" in text or "<lambda>() takes" in text or "no repr" in text:  # raised by the passed object
        return []
    if isinstance(error, OSError) and name.startswith(TAKES_PATHS) and len(text.splitlines()) == 1:
        return []
    found = []
    if kind.__module__.split(".")[0] != "gluon_mgpu":
        place = error.__traceback__
        while place.tb_next is not None:
            place = place.tb_next
        where = f"{Path(place.tb_frame.f_code.co_filename).name}:{place.tb_lineno}"
        found.append(f"a foreign error at {where}: {kind.__module__}.{kind.__name__}: {text[:200]!r}")
    elif not HOUSE.match(text):
        found.append(f"an error in another form: {kind.__name__}: {text[:300]!r}")
    if len(text.splitlines()) > 1 or len(text) > MOST_CHARACTERS:
        found.append(f"an error of {len(text.splitlines())} lines and {len(text)} characters: {text[:200]!r}")
    return found


def _is_nonsense(name: str, result: Any) -> bool:
    if name in ("plan_shards",):
        return not all(isinstance(one, int) and one >= 0 for one in result)
    numbers: Sequence[Any] = [result] if isinstance(result, (int, float)) else list(result.values()) if _is_means(result) else []
    return any(isinstance(one, float) and not one >= 0 for one in numbers) and name in (
        *("scaled_learning_rate", "replica_difference", "exact_match", "padding_share", "evaluate_accuracy_gpus"),
    )


def _is_means(result: Any) -> bool:
    return isinstance(result, dict) and all(isinstance(one, float) for one in result.values())


def untried() -> Iterator[str]:
    """Yield the public names that no call of this module is of."""
    folder = Path(tempfile.mkdtemp(prefix="arguments_"))
    try:
        known = {name.split(".")[0].split(" ")[0] for name in calls(World(folder))}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    public = [*mgpu.__all__, *mgpu.data.__all__, *mgpu.models.__all__]
    yield from (name for name in public if name not in known and name not in UNTRIED)


if __name__ == "__main__":
    print(*untried(), file=sys.stderr)

"""Files that are altered but well formed: each must be rejected before any state changes, or do no harm.

A trial takes a checkpoint, a translator or a file of states, changes one to three things in it, and corrects the checksums. Then
it loads the result in one of the ways a user has. It reports an error that is not ours, an error after which network, trainer,
data iterator or random numbers are others, training that fails after the file was accepted, and a load that does not end.

Set GLUON_MGPU_TRIALS_VERBOSE=1 to print what each trial changed and what came of it.
"""

from __future__ import annotations

import atexit
import copy
import hashlib
import io
import json
import os
import pickle
import random
import re
import shutil
import signal
import sys
import tempfile
import warnings
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
from click.testing import CliRunner
from gluon_mgpu import errors
from gluon_mgpu.cli.main import main as command
from gluon_mgpu.data import ArrayLoader, build_vocabulary
from gluon_mgpu.models.seq2seq.callbacks import PlateauSchedule
from gluon_mgpu.nested import leaves
from mxnet import gluon, lr_scheduler
from mxnet import optimizer as opt

_LIMIT_S = 60
_OURS = tuple(one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, BaseException))
_HOUSE = re.compile(r"[^\n]+?: got [^\n]+; expected [^\n]+\. [^\n]+\.")
_VERBOSE = bool(os.environ.get("GLUON_MGPU_TRIALS_VERBOSE"))
_LOSS = gluon.loss.SoftmaxCrossEntropyLoss()

_VALUES: List[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 624, 625, 10**30, -(10**30), 10**400, 2**31, 2**53, 2**63, 0.0, 0.5, -0.5, 1e308, 1e-320,
    float("nan"), float("inf"), float("-inf"), "", "0", "7", "state/0", "a\n\x1b[31mb", "\ud800", "x" * 5000, "adam", [], [1],
    [[]], {}, {"a": 1}, {"array": "state/0"}, {"tuple": [1]}, {"dict": [[[], 1]]},
]  # fmt: skip


class Own(opt.SGD):
    """An optimizer as a user writes one, with values that move while it trains."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen, self.largest, self.mode = 0, (1, [2.5, None]), "warm"

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Count and update."""
        self.seen += 1
        super().update(index, weight, grad, state)


opt.Optimizer.register(Own)

# optimizer, its parameters, number of devices, BatchNorm, options of Trainer
_RUNS: Dict[str, Tuple[str, Callable[[], Dict[str, Any]], int, bool, Dict[str, Any]]] = {
    "momentum": ("sgd", lambda: {"momentum": 0.9, **_rate(lr_scheduler.FactorScheduler(2, 0.9, base_lr=0.1))}, 2, True, {}),
    "adam": ("adam", lambda: _rate(lr_scheduler.MultiFactorScheduler([2, 5], 0.5, base_lr=0.01)), 1, False, {"clip_norm": 1}),
    "cosine": ("nadam", lambda: _rate(lr_scheduler.CosineScheduler(40, 0.01, warmup_steps=3)), 2, False, {}),
    "plateau": ("lamb", lambda: _rate(PlateauSchedule(0.01, 3)), 1, True, {}),
    "lbsgd": ("lbsgd", lambda: {"momentum": 0.9, "learning_rate": 0.01}, 1, False, {}),
    "own": ("own", lambda: {"momentum": 0.9, "learning_rate": 0.01}, 2, False, {}),
    "bf16": ("sgd", lambda: {"momentum": 0.9, "learning_rate": 0.01}, 2, False, {"precision": "bf16"}),
}


def _rate(schedule: lr_scheduler.LRScheduler) -> Dict[str, Any]:
    return {"learning_rate": schedule.base_lr, "lr_scheduler": schedule}


class _Run:
    """A network with its trainer and data, which has trained a little."""

    def __init__(self, kind: str, *, begun: bool) -> None:
        name, params, num_devices, normalized, options = _RUNS[kind]
        self.ctx = [mx.cpu(i) for i in range(num_devices)]
        self.net = gluon.nn.HybridSequential()
        self.net.add(gluon.nn.Dense(4, activation="relu"))
        if normalized:
            self.net.add(gluon.nn.BatchNorm())
        self.net.add(gluon.nn.Dense(3))
        self.net.initialize(mx.init.Xavier(), ctx=self.ctx)
        self.trainer = mgpu.Trainer(self.net, name, params(), **options)
        numbers = np.random.RandomState(5)
        self.data = ArrayLoader(numbers.rand(12, 5).astype("float32"), numbers.randint(0, 3, 12), 3, shuffle=True)
        if begun:
            for X, y in self.data:
                mgpu.train_batch(self.net, _LOSS, self.trainer, X, y)

    def fit(self, epochs: int, **options: Any) -> Any:
        """Train for some epochs."""
        return mgpu.fit(self.net, _LOSS, self.trainer, self.data, self.data, epochs=epochs, **options)

    def state(self) -> str:
        """Return a digest of all that a load that fails must leave alone."""
        mx.nd.waitall()
        digest = hashlib.sha256()
        for name, param in sorted(self.net._collect_params_with_prefix().items()):
            arrays = param.list_data() if param._data is not None else []
            digest.update(name.encode() + b"".join(array.asnumpy().tobytes() for array in arrays))
        trainer = self.trainer
        optimizer = trainer.optimizer
        update = trainer._update
        for states in (updater.states for updater in update.updaters):
            for index in sorted(states):
                found = [value for _, value in leaves([states[index]]) if value is not None]
                digest.update(b"".join(np.asarray(getattr(one, "asnumpy", lambda one=one: one)()).tobytes() for one in found))
        digest.update(repr(sorted(update.counts().items())).encode())
        kept = {k: v for k, v in vars(optimizer).items() if k not in ("param_dict", "lr_scheduler", "_index_update_count")}
        digest.update(repr(sorted((k, repr(v)) for k, v in kept.items() if k != "_all_index_update_counts")).encode())
        digest.update(repr(sorted(vars(optimizer.lr_scheduler).items()) if optimizer.lr_scheduler else None).encode())
        digest.update(repr((id(optimizer), id(optimizer.lr_scheduler), self.data.epoch, random.getstate())).encode())
        _, keys, place, *_ = np.random.get_state()
        digest.update(repr((np.asarray(keys).tobytes(), place)).encode())
        return digest.hexdigest()


@lru_cache(maxsize=None)
def _assets() -> Path:
    """Return a folder with small real files of each kind, made once per process."""
    folder = Path(tempfile.mkdtemp(prefix="gluon_mgpu-damaged-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for kind in _RUNS:
        _seed(0)
        run = _Run(kind, begun=False)
        run.fit(2, callbacks=[mgpu.Checkpoint(folder / kind, "test_loss", every=3, keep=9)])
        run.trainer.save_states(str(folder / f"{kind}.states"))
        mgpu.save_checkpoint(folder / f"{kind}.hand", run.net, run.trainer, {"note": "by hand"})
    plain = _Run("momentum", begun=False)
    other = gluon.Trainer(plain.net.collect_params(), "sgd", {"momentum": 0.9}, update_on_kvstore=False)
    with mx.autograd.record():
        losses = [plain.net(mx.nd.ones((2, 5), ctx=ctx)).sum() for ctx in plain.ctx]
    mx.autograd.backward(losses)
    other.step(4)
    (folder / "gluon.states").write_bytes(other._updaters[0].get_states(dump_optimizer=True))
    texts = ["one two three", "two one", "four three two one", "one", "five six seven"]
    for kind, tied in (("words", True), ("characters", False), ("subwords", False)):
        _seed(0)
        vocabularies = [build_vocabulary(texts * 5, kind, size=24) for _ in range(2)]
        translator = mgpu.Translator(*vocabularies, embed_size=4, hidden_size=4, tied=tied)
        translator.net.initialize(ctx=mx.cpu())
        translator.translate(["one"])
        translator.save(folder / f"translator-{kind}")
    return folder


def trial(seed: int) -> str:
    """Return what went wrong with one altered file; nothing where all is well."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="gluon_mgpu-damaged-") as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load = rng.choice([_checkpoint, _checkpoint, _resumed, _resumed, _resumed, _translator, _states])
        changes, alter, run, use = load(rng, Path(name))
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            changes.append(alter())
        _seed(seed)
        before = run.state() if run is not None else ""
        what, found = "loaded", ""
        try:
            with _limited(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                what = use() or what
        except _LimitError:
            found = f"did not end within {_LIMIT_S} s"
        except _OURS as error:
            what = f"{type(error).__name__}: {error}"
            trained = isinstance(error, errors.NonFiniteLossError)  # with values that were accepted, and used unchanged
            if not _HOUSE.fullmatch(str(error)) or len(str(error)) > 1500:
                found = f"an error of another form: {str(error)!r:.600}"
            elif run is not None and not trained and run.state() != before:
                found = f"something was changed, and then: {error}"
        except Exception as error:
            found = f"a foreign error: {type(error).__name__}: {error!s:.300} at {_where(error)}"
        if _VERBOSE:
            print(f"{seed} {load.__name__} {changes} -> {what:.300}", file=sys.stderr)
        return f"seed {seed}: {load.__name__}, {'; '.join(changes)}: {found}" if found else ""


_Load = Tuple[List[str], Callable[[], str], Optional[_Run], Callable[[], str]]


def _checkpoint(rng: random.Random, folder: Path) -> _Load:
    kind = rng.choice(list(_RUNS))
    source = rng.choice([_assets() / f"{kind}.hand", _assets() / kind / "last"])
    copied = folder / "c"
    shutil.copytree(source, copied)
    run = _Run(kind, begun=rng.random() < 0.7)
    alone = rng.random() < 0.2

    def use() -> str:
        mgpu.load_checkpoint(copied, run.net, None if alone else run.trainer)
        for X, y in run.data:
            mgpu.train_batch(run.net, _LOSS, run.trainer, X, y)
        mx.nd.waitall()
        return "loaded and trained"

    return [source.name, kind], lambda: _altered_folder(rng, copied), run, use


def _resumed(rng: random.Random, folder: Path) -> _Load:
    kind = rng.choice(list(_RUNS))
    source = rng.choice([path for path in (_assets() / kind).iterdir() if path.is_dir() and not path.name.startswith(".")])
    copied = folder / "run" / source.name
    shutil.copytree(source, copied)
    run = _Run(kind, begun=rng.random() < 0.7)
    resume = rng.choice(["auto", str(copied)])
    callbacks = [mgpu.Checkpoint(folder / "run", "test_loss", every=3), mgpu.EarlyStopping(patience=9)]

    def use() -> str:
        rows = run.fit(4, callbacks=callbacks, resume=resume).rows
        mx.nd.waitall()
        return f"trained {len(rows)} epochs"

    return [source.name, kind, resume[:4]], lambda: _altered_folder(rng, copied), run, use


def _translator(rng: random.Random, folder: Path) -> _Load:
    kind = rng.choice(["words", "characters", "subwords"])
    copied = folder / "t"
    shutil.copytree(_assets() / f"translator-{kind}", copied)
    by_command = rng.random() < 0.4
    (folder / "text").write_text("one two\nthree\n")

    def use() -> str:
        if not by_command:
            return str(mgpu.load_translator(copied, mx.cpu()).best(["one two", "three"], max_length=4))[:40]
        done = CliRunner().invoke(command, ["translate", str(folder / "text"), "--model", str(copied), "--devices", "cpu:1"])
        if done.exception is None or isinstance(done.exception, SystemExit):
            printed = done.output.strip().splitlines()
            last = printed[-1] if printed else ""
            if done.exit_code and not _HOUSE.fullmatch(re.sub("^Error: ", "", last)):
                raise RuntimeError(f"the command ends with {done.exit_code} and {last:.200}")
            return f"command: {done.exit_code} {last:.200}"
        raise done.exception

    return [kind, "command" if by_command else "function"], lambda: _altered_folder(rng, copied), None, use


def _states(rng: random.Random, folder: Path) -> _Load:
    kind = rng.choice([*_RUNS, "gluon"])
    path = folder / "states"
    shutil.copyfile(_assets() / f"{kind}.states", path)
    run = _Run("momentum" if kind == "gluon" else kind, begun=True)

    def use() -> str:
        run.trainer.load_states(str(path))
        for X, y in run.data:
            mgpu.train_batch(run.net, _LOSS, run.trainer, X, y)
        mx.nd.waitall()
        return "loaded and trained"

    return [kind], lambda: _altered_pickle(rng, path, raw=kind != "gluon"), run, use


def _altered_folder(rng: random.Random, folder: Path) -> str:
    """Change something in a file of a folder, correct the manifest, and return a description of the change."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    plain = [path for path in files if path.suffix == ".json"]
    path = rng.choice(plain if rng.random() < 0.8 else files)
    if path.suffix == ".json":
        done = _altered_json(rng, path)
    elif path.suffix == ".npz" and rng.random() < 0.7:
        done = _altered_arrays(rng, path)
    else:
        done = _altered_bytes(rng, path)
    manifest = path.parent / "manifest.json"
    if path != manifest and manifest.is_file():
        try:
            content = json.loads(manifest.read_text())
            if path.name in content["files"]:
                sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
                content["files"][path.name] = {"bytes": path.stat().st_size, "sha256": sha256}
                manifest.write_text(json.dumps(content))
        except (ValueError, KeyError, TypeError, RecursionError):
            pass  # it was altered before
    return f"{path.name}: {done}"


def _altered_json(rng: random.Random, path: Path) -> str:
    try:
        content = json.loads(path.read_text())
    except (ValueError, RecursionError):
        return _altered_bytes(rng, path)
    way = rng.random()
    if way < 0.02:
        text = json.dumps(content)
        path.write_text(
            rng.choice(["[" * 3000 + "]" * 3000, text[:-1], text + text, "null", "", text.replace('": ', '": 1e999, "z": ', 1)])
        )
        return "another text"
    if way < 0.04:
        path.write_text(re.sub(r'("\w+": )', r"\1 0, \1", json.dumps(content), count=1))
        return "a key twice"
    content, done = _altered_value(rng, content)
    path.write_text(json.dumps(content))
    return done


def _altered_arrays(rng: random.Random, path: Path) -> str:
    try:
        with np.load(path) as file:
            arrays = dict(file.items())
    except Exception:
        return _altered_bytes(rng, path)
    if not arrays:
        return _altered_bytes(rng, path)
    name = rng.choice(sorted(arrays))
    array = arrays.pop(name)
    way = rng.choice(["dropped", "renamed", "dtype", "shape", "text", "swapped", "added", "not finite"])
    if way == "renamed":
        arrays[rng.choice(["x", "state/0", "sum/x", "sum/cpu(0)/x/y", "device/9/a", "norm/x", name + "/0"])] = array
    elif way == "dtype":
        arrays[name] = array.astype(rng.choice(["float64", "int8", "complex64", "float16", "bool"]))
    elif way == "shape":
        arrays[name] = rng.choice([array[:0], array.reshape(-1, 1), np.concatenate([array, array]), array.sum()])
    elif way == "text":
        arrays[name] = np.array(["a", "b"])
    elif way == "swapped" and arrays:
        other = rng.choice(sorted(arrays))
        arrays[name], arrays[other] = arrays[other], array
    elif way == "added":
        arrays[name], arrays[rng.choice(["x", "sum/x", "state/9", "device/7/x", "norm/sum"])] = array, array
    elif way == "not finite":
        arrays[name] = array * np.nan
    np.savez(path, **arrays)
    return f"{name} {way}"


def _altered_bytes(rng: random.Random, path: Path) -> str:
    content = bytearray(path.read_bytes())
    if not content:
        path.write_bytes(b"\0")
        return "a byte in an empty file"
    place = rng.choice([rng.randrange(len(content)), rng.randrange(min(len(content), 120))])
    way = rng.choice(["flipped", "cut", "longer", "empty", "zeroed", "large"])
    if way == "flipped":
        content[place] ^= 1 << rng.randrange(8)
    elif way == "cut":
        content = content[:place]
    elif way == "longer":
        content += bytes(rng.randrange(256) for _ in range(9))
    elif way == "empty":
        content = bytearray()
    else:
        content[place : place + 8] = b"\0" * 8 if way == "zeroed" else b"\xff" * 8
    path.write_bytes(bytes(content))
    return f"{way} at {place}"


def _altered_pickle(rng: random.Random, path: Path, *, raw: bool) -> str:
    try:
        content = pickle.loads(path.read_bytes())
    except Exception:
        return "already damaged"
    if raw and rng.random() < 0.15:
        return _altered_bytes(rng, path)
    if raw and isinstance(content, dict) and isinstance(content.get("optimizer"), bytes) and rng.random() < 0.6:
        done = "optimizer: " + _altered_optimizer(rng, content)
    elif not raw and isinstance(content, tuple) and rng.random() < 0.6:
        done = "optimizer: " + _altered_attributes(rng, content[1])
    else:
        content, done = _altered_value(rng, content)
    path.write_bytes(pickle.dumps(content))
    return done


def _altered_optimizer(rng: random.Random, content: Dict[str, Any]) -> str:
    way = rng.random()
    pickled = content["optimizer"]
    if way < 0.2:
        content["optimizer"] = rng.choice([pickled[: len(pickled) // 2], b"", b"x", pickle.dumps(5), pickle.dumps(opt.FTML)])
        return "other bytes"
    try:
        optimizer = pickle.loads(pickled)
    except Exception:
        return "already damaged"
    if way < 0.3:
        content["optimizer"] = pickle.dumps(opt.FTML())
        return "FTML"
    done = _altered_attributes(rng, optimizer)
    content["optimizer"] = pickle.dumps(optimizer)
    return done


def _altered_attributes(rng: random.Random, optimizer: Any) -> str:
    if not hasattr(optimizer, "__dict__") or isinstance(optimizer, type):
        return "none"
    schedule = getattr(optimizer, "lr_scheduler", None)
    thing = schedule if hasattr(schedule, "__dict__") and rng.random() < 0.4 else optimizer
    if not vars(thing):
        return "none"
    name = rng.choice(sorted(set(vars(thing)) - {"param_dict"}))  # which is never pickled
    if rng.random() < 0.2:
        delattr(thing, name)
        return f"{name} dropped"
    old = getattr(thing, name)
    if isinstance(old, (dict, list, tuple)) and old and rng.random() < 0.5:
        value, done = _altered_value(rng, old)
    else:
        value = rng.choice(_VALUES)
        done = f"= {value!r:.60}"
    setattr(thing, name, value)
    return f"{name} {done}"


def _paths(value: Any, path: Tuple[Any, ...] = ()) -> Iterator[Tuple[Any, ...]]:
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from _paths(value[key], (*path, key))
    elif isinstance(value, (list, tuple)):
        for i, one in enumerate(value):
            yield from _paths(one, (*path, i))


def _altered_value(rng: random.Random, content: Any) -> Tuple[Any, str]:
    """Return a copy of nested data with one change, and a description of the change."""
    content = _mutable(copy.deepcopy(content))
    paths = list(_paths(content))
    depth = rng.randint(0, max(map(len, paths)))
    path = rng.choice([one for one in paths if len(one) >= depth] or paths)
    if not path:
        value = rng.choice(_VALUES)
        return value, f"all = {value!r:.60}"
    holder = content
    for key in path[:-1]:
        holder = holder[key]
    key, old = path[-1], holder[path[-1]]
    where = "".join(f"[{one!r:.30}]" for one in path)
    way = rng.choice(
        [
            "set",
            "set",
            "set",
            "moved",
            "dropped",
            "renamed",
            "added",
            "repeated",
            "reordered",
            "swapped",
            "nested",
            "emptied",
            "cut",
        ]
    )
    if way == "dropped":
        del holder[key]
    elif way == "renamed" and isinstance(holder, dict):
        holder[rng.choice(["", "x", f"{key}_", f"{key} ", "7", "-1", "99", "learning_rate", "update", "__class__"])] = holder.pop(
            key
        )
    elif way == "added":
        if isinstance(holder, dict):
            holder[rng.choice(["x", "learning_rate", "update", "9999", "07", "a b\n"])] = rng.choice([old, *_VALUES])
        else:
            holder.insert(key, rng.choice(_VALUES))
    elif way == "repeated" and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(old))
    elif way == "reordered" and isinstance(holder, list):
        rng.shuffle(holder)
    elif way == "swapped":
        other = rng.choice([one for one in paths if one and one[: len(path)] != path and path[: len(one)] != one] or [path])
        there = content
        for one in other[:-1]:
            there = there[one]
        holder[key], there[other[-1]] = there[other[-1]], old
        where += " and " + "".join(f"[{one!r:.30}]" for one in other)
    elif way == "nested":
        holder[key] = rng.choice([[old], {"a": old}, {"array": old}, {"tuple": [old]}])
    elif way == "emptied" and isinstance(old, (dict, list, str)):
        holder[key] = type(old)()
    elif way == "cut" and isinstance(old, (str, list)) and old:
        holder[key] = rng.choice([old[:-1], old[1:]])
    elif way == "moved" and isinstance(old, (int, float)) and not isinstance(old, bool):
        holder[key] = rng.choice([old + 1, old - 1, -old, old * 10**6, old + 0.5, str(old)])
        where += f" = {holder[key]!r:.40}"
    elif isinstance(old, np.ndarray):
        holder[key] = rng.choice(
            [old[:0], old.astype("complex64"), old.astype(object), np.array(["a"]), np.concatenate([old, old])]
        )
    else:
        holder[key] = rng.choice(_VALUES)
        where += f" = {holder[key]!r:.40}"
    return content, f"{where} {way}"


def _mutable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _mutable(one) for key, one in value.items()}
    return [_mutable(one) for one in value] if isinstance(value, (list, tuple)) else value


def _seed(seed: int) -> None:
    for one in (random.seed, np.random.seed, mx.random.seed):
        one(seed)


class _LimitError(Exception):
    """The time of a load is over."""


@contextmanager
def _limited() -> Iterator[None]:
    def end(number: int, frame: Optional[FrameType]) -> None:
        raise _LimitError

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(_LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _where(error: BaseException) -> str:
    places = []
    trace = error.__traceback__
    while trace is not None:
        places.append(f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}")
        trace = trace.tb_next
    return " < ".join(reversed(places[-5:]))

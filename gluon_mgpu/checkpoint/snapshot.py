"""A snapshot of a network and its training state: taken without waiting, written and read without pickle."""

from __future__ import annotations

import hashlib
import json
import platform
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from .. import schema
from ..data_parallel.batchnorm import average_over_processes, batch_norm_of, sync_running_stats
from ..distributed import group
from ..distributed.process import this_process
from ..errors import StateError
from ..nested import Array, is_device_array, leaves
from ..runtime.c_api import values_of
from ..trainer import loss_scaler
from ..trainer.optimizer_config import (
    DESCRIPTION,
    describe,
    differences,
    failure,
    is_of_other_mxnet,
    misfit,
    other_class,
    restore_optimizer,
    with_values,
    without_hyperparameters,
    without_schedule,
)
from ..trainer.parameters import average_replicas, has_values
from ..trainer.running_stats import SEEN, describe_seen, remember_equal, restore_seen, weighted_mean, weights_of
from ..trainer.states import SHAPE, check_counts, check_same, states_on
from ..trainer.trainer import Trainer
from ..trainer.virtual_shards import VIRTUAL_SHARDS
from . import rng
from .atomic_folder import MANIFEST, FolderWriter, OpenFolder, WrittenFile, open_folder
from .params_file import check_params, write_params

PARAMS, STATES, TRAINING, PROGRESS = "net.params", "states.npz", "training.json", "progress.json"
FILES = (PARAMS, STATES, TRAINING, PROGRESS, MANIFEST)
_SHOWN = 160  # characters of another library's error
AVERAGE = "average/"  # begins the names of averaged weights among the arrays
OLD_STATES = "trainer.states"  # a pickle, in folders of version 1

ProgressRecord = Dict[str, Any]  # the progress of a run, as values for JSON; see `loop/resume.py`


@dataclass(frozen=True)
class Snapshot:
    """The content of a checkpoint, in copies that training does not change.

    Attributes
    ----------
    params : dict of str to list of NDArray
        By structural name: the array of one device, or those of all devices, to be averaged.
    shares : dict of str to list of number
        The weight of each device in the mean; see `average_running_stats`.
    progress : str
        JSON.
    arrays : dict of str to NDArray
        The optimizer's states, and other arrays that must be restored bit for bit.
    training : dict, optional
        The trainer, the RNG state and the progress of the run, as values for JSON. None for a network alone.
    is_np : bool
        Whether it was taken in np mode.
    """

    params: Dict[str, List[Array]]
    shares: Dict[str, List[float]]
    progress: str
    arrays: Dict[str, Array] = field(default_factory=dict)
    training: Optional[Dict[str, Any]] = None
    is_np: bool = False

    @property
    def num_bytes(self) -> int:
        """Approximate size of the arrays on the disk, which holds one set of running statistics."""
        arrays = [copies[0] for copies in self.params.values()] + list(self.arrays.values())
        return sum(int(array.size) * np.dtype(array.dtype).itemsize for array in arrays)

    def write(self, folder: Path) -> None:
        """Write the files into an existing, empty folder. Any thread may call this."""
        writer = FolderWriter(folder)
        with writer.file(PARAMS) as file:
            write_params(file, {name: self._mean(name) for name in self.params}, np_shape=self.is_np)
        if self.training is not None:
            with writer.file(STATES) as file:
                _write_arrays(file, self.arrays)
            writer.text(TRAINING, json.dumps(self.training))
        writer.text(PROGRESS, self.progress)
        writer.finish(arrays="np" if self.is_np else "nd")

    def _mean(self, name: str) -> np.ndarray:
        """Return the mean over the devices, as `average_running_stats` computes it; the exact values of a single device."""
        values = [values_of(array) for array in self.params[name]]
        return values[0] if len(values) == 1 else weighted_mean(values, self.shares[name])


def take_snapshot(
    net: gluon.Block,
    trainer: Optional[Trainer] = None,
    progress: Optional[Dict[str, Any]] = None,
    *,
    place: Optional[ProgressRecord] = None,
    arrays: Optional[Dict[str, Array]] = None,
    base: Optional[int] = None,
) -> Snapshot:
    """Return copies of a network's parameters and its trainer's states, and reseed MXNet's generators.

    The copies are queued without waiting, except with running statistics: MXNet writes those outside its engine. Devices that
    train separately (`LocalSGD`) are averaged first. Nothing else in the training changes.

    Parameters
    ----------
    net, trainer, progress
        As for `save_checkpoint`.
    place : dict, optional
        The progress of the run, as values for JSON; its `step` determines the seed.
    arrays : dict of str to NDArray, optional
        Further arrays to save, shapes (...).
    base : int, optional
        See `rng.draw_base`. None draws it, and waits for it.

    Raises
    ------
    StateError
        The network has no values, or the optimizer cannot be described.
    TrainerError
        Gradients were accumulated and not applied.
    """
    if not has_values(net):
        raise StateError("save_checkpoint: got a network without values; expected known shapes. Pass one batch through it first.")
    progress_json = json.dumps(progress or {}, indent=1)
    is_np = bool(mx.util.is_np_shape())
    if trainer is None:
        average_replicas(net)
        return Snapshot(*_copied_params(net), progress_json, is_np=is_np)
    trainer._check_applied()
    described = describe(trainer.optimizer)
    average_replicas(net)
    if this_process().num_processes > 1:
        sync_running_stats(net)
        average_over_processes(net)  # all processes continue with the statistics that process 0 saves
    copies = {name: array.as_nd_ndarray().copy() for name, array in (arrays or {}).items()}
    params, shares = _copied_params(net)
    training = {"optimizer": described, **_training(trainer, copies), "place": place or {}, "versions": _versions()}
    training["devices"] = len(trainer.contexts)
    if trainer._virtual is not None:
        training["virtual_shards"] = trainer._virtual.state()
    training["seen"] = describe_seen(_running(net)) if len(trainer.contexts) > 1 else {}
    for name, param in _running(net).items():
        copies.update({f"device/{i}/{name}": array for i, array in enumerate(_copies(param.list_data()))})
    training["random"] = _reseeded(trainer, (place or {}).get("step", 0), base)
    training["ranks"] = _generators_of_all(training["random"], (place or {}).get("generators"))
    return Snapshot(params, shares, progress_json, copies, training, is_np)


@dataclass(frozen=True)
class CheckpointData:
    """The content of a checkpoint's folder, read from files whose checksums were right.

    Attributes
    ----------
    folder : pathlib.Path
    progress : dict
    arrays : dict of str to numpy.ndarray
    training : dict, optional
    params : dict of str to NDArray
        By structural name, on the CPU. Empty after the network's parameters were set.
    """

    folder: Path
    progress: Dict[str, Any]
    arrays: Dict[str, np.ndarray]
    training: Optional[Dict[str, Any]]
    params: Dict[str, Array] = field(default_factory=dict)

    @property
    def place(self) -> ProgressRecord:
        """The progress of the run, with this process's own RNG state if the ranks had different ones."""
        place = dict((self.training or {}).get("place", {}))
        begun = _own_generators(self.training or {}).get("begun")
        return {**place, "generators": begun} if begun is not None and "generators" in place else place


def read_content(folder: Path, *, with_training: bool) -> CheckpointData:
    """Return the content of a checkpoint.

    All files are of the same version, even if another program replaces the folder meanwhile.

    Raises
    ------
    StateError
        The folder is not a checkpoint, is of an older version, is damaged, or lacks a file.
    """
    with open_folder(folder, (*FILES, OLD_STATES), "load_checkpoint") as opened:
        return content_of(opened, with_training=with_training)


def content_of(opened: OpenFolder, *, with_training: bool) -> CheckpointData:
    """Return the content of a checkpoint whose files are open: see `read_content`."""
    if MANIFEST not in opened:
        return _without_manifest(opened, with_training)
    manifest = opened.check("load_checkpoint")
    wanted = (PARAMS, PROGRESS) + ((STATES, TRAINING) if with_training else ())
    _check_there(opened, [name for name in wanted if name not in manifest["files"]])
    mode = "np" if mx.util.is_np_shape() else "nd"
    if (manifest.get("arrays"), mode) == ("np", "nd"):
        raise StateError(
            f"load_checkpoint: got {opened.path}, which was saved with mx.npx.set_np(), in a program without it; expected np "
            "mode. Call mx.npx.set_np() first."
        )
    training = _read_json(opened, TRAINING) if with_training else None
    arrays = _read_arrays(opened, STATES) if with_training else {}
    return CheckpointData(opened.path, _read_json(opened, PROGRESS), arrays, training, _read_params(opened))


@dataclass(frozen=True)
class Taken:
    """Which of a checkpoint's options a trainer takes.

    Attributes
    ----------
    hyperparameters : bool
        False: the trainer keeps its own, and only the class of its optimizer must be the same.
    schedule : "same", "keep" or "stretch"
        What happens if the trainer's schedule runs over another number of updates. "same" raises, "keep" takes the
        checkpoint's schedule, and with "stretch" the trainer keeps its own, which continues at the number of updates so far.
    """

    hyperparameters: bool = True
    schedule: str = "same"

    def differences(self, saved: Dict[str, Any], trainer: Trainer) -> List[str]:
        """Return, in words, what must be the same and differs."""
        if not self.hyperparameters:
            return other_class(saved, trainer.optimizer)
        return differences(saved, trainer.optimizer, lengths=self.schedule == "same")

    def of(self, saved: Dict[str, Any], trainer: Trainer, described: Optional[Dict[str, Any]] = None) -> Dict[str, Any]:
        """Return the part that the trainer takes of the saved description of an optimizer, or of another description."""
        described = saved if described is None else described
        if not self.hyperparameters:
            return without_hyperparameters(described, trainer.optimizer)
        stretches = self.schedule == "stretch" and self.changed_lengths(saved, trainer)
        return without_schedule(described, trainer.optimizer) if stretches else described

    def changed_lengths(self, saved: Dict[str, Any], trainer: Trainer) -> List[str]:
        """Return, in words, how the lengths of the two schedules differ; [] if they are the same or must be."""
        is_free = self.hyperparameters and self.schedule != "same"
        return differences(saved, trainer.optimizer) if is_free else []


def check_content(content: CheckpointData, net: gluon.Block, trainer: Trainer, taken: Taken) -> None:
    """Raise `StateError` unless the content has the form of `take_snapshot`, and fits this network and optimizer."""
    training: Any = content.training
    _check_training(content, TRAINING_FILE, training)
    _check_training(content, lambda found: _misnamed_states(content.arrays, found["states"]), training)
    check_same(str(content.folder), training, trainer._replicas, "load_checkpoint")
    _check_virtual(content, trainer)
    if is_of_other_mxnet(training["optimizer"], trainer.optimizer):
        raise StateError(
            f"load_checkpoint: got {content.folder} of a trainer with {training['optimizer']['class']}, of another version of "
            f"MXNet than this {mx.__version__}; expected the same version. Load the network alone: load_checkpoint(folder, net)."
        )
    differing = taken.differences(training["optimizer"], trainer)
    if differing:
        raise StateError(
            f"load_checkpoint: got {content.folder} of a trainer with {'; '.join(differing[:3])}; expected the same "
            "optimizer and schedule. Make the trainer with the options of the checkpoint, or keep its own: "
            "load_checkpoint(states_only=True), or fit(hyperparameters='trainer')."
        )
    _check_training(content, lambda found: _misfit(found["optimizer"], trainer, taken), training)
    check_counts(
        str(content.folder / TRAINING),
        _states(content),
        _counts(content),
        trainer._replicas,
        trainer.optimizer,
        "load_checkpoint",
    )
    described = taken.of(training["optimizer"], trainer)
    broken = failure(with_values(described, trainer.optimizer), _counts(content))
    if broken:
        raise StateError(
            f"load_checkpoint: got {content.folder / TRAINING} of an optimizer that cannot train ({broken}); expected the "
            "optimizer as it was saved. Use another checkpoint."
        )
    _check_training(content, _misplaced, training)
    _check_training(content, lambda found: _misshapen(found["shapes"], _shapes(content, net, trainer)), training)
    _check_running(content, net, trainer)


def _check_virtual(content: CheckpointData, trainer: Trainer) -> None:
    """Raise `StateError` unless the checkpoint is of as many virtual shards as the trainer's."""
    training: Any = content.training
    saved = training.get("virtual_shards", {}).get("number")
    if saved != trainer.virtual_shards:
        raise StateError(
            f"load_checkpoint: got {content.folder} of a run with virtual_shards={saved} for one with "
            f"{trainer.virtual_shards}; expected the same number, as others round differently. Pass virtual_shards={saved}."
        )


def states_of(content: CheckpointData, net: gluon.Block, trainer: Trainer) -> List[Dict[int, Any]]:
    """Return the optimizer's states on each device, before the trainer takes them.

    Raises
    ------
    StateError
        They do not fit the parameters.
    """
    loaded, shapes = _states(content), _shapes(content, net, trainer)
    states = states_on(trainer._replicas, trainer.optimizer, loaded, str(content.folder / STATES), shapes)
    for index in loaded:
        for (_, saved), (_, fresh) in zip(leaves(loaded[index]), leaves(next(one[index] for one in states if index in one))):
            if is_device_array(fresh) and saved.dtype != np.dtype(fresh.dtype):
                raise _damaged(content.folder / STATES, TypeError(f"{saved.dtype} instead of {np.dtype(fresh.dtype)}"))
    return states


def restore(
    content: CheckpointData,
    net: gluon.Block,
    trainer: Trainer,
    states: List[Dict[int, Any]],
    taken: Taken,
    *,
    generators: bool = True,
) -> None:
    """Restore a trainer from checked content; its network already has the parameters.

    `generators` says whether to restore the RNG state.
    """
    training: Any = content.training
    trainer.resolve_shapes()  # the loaded parameters may have set them
    if trainer.loss_scaler is not None and training.get("loss_scaler") is not None:
        trainer.loss_scaler.restore(training["loss_scaler"])
    restore_optimizer(taken.of(training["optimizer"], trainer), trainer.optimizer)
    trainer.discard()
    trainer._use(trainer.optimizer)
    trainer._update.restore(states, _counts(content), training.get("order"))
    if trainer._virtual is not None:
        trainer._virtual.restore(training["virtual_shards"])
    remember_equal(net)
    if training["devices"] == len(trainer.contexts):
        for name, param in _running(net).items():
            for i, array in enumerate(param.list_data()):
                array.as_nd_ndarray()[:] = mx.nd.array(content.arrays[f"device/{i}/{name}"], ctx=array.context, dtype=array.dtype)
        restore_seen(_running(net), training.get("seen", {}))
    if generators:
        rng.set_random_state(_own_generators(training).get("now", training["random"]))
        mx.random.seed(rng.seed_of(**_seeds(training["random"])))


def _check_training(content: CheckpointData, shape: schema.Schema, training: Any) -> None:
    schema.check(shape, training, operation="load_checkpoint", file=content.folder / TRAINING)


def _misfit(saved: Dict[str, Any], trainer: Trainer, taken: Taken) -> Optional[schema.Wrong]:
    """Return the first wrong value in the description of an optimizer with the class and options of this trainer's."""
    optimizer = trainer.optimizer
    mine, saved = (taken.of(saved, trainer, one) for one in (describe(optimizer), saved))
    wrong = misfit(mine["values"], saved["values"], optimizer, exact=True)
    if wrong is not None:
        return wrong.below("values").below("optimizer")
    if mine["schedule"] is not None and saved["schedule"] is not None:
        wrong = misfit(mine["schedule"]["values"], saved["schedule"]["values"], optimizer.lr_scheduler, exact=True)
    return wrong and wrong.below("values").below("schedule").below("optimizer")


def _misplaced(training: Dict[str, Any]) -> Optional[schema.Wrong]:
    """Return the first wrong value in the order of updates and the examples by device, which older checkpoints lack."""
    places = list(range(len(training["names"])))
    if sorted(training.get("order", places)) != places:
        return schema.Wrong(training["order"], f"each of 0 to {len(places) - 1} once").below("order")
    num_devices = training["devices"]
    for name, one in training.get("seen", {}).items():
        for part, values in one.items():
            if len(values) != num_devices:
                return schema.Wrong(values, f"one for each of {num_devices} devices").below(part).below(name).below("seen")
    return None


def _shapes(content: CheckpointData, net: gluon.Block, trainer: Trainer) -> Dict[int, Tuple[int, ...]]:
    """Return the shapes of the loaded parameters, by their index in the trainer."""
    names = {id(param): name for name, param in net._collect_params_with_prefix().items()}
    found = {index: names.get(id(param), "") for index, param in enumerate(trainer._replicas.params)}
    return {index: tuple(content.params[name].shape) for index, name in found.items() if name in content.params}


def _check_running(content: CheckpointData, net: gluon.Block, trainer: Trainer) -> None:
    """Raise `StateError` unless the content holds exactly one set of running statistics per saved device."""
    training: Any = content.training
    running = _running(net)
    there = {key: array for key, array in content.arrays.items() if key.startswith("device/")}
    num_devices = min(training["devices"], len(there) + 1)
    wanted = {f"device/{i}/{name}": content.params[name] for i in range(num_devices) for name in running}
    differing = sorted(there.keys() ^ wanted.keys())
    for key in wanted.keys() & there.keys():
        if there[key].shape != wanted[key].shape or there[key].dtype != np.dtype(wanted[key].dtype):
            differing.append(key)
    if differing:
        raise _damaged(
            content.folder / STATES, KeyError(f"{schema.shown(differing[0])} for {schema.shown(training['devices'])} devices")
        )


def _training(trainer: Trainer, arrays: Dict[str, Array]) -> Dict[str, Any]:
    replicas, update = trainer._replicas, trainer._update
    states = {str(index): _kept(state, f"state/{index}", arrays) for index, state in update.states().items()}
    return {
        "names": replicas.names,
        "structural": replicas.structural,
        "shapes": [list(param.shape) for param in replicas.params],
        "states": states,
        "counts": {str(index): count for index, count in update.counts().items()},
        "order": update.order,
        "loss_scaler": None if trainer.loss_scaler is None else trainer.loss_scaler.state(),
    }


def _kept(state: Any, name: str, arrays: Dict[str, Array]) -> Any:
    """Return an optimizer's state as values for JSON, and add its arrays to `arrays`."""
    if is_device_array(state):
        arrays[name] = state.as_nd_ndarray().copy()
        return {"array": name}
    if isinstance(state, (list, tuple)):
        return [_kept(one, f"{name}/{i}", arrays) for i, one in enumerate(state)]
    if state is None or isinstance(state, (bool, int, float, str)):
        return state
    raise StateError(
        f"save_checkpoint: got {type(state).__name__} as an optimizer's state; expected arrays and numbers. Use another "
        "optimizer, or save the network alone."
    )


def _states(content: CheckpointData) -> Dict[int, Any]:
    """Return the saved states of the optimizer, as NumPy arrays."""

    def state(form: Any) -> Any:
        if isinstance(form, dict):
            return content.arrays[form["array"]]
        return tuple(state(one) for one in form) if isinstance(form, list) else form

    training: Any = content.training
    return {int(index): state(form) for index, form in training["states"].items()}


def _counts(content: CheckpointData) -> Dict[int, int]:
    training: Any = content.training
    return {int(index): int(count) for index, count in training["counts"].items()}


def _reseeded(trainer: Trainer, step: int, base: Optional[int]) -> Dict[str, Any]:
    """Reseed MXNet's generators, whose state cannot be read; return the RNG state of all generators."""
    base = rng.draw_base(trainer.contexts[0]) if base is None else base
    random = {"base": base, "step": step, **rng.random_state()}
    mx.random.seed(rng.seed_of(**_seeds(random)))
    return random


def _generators_of_all(random: Dict[str, Any], begun: Optional[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """Return every process's RNG state, now and at the beginning of its epoch; [] if all ranks share one.

    The processes wait for each other. They exchange digests first, and the states only if the digests differ.
    """
    processes = group()
    if processes is None:
        return []
    mine = json.dumps({"now": {name: random[name] for name in ("python", "numpy")}, "begun": begun}).encode()
    if len(set(processes.all_gather_bytes(hashlib.sha256(mine).digest()))) == 1:
        return []
    return [json.loads(one) for one in processes.all_gather_bytes(mine)]


def _own_generators(training: Dict[str, Any]) -> Dict[str, Any]:
    """Return this process's saved RNG state; {} if all ranks shared one or the number of processes changed."""
    process, ranks = this_process(), training.get("ranks") or []
    return dict(ranks[process.rank]) if len(ranks) == process.num_processes else {}


def _seeds(random: Dict[str, Any]) -> Dict[str, int]:
    return {"base": random["base"], "step": random["step"], "rank": this_process().rank}


def _copied_params(net: gluon.Block) -> Tuple[Dict[str, List[Array]], Dict[str, List[float]]]:
    """Return copies of one device's parameters, and of all devices' running statistics if these are averaged.

    Also return the weight of each device in the mean.
    """
    averaged = set() if batch_norm_of(net) == "local" else {id(param) for param in _running(net).values()}
    if not all(param._differentiable for param in net.collect_params().values()):
        mx.nd.waitall()  # a static graph writes them without telling the engine
    shares = weights_of(net) if averaged else {}
    copied: Dict[int, List[Array]] = {}  # a shared parameter has several names
    found, weighted = {}, {}
    for name, param in net._collect_params_with_prefix().items():
        if id(param) not in copied:
            copied[id(param)] = _copies(param.list_data() if id(param) in averaged else param.list_data()[:1])
        found[name] = copied[id(param)]
        weighted[name] = shares.get(id(param), [1.0] * len(copied[id(param)]))
    return found, weighted


def _running(net: gluon.Block) -> Dict[str, gluon.Parameter]:
    """Return the parameters with separate values on each device: floating point, without a gradient."""
    params = net._collect_params_with_prefix().items()
    return {n: p for n, p in params if not p._differentiable and np.issubdtype(np.dtype(p.dtype), np.floating)}


def _copies(arrays: List[Array]) -> List[Array]:
    with autograd.pause():
        return [array.as_nd_ndarray().copy() for array in arrays]


def _versions() -> Dict[str, str]:
    from ..version import __version__

    found = {"gluon_mgpu": __version__, "mxnet": mx.__version__, "numpy": np.__version__}
    return {**found, "python": platform.python_version()}


def _write_arrays(file: WrittenFile, arrays: Dict[str, Array]) -> None:
    """Write arrays as `numpy.savez` does, which would require a seekable file."""
    with zipfile.ZipFile(file, "w") as archive:  # type: ignore[call-overload]
        for name, array in arrays.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, values_of(array), allow_pickle=False)  # type: ignore[no-untyped-call]


def _read_params(opened: OpenFolder) -> Dict[str, Array]:
    try:
        check_params(opened.file(PARAMS))
        loaded = (mx.npx.load if mx.util.is_np_array() else mx.nd.load)(opened.location(PARAMS))
    except (mx.MXNetError, ValueError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise StateError(
            f"load_checkpoint: got {opened.path / PARAMS}, which is damaged ({reason}); expected a file of save_checkpoint. Use "
            "another checkpoint."
        ) from error
    return loaded if isinstance(loaded, dict) else {}


def _read_arrays(opened: OpenFolder, name: str) -> Dict[str, np.ndarray]:
    try:
        with np.load(opened.file(name), allow_pickle=False) as file:
            found = dict(file.items())
        strange = [key for key, value in found.items() if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiubV"]
        if strange or len(found) < len(file.files):
            raise ValueError(f"{schema.shown(strange[0])} is not an array of numbers" if strange else "an array appears twice")
        return found
    except Exception as error:  # any error of zipfile, zlib, tokenize and NumPy on damaged bytes
        raise _damaged(opened.path / name, error) from error


def _read_json(opened: OpenFolder, name: str) -> Dict[str, Any]:
    content: Dict[str, Any] = schema.parse_json(opened.read(name), operation="load_checkpoint", file=opened.path / name)
    schema.check(schema.record({}, closed=False), content, operation="load_checkpoint", file=opened.path / name)
    return content


def _without_manifest(opened: OpenFolder, with_training: bool) -> CheckpointData:
    """Return the content of a folder of an older version, without the parts that only a pickle holds."""
    _check_there(opened, [name for name in (PARAMS, PROGRESS) if name not in opened])
    if with_training and OLD_STATES in opened:
        raise StateError(
            f"load_checkpoint: got {opened.path} of an older gluon_mgpu, whose {OLD_STATES} is a pickle; expected {STATES}, "
            "because reading a pickle can execute code. Load the network alone. Then, if you trust the file, call "
            f"trainer.load_states({str(opened.path / OLD_STATES)!r})."
        )
    if with_training or STATES in opened:
        _check_there(opened, [MANIFEST])
    return CheckpointData(opened.path, _read_json(opened, PROGRESS), {}, None, _read_params(opened))


def _check_there(opened: OpenFolder, missing: List[str]) -> None:
    if missing:
        raise StateError(
            f"load_checkpoint: got {opened.path} without {', '.join(missing)}; expected a folder of save_checkpoint. Check "
            "the path."
        )


def _damaged(path: Path, error: Exception) -> StateError:
    reason = " ".join(str(error).split())[:_SHOWN]
    return StateError(
        f"load_checkpoint: got {path}, which is damaged ({type(error).__name__}: {reason}); expected a file of "
        "save_checkpoint. Use another checkpoint."
    )


def _misshapen(saved: List[Any], shapes: Dict[int, Tuple[int, ...]]) -> Optional[schema.Wrong]:
    differing = ((index, shape) for index, shape in shapes.items() if tuple(saved[index] or ()) != shape)
    return next((schema.Wrong(saved[i], f"{shape}, as in {PARAMS}", ("shapes", i)) for i, shape in differing), None)


def _misnamed_states(arrays: Dict[str, np.ndarray], states: Dict[str, Any]) -> Optional[schema.Wrong]:
    found = ((index, _misnamed(arrays, form, f"state/{index}")) for index, form in states.items())
    return next((wrong.below(index).below("states") for index, wrong in found if wrong is not None), None)


def _misnamed(arrays: Dict[str, np.ndarray], form: Any, name: str) -> Optional[schema.Wrong]:
    """Return the first wrong value in an optimizer's state of the form that `_kept` returns."""
    if isinstance(form, list):
        found = ((i, _misnamed(arrays, one, f"{name}/{i}")) for i, one in enumerate(form))
        return next((wrong.below(i) for i, wrong in found if wrong is not None), None)
    if isinstance(form, dict):
        is_right = form == {"array": name} and name in arrays
        return None if is_right else schema.Wrong(form.get("array"), f'"{name}", which is in {STATES}', ("array",))
    is_plain = form is None or isinstance(form, (bool, int, float, str))
    return None if is_plain else schema.Wrong(form, "an array, a number, a text or null")


def _step_differs(training: Dict[str, Any]) -> Optional[schema.Wrong]:
    step, place = training["random"]["step"], training["place"].get("step", 0)
    return None if step == place else schema.Wrong(step, f"the step of the place, {schema.shown(place)}", ("random", "step"))


_RANDOM = schema.record({"base": schema.integer(0, 2**31 - 1), "step": schema.steps(), **rng.STATES})
TRAINING_FILE = schema.also(
    schema.record(
        {
            "optimizer": DESCRIPTION,
            "names": schema.list_of(schema.text()),
            "structural": schema.constant(True, False),
            "shapes": schema.list_of(SHAPE),
            "states": schema.mapping(schema.index_as_text(), schema.anything),  # see `_misnamed`
            "counts": schema.mapping(schema.index_as_text(), schema.steps()),
            "loss_scaler": schema.nullable(loss_scaler.STATE),
            "place": schema.record({}, {"step": schema.steps()}, closed=False),  # see `position`
            "devices": schema.integer(1, 2**16),
            "random": schema.also(_RANDOM, rng.is_taken),
        },
        {
            "versions": schema.mapping(schema.text(), schema.text()),
            "order": schema.list_of(schema.integer()),
            "seen": SEEN,
            "virtual_shards": VIRTUAL_SHARDS,
            "ranks": schema.list_of(schema.record({"now": rng.RANDOM_STATE, "begun": schema.nullable(rng.RANDOM_STATE)})),
        },
        closed=False,
    ),
    _step_differs,
)

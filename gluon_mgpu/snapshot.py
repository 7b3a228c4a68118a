"""A network, and what its training needs to go on, at one moment: taken without waiting, written and read without pickle."""

from __future__ import annotations

import hashlib
import json
import platform
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Optional

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from . import rng
from .batchnorm import batch_norm_of, settle_batch_norm
from .calls import values_of
from .described import describe, differences, set_again
from .distributed.process import this_process
from .errors import StateError
from .evaluation import average_over_processes
from .folders import MANIFEST, FolderWriter, WrittenFile, read_manifest
from .nested import Leaf, is_device_array
from .parameters import has_values
from .params_file import write_params
from .processes import group
from .replicas import average_replicas
from .states import check_same, states_on
from .trainer import Trainer

PARAMS, STATES, TRAINING, PROGRESS = "net.params", "states.npz", "training.json", "progress.json"
FILES = (PARAMS, STATES, TRAINING, PROGRESS, MANIFEST)
OLD_STATES = "trainer.states"  # a pickle, in folders of version 1

Place = Dict[str, Any]  # where a run is, in a form that JSON holds; see `position`


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint holds, in copies that training does not change any more.

    Attributes
    ----------
    params : dict of str to list of NDArray
        By structural name: of one device, or of each, to be averaged.
    progress : str
        JSON.
    arrays : dict of str to NDArray
        The optimizer's states, and whatever else is to go on from the same bits.
    training : dict, optional
        What JSON holds of the trainer, the random numbers and the place in the run. None for a network alone.
    is_np : bool
        Whether it was taken in np mode.
    """

    params: Dict[str, List[Leaf]]
    progress: str
    arrays: Dict[str, Leaf] = field(default_factory=dict)
    training: Optional[Dict[str, Any]] = None
    is_np: bool = False

    def write(self, folder: Path) -> None:
        """Write the files into a folder that is there and empty. In any thread."""
        writer = FolderWriter(folder)
        with writer.file(PARAMS) as file:
            write_params(file, {name: _mean(copies) for name, copies in self.params.items()}, np_shape=self.is_np)
        if self.training is not None:
            with writer.file(STATES) as file:
                _write_arrays(file, self.arrays)
            writer.text(TRAINING, json.dumps(self.training))
        writer.text(PROGRESS, self.progress)
        writer.finish(arrays="np" if self.is_np else "nd")


def take_snapshot(
    net: gluon.Block,
    trainer: Optional[Trainer] = None,
    progress: Optional[Dict[str, Any]] = None,
    *,
    place: Optional[Place] = None,
    arrays: Optional[Dict[str, Leaf]] = None,
    base: Optional[int] = None,
) -> Snapshot:
    """Return copies of a network's parameters and its trainer's states, and seed MXNet's generators anew.

    The copies are queued, and nothing is waited for, but where there are running statistics: MXNet writes those without telling
    its engine. Devices that train apart (`LocalSGD`) are averaged first; else training is left as it is.

    Parameters
    ----------
    net, trainer, progress
        As for `save_checkpoint`.
    place : dict, optional
        Where the run is, in what JSON holds; its `step` chooses the seed.
    arrays : dict of str to NDArray, optional
        More to keep, shapes (...).
    base : int, optional
        See `rng.draw_base`. None: it is drawn, for which it waits.

    Raises
    ------
    StateError
        The network has no values, or the optimizer cannot be described.
    TrainerError
        Gradients were accumulated and not applied.
    """
    if not has_values(net):
        raise StateError("save_checkpoint: got a network that has no values yet; need known shapes. Pass one batch through it.")
    told = json.dumps(progress or {}, indent=1)
    is_np = bool(mx.util.is_np_shape())
    if trainer is None:
        average_replicas(net)
        return Snapshot(_copied_params(net), told, is_np=is_np)
    trainer._check_applied()
    described = describe(trainer.optimizer)
    average_replicas(net)
    if this_process().num_processes > 1:
        settle_batch_norm(net)
        average_over_processes(net)  # all of them go on from the statistics of the one that writes
    copies = {name: array.as_nd_ndarray().copy() for name, array in (arrays or {}).items()}
    params = _copied_params(net)
    training = {"optimizer": described, **_training(trainer, copies), "place": place or {}, "versions": _versions()}
    training["devices"] = len(trainer.contexts)
    for name, param in _running(net).items():
        copies.update({f"device/{i}/{name}": array for i, array in enumerate(_copies(param.list_data()))})
    training["random"] = _reseeded(trainer, (place or {}).get("step", 0), base)
    training["ranks"] = _told_by_all(training["random"], (place or {}).get("generators"))
    return Snapshot(params, told, copies, training, is_np)


@dataclass(frozen=True)
class Content:
    """What was read from a checkpoint's folder, its files having been compared with their checksums.

    Attributes
    ----------
    folder : pathlib.Path
    progress : dict
    arrays : dict of str to numpy.ndarray
    training : dict, optional
    """

    folder: Path
    progress: Dict[str, Any]
    arrays: Dict[str, np.ndarray]
    training: Optional[Dict[str, Any]]

    @property
    def place(self) -> Place:
        """Where the run was, with this process's own random numbers where each had others."""
        place = dict((self.training or {}).get("place", {}))
        begun = _own(self.training or {}).get("begun")
        return {**place, "generators": begun} if begun is not None and "generators" in place else place


def read_content(folder: Path, *, with_training: bool) -> Content:
    """Return what a checkpoint holds beside the parameters.

    Raises
    ------
    StateError
        It is no checkpoint, or an older one, or damaged, or lacks a file.
    """
    if not (folder / MANIFEST).is_file():
        return _without_manifest(folder, with_training)
    manifest = read_manifest(folder, "load_checkpoint")
    wanted = (PARAMS, PROGRESS) + ((STATES, TRAINING) if with_training else ())
    _check_there(folder, [name for name in wanted if name not in manifest["files"]])
    mode = "np" if mx.util.is_np_shape() else "nd"
    if (manifest.get("arrays"), mode) == ("np", "nd"):
        raise StateError(
            f"load_checkpoint: got {folder}, which was saved with mx.npx.set_np(), in a program without; need np arrays. Call "
            "mx.npx.set_np() first."
        )
    training = _read_json(folder / TRAINING) if with_training else None
    return Content(folder, _read_json(folder / PROGRESS), _read_arrays(folder / STATES) if with_training else {}, training)


def check_content(content: Content, trainer: Trainer) -> None:
    """Raise `StateError` unless what was read belongs to this network and optimizer."""
    told: Any = content.training
    try:
        check_same(str(content.folder), told, trainer._replicas, "load_checkpoint")
        differing = differences(told["optimizer"], trainer.optimizer)
        _states(content), _counts(content), told["devices"], rng.seed_of(**_seeds(told["random"]))
        rng.check_random_state(_own(told).get("now", told["random"]))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        if isinstance(error, StateError):
            raise
        raise _damaged(content.folder / TRAINING, error) from error
    if differing:
        raise StateError(
            f"load_checkpoint: got {content.folder} of a trainer with {'; '.join(differing[:3])}; need the same optimizer and "
            "schedule. Make the trainer with the options of the checkpoint, or load the network alone."
        )


def states_of(content: Content, trainer: Trainer) -> List[Dict[int, Any]]:
    """Return the optimizer's states on each device, which are not yet the trainer's.

    Raises
    ------
    StateError
        They do not fit the parameters.
    """
    return states_on(trainer._replicas, trainer.optimizer, _states(content), str(content.folder / STATES))


def restore(content: Content, net: gluon.Block, trainer: Trainer, states: List[Dict[int, Any]]) -> None:
    """Let a trainer, whose network has the parameters already, go on from what was read and checked."""
    told: Any = content.training
    trainer.know_shapes()  # the parameters may have brought them
    if trainer.loss_scaler is not None and told.get("loss_scaler") is not None:
        trainer.loss_scaler.restore(told["loss_scaler"])
    set_again(told["optimizer"], trainer.optimizer)
    trainer.discard()
    trainer._use(trainer.optimizer)
    trainer._update.restore(states, _counts(content))
    if told["devices"] == len(trainer.contexts):
        for name, param in _running(net).items():
            for i, array in enumerate(param.list_data()):
                array.as_nd_ndarray()[:] = mx.nd.array(content.arrays[f"device/{i}/{name}"], ctx=array.context, dtype=array.dtype)
    rng.set_random_state(_own(told).get("now", told["random"]))
    mx.random.seed(rng.seed_of(**_seeds(told["random"])))


def _training(trainer: Trainer, arrays: Dict[str, Leaf]) -> Dict[str, Any]:
    replicas, update = trainer._replicas, trainer._update
    states = {str(index): _kept(state, f"state/{index}", arrays) for index, state in update.states().items()}
    return {
        "names": replicas.names,
        "structural": replicas.structural,
        "shapes": [list(param.shape) for param in replicas.params],
        "states": states,
        "counts": {str(index): count for index, count in update.counts().items()},
        "loss_scaler": None if trainer.loss_scaler is None else trainer.loss_scaler.state(),
    }


def _kept(state: Any, name: str, arrays: Dict[str, Leaf]) -> Any:
    """Return the form of an optimizer's state, in what JSON holds, having put its arrays among the others."""
    if is_device_array(state):
        arrays[name] = state.as_nd_ndarray().copy()
        return {"array": name}
    if isinstance(state, (list, tuple)):
        return [_kept(one, f"{name}/{i}", arrays) for i, one in enumerate(state)]
    if state is None or isinstance(state, (bool, int, float, str)):
        return state
    raise StateError(
        f"save_checkpoint: got {type(state).__name__} as an optimizer's state; need arrays and numbers. Train with another "
        "optimizer, or save the network alone."
    )


def _states(content: Content) -> Dict[int, Any]:
    """Return the optimizer's states as they were, in NumPy's arrays."""

    def state(form: Any) -> Any:
        if isinstance(form, dict):
            return content.arrays[form["array"]]
        return tuple(state(one) for one in form) if isinstance(form, list) else form

    told: Any = content.training
    return {int(index): state(form) for index, form in told["states"].items()}


def _counts(content: Content) -> Dict[int, int]:
    told: Any = content.training
    return {int(index): int(count) for index, count in told["counts"].items()}


def _reseeded(trainer: Trainer, step: int, base: Optional[int]) -> Dict[str, Any]:
    """Return where the generators are, having seeded MXNet's anew: there is no other way to know where they are."""
    base = rng.draw_base(trainer.contexts[0]) if base is None else base
    told = {"base": base, "step": step, **rng.random_state()}
    mx.random.seed(rng.seed_of(**_seeds(told)))
    return told


def _told_by_all(random: Dict[str, Any], begun: Optional[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """Return where the generators of every process are, and were when its epoch began; none where all are at one place.

    The processes wait for each other. What most of them say is a digest.
    """
    processes = group()
    if processes is None:
        return []
    mine = json.dumps({"now": {name: random[name] for name in ("python", "numpy")}, "begun": begun}).encode()
    if len(set(processes.say(hashlib.sha256(mine).digest()))) == 1:
        return []
    return [json.loads(one) for one in processes.say(mine)]


def _own(told: Dict[str, Any]) -> Dict[str, Any]:
    """Return what was told of the generators of this process, nothing where all had the same, or there were more or fewer."""
    process, ranks = this_process(), told.get("ranks") or []
    return dict(ranks[process.rank]) if len(ranks) == process.num_processes else {}


def _seeds(told: Dict[str, Any]) -> Dict[str, int]:
    return {"base": told["base"], "step": told["step"], "rank": this_process().rank}


def _copied_params(net: gluon.Block) -> Dict[str, List[Leaf]]:
    """Return copies of one device's parameters; of running statistics, those of each, unless the first one's count alone."""
    averaged = set() if batch_norm_of(net) == "local" else {id(param) for param in _running(net).values()}
    if not all(param._differentiable for param in net.collect_params().values()):
        mx.nd.waitall()  # a static graph writes them without telling the engine
    copied: Dict[int, List[Leaf]] = {}  # a shared parameter has several names
    found = {}
    for name, param in net._collect_params_with_prefix().items():
        if id(param) not in copied:
            copied[id(param)] = _copies(param.list_data() if id(param) in averaged else param.list_data()[:1])
        found[name] = copied[id(param)]
    return found


def _running(net: gluon.Block) -> Dict[str, gluon.Parameter]:
    """Return the parameters that each device has values of its own of: those of no gradient, and not of whole numbers."""
    params = net._collect_params_with_prefix().items()
    return {n: p for n, p in params if not p._differentiable and np.issubdtype(np.dtype(p.dtype), np.floating)}


def _copies(arrays: List[Leaf]) -> List[Leaf]:
    with autograd.pause():
        return [array.as_nd_ndarray().copy() for array in arrays]


def _mean(copies: List[Leaf]) -> np.ndarray:
    """Return the mean over the devices, as `average_running_stats` computes it; of one device, its bits."""
    first, *others = [values_of(array) for array in copies]
    if not others:
        return first
    total = sum((one.astype("float64") for one in others), first.astype("float64"))
    return (total / len(copies)).astype(first.dtype)


def _versions() -> Dict[str, str]:
    from . import __version__

    found = {"gluon_mgpu": __version__, "mxnet": mx.__version__, "numpy": np.__version__}
    return {**found, "python": platform.python_version()}


def _write_arrays(file: WrittenFile, arrays: Dict[str, Leaf]) -> None:
    """Write arrays as `numpy.savez` does, which takes no file that is only written to."""
    with zipfile.ZipFile(file, "w") as archive:  # type: ignore[call-overload]
        for name, array in arrays.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, values_of(array), allow_pickle=False)  # type: ignore[no-untyped-call]


def _read_arrays(path: Path) -> Dict[str, np.ndarray]:
    try:
        with np.load(str(path), allow_pickle=False) as file:
            return dict(file.items())
    except (ValueError, OSError, KeyError, zipfile.BadZipFile) as error:
        raise _damaged(path, error) from error


def _read_json(path: Path) -> Dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _damaged(path, error) from error
    if not isinstance(content, dict):
        raise _damaged(path, TypeError(type(content).__name__))
    return content


def _without_manifest(folder: Path, with_training: bool) -> Content:
    """Return what a folder of an older version holds, as far as that can be read without executing anything in it."""
    _check_there(folder, [name for name in (PARAMS, PROGRESS) if not (folder / name).is_file()])
    if with_training and (folder / OLD_STATES).is_file():
        raise StateError(
            f"load_checkpoint: got {folder} of an older gluon_mgpu, whose {OLD_STATES} is a pickle; need {STATES}, as reading a "
            "pickle executes what is in it. Load the network alone, then, if you trust the file, "
            f"trainer.load_states({str(folder / OLD_STATES)!r})."
        )
    if with_training or (folder / STATES).is_file():
        _check_there(folder, [MANIFEST])
    return Content(folder, _read_json(folder / PROGRESS), {}, None)


def _check_there(folder: Path, missing: List[str]) -> None:
    if missing:
        raise StateError(
            f"load_checkpoint: got {folder} without {', '.join(missing)}; need a folder of save_checkpoint. Check the path."
        )


def _damaged(path: Path, error: Exception) -> StateError:
    return StateError(
        f"load_checkpoint: got {path}, which is damaged ({type(error).__name__}: {error}); need a file of save_checkpoint. Use "
        "another one."
    )

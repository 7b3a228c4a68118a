"""A snapshot of a network and its training state: taken without waiting, written and read without pickle."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Dict, List, Optional, Tuple

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from ..data_parallel.batchnorm import average_over_processes, batch_norm_of, sync_running_stats
from ..distributed import group
from ..distributed.process import this_process
from ..errors import StateError
from ..nested import Array, is_device_array
from ..trainer.parameters import average_replicas, has_values
from ..trainer.running_stats import describe_seen, remember_equal, restore_seen, weighted_mean, weights_of
from ..trainer.states import TrainerState
from ..trainer.trainer import Trainer
from . import random_state
from .manifest import MANIFEST, Files, FolderWriter
from .params_file import write_params
from .replace_folder import read_files

PARAMS, STATES, TRAINING, PROGRESS = "net.params", "states.npz", "training.json", "progress.json"
FILES = (PARAMS, STATES, TRAINING, PROGRESS, MANIFEST)
AVERAGE = "average/"  # begins the names of averaged weights among the arrays

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
        values = [array.asnumpy() for array in self.params[name]]
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
        See `random_state.draw_base`. None draws it, and waits for it.

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
    trainer.check_applied("Trainer.save_states")
    trainer.state()  # raises before anything is averaged
    average_replicas(net)
    if this_process().num_processes > 1:
        sync_running_stats(net)
        average_over_processes(net)  # all processes continue with the statistics that process 0 saves
    copies = {name: array.as_nd_ndarray().copy() for name, array in (arrays or {}).items()}
    params, shares = _copied_params(net)
    training = {**_training(trainer.state(), copies), "place": place or {}}
    training["devices"] = len(trainer.contexts)
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
    is_np : bool
        Whether it was saved in np mode.
    """

    folder: Path
    progress: Dict[str, Any]
    arrays: Dict[str, np.ndarray]
    training: Optional[Dict[str, Any]]
    params: Dict[str, Array] = field(default_factory=dict)
    is_np: bool = False

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
        The folder is not a checkpoint, is damaged, or lacks a file.
    """
    return content_of(read_files(folder, FILES, "load_checkpoint"), with_training=with_training)


def content_of(files: Files, *, with_training: bool) -> CheckpointData:
    """Return the content of a checkpoint from its files: see `read_content`."""
    wanted = (PARAMS, PROGRESS, MANIFEST, *((STATES, TRAINING) if with_training else ()))
    missing = [name for name in wanted if name not in files.contents]
    if missing:
        raise StateError(
            f"load_checkpoint: got {files.folder} without {', '.join(missing)}; expected a folder of save_checkpoint. Check "
            "the path."
        )
    is_np = files.check("load_checkpoint")["arrays"] == "np"
    if is_np and not mx.util.is_np_shape():
        raise StateError(
            f"load_checkpoint: got {files.folder}, which was saved with mx.npx.set_np(), in a program without it; expected np "
            "mode. Call mx.npx.set_np() first."
        )
    loaded: Any = mx.nd.load_frombuffer(files.contents[PARAMS])
    params = {name: array.as_np_ndarray() if mx.util.is_np_array() else array for name, array in dict(loaded).items()}
    arrays: Dict[str, np.ndarray] = {}
    training = None
    if with_training:
        training = json.loads(files.contents[TRAINING])
        with np.load(io.BytesIO(files.contents[STATES]), allow_pickle=False) as file:
            arrays = dict(file.items())
    return CheckpointData(files.folder, json.loads(files.contents[PROGRESS]), arrays, training, params, is_np)


def check_content(content: CheckpointData, net: gluon.Block, trainer: Trainer) -> None:
    """Raise `StateError` if the content belongs to another network, optimizer or number of virtual shards."""
    trainer.check_state(_state(content), content.folder, "load_checkpoint", _shapes(content, net))


def restore(
    content: CheckpointData,
    net: gluon.Block,
    trainer: Trainer,
    *,
    generators: bool = True,
    learning_rate: bool = True,
) -> None:
    """Restore a trainer from checked content; its network already has the parameters.

    `generators` says whether to restore the RNG state, and `learning_rate` whether to take that of a trainer without a schedule.
    """
    training: Any = content.training
    trainer.resolve_shapes()  # the loaded parameters may have set them
    trainer.restore(_state(content), learning_rate=learning_rate)
    remember_equal(net)
    if training["devices"] == len(trainer.contexts):
        for name, param in _running(net).items():
            for i, array in enumerate(param.list_data()):
                array.as_nd_ndarray()[:] = mx.nd.array(content.arrays[f"device/{i}/{name}"], ctx=array.context, dtype=array.dtype)
        restore_seen(_running(net), training["seen"])
    if generators:
        random_state.set_random_state(_own_generators(training).get("now", training["random"]))
        mx.random.seed(random_state.seed_of(**_seeds(training["random"])))


def _shapes(content: CheckpointData, net: gluon.Block) -> Dict[int, Tuple[int, ...]]:
    """Return the shapes of the loaded parameters, by the parameters' ids."""
    params = net._collect_params_with_prefix().items()
    return {id(param): tuple(content.params[name].shape) for name, param in params if name in content.params}


def _training(state: TrainerState, arrays: Dict[str, Array]) -> Dict[str, Any]:
    """Return a trainer's state as values for JSON, and add its arrays to `arrays`."""
    return {
        **vars(state),
        "shapes": [list(shape) for shape in state.shapes],
        "states": {str(index): _kept(one, f"state/{index}", arrays) for index, one in state.states.items()},
        "counts": {str(index): count for index, count in state.counts.items()},
    }


def _state(content: CheckpointData) -> TrainerState:
    """Return the saved state of a trainer."""
    training: Any = content.training
    others = {name: training[name] for name in ("names", "structural", "shapes", "order", "optimizer", "loss_scaler")}
    counts = {int(index): count for index, count in training["counts"].items()}
    return TrainerState(**others, states=_states(content), counts=counts, virtual_shards=training.get("virtual_shards"))


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


def _reseeded(trainer: Trainer, step: int, base: Optional[int]) -> Dict[str, Any]:
    """Reseed MXNet's generators, whose state cannot be read; return the RNG state of all generators."""
    base = random_state.draw_base(trainer.contexts[0]) if base is None else base
    random = {"base": base, "step": step, **random_state.random_state()}
    mx.random.seed(random_state.seed_of(**_seeds(random)))
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
    process, ranks = this_process(), training.get("ranks", [])
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


def _write_arrays(file: BinaryIO, arrays: Dict[str, Array]) -> None:
    """Write arrays as `numpy.savez` does, but without the time: equal arrays give equal files."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, array.asnumpy(), allow_pickle=False)  # type: ignore[no-untyped-call]

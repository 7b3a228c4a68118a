"""A snapshot of a network and its training state: taken without waiting, written and read without pickle."""

from __future__ import annotations

import hashlib
import io
import json
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from ..checks import reason_of, short
from ..distributed import group
from ..distributed.process import this_process
from ..errors import NonFiniteLossError, StateError
from ..mxnet_internals.parameters import structural_params
from ..nested import Array, num_bytes
from ..runtime.untrusted_files import COUNT, MEMORY, MOST_JSON, Most, check_form, values_of
from ..trainer.parameters import average_replicas, has_values
from ..trainer.replica_check import ReplicaComparison
from ..trainer.states import FORM, STATE, TrainerState, as_values, from_values, read_arrays, write_arrays
from ..trainer.trainer import Trainer
from ..trainer.trainer_state import check_fits, state_of
from . import random_state
from .manifest import MANIFEST, Files, FolderWriter
from .params_file import read_params, write_params
from .replace_folder import read_files

PARAMS, STATES, TRAINING, PROGRESS = "net.params", "states.npz", "training.json", "progress.json"
FILES = (PARAMS, STATES, TRAINING, PROGRESS, MANIFEST)
AVERAGE = "average/"  # begins the names of averaged weights among the arrays
SUM = "sum/"  # those of the sums of an epoch
_RANK = {"now": random_state.FORM, "begun": (None, random_state.FORM)}
_RANDOM = {"base": [COUNT, bool], "step": COUNT, **random_state.FORM}
_TRAINING = {**FORM, "place": {"*": object}, "random": _RANDOM, "ranks": [_RANK]}
_BYTES_PER_WEIGHT = 64  # at most, of states and averages
_MOST_OTHERS = 2**30  # bytes of the arrays of callbacks

Check = Callable[["CheckpointData"], None]
ProgressRecord = Dict[str, Any]  # the progress of a run, as values for JSON; see `checkpoint/resume.py`


@dataclass(frozen=True)
class Snapshot:
    """The content of a checkpoint, in copies that training does not change.

    Attributes
    ----------
    params : dict of str to NDArray
        By structural name: the array of the first device.
    progress : str
        JSON.
    arrays : dict of str to NDArray
        The optimizer's states, and other arrays that must be restored bit for bit.
    training : dict, optional
        The trainer, the RNG state and the progress of the run, as values for JSON. None for a network alone.
    is_np : bool
        Whether it was taken in np mode.
    comparison : ReplicaComparison
        Of the devices, since it holds the first one's parameters.
    """

    params: Dict[str, Array]
    progress: str
    comparison: ReplicaComparison
    arrays: Dict[str, Array] = field(default_factory=dict)
    training: Optional[Dict[str, Any]] = None
    is_np: bool = False

    def write(self, folder: Path) -> None:
        """Write the files into an existing, empty folder. Any thread may call this.

        Raises
        ------
        NonFiniteLossError
            A loss of the epoch so far was not finite, or a parameter is NaN: the checkpoint would replace a good one.
        ReplicaError
            The devices hold other values: see `ReplicaComparison`.
        """
        self.comparison.check()
        params = {name: array.asnumpy() for name, array in self.params.items()}
        losses = [array for name, array in self.arrays.items() if name.startswith(SUM) and name.split("/", 2)[2] == "loss"]
        # a mask of attention may hold -inf; NumPy cannot tell of bfloat16, the dtype with names
        is_nan = any(np.isnan(array).any() for array in params.values() if not array.dtype.names)
        if is_nan or not all(np.isfinite(array.asnumpy()).all() for array in losses):
            step = (self.training or {}).get("place", {}).get("step")
            raise NonFiniteLossError(
                f"Checkpoint: got a loss or weights up to step {step} that are NaN or infinite; expected finite ones. Earlier "
                "checkpoints are kept: resume from them with a lower learning rate, clip the gradient, or check the batches."
            )
        writer = FolderWriter(folder)
        with writer.file(PARAMS) as file:
            write_params(file, params, np_shape=self.is_np)
        if self.training is not None:
            with writer.file(STATES) as file:
                write_arrays(file, self.arrays)
            writer.text(TRAINING, json.dumps(self.training, default=np.generic.item))
        writer.text(PROGRESS, self.progress)
        writer.finish(arrays="np" if self.is_np else "nd")


def take_snapshot(
    net: gluon.Block,
    trainer: Optional[Trainer] = None,
    progress: Optional[Dict[str, Any]] = None,
    *,
    place: Optional[ProgressRecord] = None,
    arrays: Optional[Dict[str, Array]] = None,
    base: Optional[Tuple[int, bool]] = None,
) -> Snapshot:
    """Return copies of a network's parameters and its trainer's states, and reseed MXNet's generators.

    The copies are queued without waiting. Devices that train separately (`LocalSGD`) are averaged first. Nothing else in the
    training changes.

    Parameters
    ----------
    net, trainer, progress
        As for `save_checkpoint`.
    place : dict, optional
        The progress of the run, as values for JSON; its `step` determines the seed.
    arrays : dict of str to NDArray, optional
        Further arrays to save, shapes (...).
    base : (int, bool), optional
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
    try:
        progress_json = json.dumps(progress or {}, indent=1, default=np.generic.item)
        values_of(progress_json.encode(), dict, PROGRESS)  # as it will be read
    except (TypeError, ValueError) as error:
        raise StateError(
            f"save_checkpoint: got progress that JSON cannot hold ({error}); expected numbers, strings and lists. "
            "Leave arrays out."
        ) from error
    is_np = bool(mx.util.is_np_shape())
    if trainer is not None:
        check_all_saved(net, trainer)
        trainer.steps.check_applied("Trainer.save_states")
        if trainer.steps.replica_check.is_on:
            trainer.check_replicas()  # no checkpoint holds bits of which devices or processes disagree
    average_replicas(net)
    comparison = ReplicaComparison("save_checkpoint", net)
    if trainer is None:
        mx.nd.waitall()  # a static graph writes running statistics without telling the engine
        return Snapshot(_copied_params(net), progress_json, comparison, is_np=is_np)
    copies = {name: array.as_nd_ndarray().copy() for name, array in (arrays or {}).items()}
    training = {**as_values(state_of(trainer.steps), copies), "place": place or {}}
    weights = structural_params(net).values()
    most = _most_states(sum(param.list_data()[0].size for param in weights))
    there = sum(num_bytes(array) + 2**11 for array in copies.values())  # with their names
    if there > most:
        raise StateError(
            f"save_checkpoint: got {there} bytes of states and of callbacks' arrays; expected {most} at most, since larger files "
            "are not read. Save large arrays in files of their own."
        )
    training["random"] = _reseeded(trainer, (place or {}).get("step", 0), base)
    training["ranks"] = _generators_of_all(training["random"], (place or {}).get("generators"))
    return Snapshot(_copied_params(net), progress_json, comparison, copies, training, is_np)


@dataclass(frozen=True)
class CheckpointData:
    """The content of a checkpoint's folder, read from files whose checksums were right.

    Attributes
    ----------
    folder : pathlib.Path
    progress : dict
    arrays : dict of str to numpy.ndarray
    training : dict, optional
    params : dict of str to numpy.ndarray
        By structural name. Empty after the network's parameters were set.
    is_np : bool
        Whether it was saved in np mode.
    """

    folder: Path
    progress: Dict[str, Any]
    arrays: Dict[str, np.ndarray]
    training: Optional[Dict[str, Any]]
    params: Dict[str, np.ndarray] = field(default_factory=dict)
    is_np: bool = False

    @property
    def place(self) -> ProgressRecord:
        """The progress of the run, with this process's own RNG state if the ranks had different ones."""
        place = dict((self.training or {}).get("place", {}))
        begun = _own_generators(self.training or {}).get("begun")
        return {**place, "generators": begun} if begun is not None and "generators" in place else place

    def state(self) -> TrainerState:
        """Return the saved state of the trainer; raise `StateError` if it is damaged."""
        training: Any = self.training
        arrays = {name: array for name, array in self.arrays.items() if name.startswith(STATE)}
        with refusing(self.folder):
            return from_values(training, arrays)


@contextmanager
def refusing(folder: Path) -> Iterator[None]:
    """Raise any error of this block, which checks files, as a `StateError`: damaged bytes may raise any exception."""
    try:
        yield
    except Exception as error:
        raise StateError(
            f"load_checkpoint: got {folder}, which is damaged ({reason_of(error)}); expected it as save_checkpoint wrote it. Use "
            "another checkpoint."
        ) from error


def sizes_of(folder: Path, check: Optional[Check] = None) -> Dict[str, Most]:
    """Return how many bytes each file of a checkpoint may have, see `read_files`; parameters are checked before they are read."""
    params: Dict[str, np.ndarray] = {}

    def of_params(number: int) -> int:
        with refusing(folder / PARAMS):
            params.update(read_params(number))
        if check is not None:
            check(CheckpointData(folder, {}, {}, None, params))
        return MEMORY

    def of_states(number: int) -> int:
        return _most_states(sum(array.size for array in params.values()))

    return {PARAMS: of_params, STATES: of_states, **dict.fromkeys((TRAINING, PROGRESS, MANIFEST), MOST_JSON)}


def _most_states(num_weights: int) -> int:
    """Return how many bytes the arrays of a training of so many weights may have."""
    return min(MEMORY, _BYTES_PER_WEIGHT * num_weights + _MOST_OTHERS)


def read_content(folder: Path, check: Optional[Check] = None, *, with_training: bool) -> CheckpointData:
    """Return the content of a checkpoint.

    All files are of the same version, even if another program replaces the folder meanwhile.

    `check` gets the names, dtypes and shapes of the parameters before their values are read, and raises to refuse them.

    Raises
    ------
    StateError
        The folder is not a checkpoint, is damaged, or lacks a file.
    """
    return content_of(read_files(folder, sizes_of(folder, check), "load_checkpoint"), with_training=with_training)


def content_of(files: Files, *, with_training: bool) -> CheckpointData:
    """Return the content of a checkpoint from its files: see `read_content`."""
    wanted = (PARAMS, PROGRESS, MANIFEST, *((STATES, TRAINING) if with_training else ()))
    missing = [name for name in wanted if name not in files.contents]
    if missing:
        raise StateError(
            f"load_checkpoint: got {files.folder} without {', '.join(missing)}; expected a folder of save_checkpoint. Check "
            "the path."
        )
    manifest = files.check("load_checkpoint")
    with refusing(files.folder):
        check_form(manifest, {"arrays": ("nd", "np"), "*": object}, MANIFEST)
    is_np = manifest["arrays"] == "np"
    if is_np and not mx.util.is_np_shape():
        raise StateError(
            f"load_checkpoint: got {files.folder}, which was saved with mx.npx.set_np(), in a program without it; expected np "
            "mode. Call mx.npx.set_np() first."
        )
    training, arrays = None, {}
    with refusing(files.folder):
        params = read_params(files.contents[PARAMS])
        if not is_np and not all(array.ndim and array.size for array in params.values()):
            raise ValueError(f"{PARAMS} has a shape of np arrays")
        progress = values_of(files.contents[PROGRESS], dict, PROGRESS)
        if with_training:
            training = values_of(files.contents[TRAINING], _TRAINING, TRAINING)
            arrays = read_arrays(io.BytesIO(files.contents[STATES]))
            _check_average(arrays, params)
    return CheckpointData(files.folder, progress, arrays, training, params, is_np)


def _check_average(arrays: Dict[str, np.ndarray], params: Dict[str, np.ndarray]) -> None:
    """Raise `ValueError` unless averages are of parameters, and their progress is three counts."""
    for name, array in arrays.items():
        like = params.get(name[len(AVERAGE) :])
        fits = like is not None and like.shape == array.shape and like.dtype.kind == array.dtype.kind == "f"
        if name == f"{AVERAGE}progress":
            fits = array.shape == (3,) and array.dtype == np.float64 and bool(np.all((array >= 0) & (array < COUNT.stop)))
        if name.startswith(AVERAGE) and not fits:
            raise ValueError(f"{STATES} has {short(name)} of {short(array)}")


def check_content(content: CheckpointData, net: gluon.Block, trainer: Trainer) -> None:
    """Raise `StateError` if the content belongs to another network, optimizer or number of virtual shards."""
    shapes = {id(param): content.params[name].shape for name, param in structural_params(net).items()}
    check_fits(trainer.steps, content.state(), content.folder, "load_checkpoint", shapes)


def restore_generators(content: CheckpointData) -> None:
    """Restore the RNG state of Python, NumPy and MXNet from content that was saved with a trainer."""
    training: Any = content.training
    random_state.set_random_state(_own_generators(training).get("now", training["random"]))
    reseed(content)


def reseed(content: CheckpointData) -> None:
    """Seed MXNet's generators as the run did when it saved this checkpoint with its trainer."""
    training: Any = content.training
    _seed(training["random"])


def _seed(random: Dict[str, Any]) -> None:
    number, is_shared = random["base"]  # processes that drew the same numbers go on doing so
    mx.random.seed(random_state.seed_of(number, random["step"], 0 if is_shared else this_process().rank))


def _reseeded(trainer: Trainer, step: int, base: Optional[Tuple[int, bool]]) -> Dict[str, Any]:
    """Reseed MXNet's generators, whose state cannot be read; return the RNG state of all generators."""
    number, is_shared = random_state.draw_base(trainer.contexts[0]) if base is None else base
    is_shared = is_shared or trainer.virtual_shards is not None
    random = {"base": [number, is_shared], "step": step, **random_state.random_state()}
    _seed(random)
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


def check_all_saved(net: gluon.Block, trainer: Trainer) -> None:
    """Raise `StateError` if a trainer trains parameters that the network has not: a checkpoint holds those of the network."""
    own = set(net.collect_params().values())
    others = [param.name for param in trainer.params if param not in own and param.grad_req != "null"]
    if others:
        raise StateError(
            f"save_checkpoint: got a trainer of {', '.join(others[:3])}, which the network has not; expected parameters of the "
            "network. Let one Block hold all, including the layers of a loss."
        )


def _copied_params(net: gluon.Block) -> Dict[str, Array]:
    """Return copies of the first device's parameters. A shared parameter, which has several names, is copied once."""
    params = structural_params(net)
    with autograd.pause():
        copies = {param: param.list_data()[0].as_nd_ndarray().copy() for param in dict.fromkeys(params.values())}
    return {name: copies[param] for name, param in params.items()}

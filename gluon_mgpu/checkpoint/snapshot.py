"""A network, and what its training needs to go on, at one moment: taken without waiting, written and read without pickle."""

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
from ..trainer.optimizer_config import DESCRIPTION, describe, differences, failure, misfit, restore_optimizer, with_values
from ..trainer.parameters import average_replicas, has_values
from ..trainer.running_stats import SEEN, describe_seen, remember_equal, restore_seen, weighted_mean, weights_of
from ..trainer.states import SHAPE, check_counts, check_same, states_on
from ..trainer.trainer import Trainer
from . import rng
from .atomic_folder import MANIFEST, FolderWriter, OpenFolder, WrittenFile, open_folder
from .params_file import check_params, write_params

PARAMS, STATES, TRAINING, PROGRESS = "net.params", "states.npz", "training.json", "progress.json"
FILES = (PARAMS, STATES, TRAINING, PROGRESS, MANIFEST)
_SHOWN = 160  # characters of another library's error
OLD_STATES = "trainer.states"  # a pickle, in folders of version 1

ProgressRecord = Dict[str, Any]  # where a run is, in a form that JSON holds; see `position`


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint holds, in copies that training does not change any more.

    Attributes
    ----------
    params : dict of str to list of NDArray
        By structural name: of one device, or of each, to be averaged.
    shares : dict of str to list of number
        What each device counts in the mean; see `average_running_stats`.
    progress : str
        JSON.
    arrays : dict of str to NDArray
        The optimizer's states, and whatever else is to go on from the same bits.
    training : dict, optional
        What JSON holds of the trainer, the random numbers and the place in the run. None for a network alone.
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
        """How much the arrays take on the disk, about: running statistics are one set there."""
        arrays = [copies[0] for copies in self.params.values()] + list(self.arrays.values())
        return sum(int(array.size) * np.dtype(array.dtype).itemsize for array in arrays)

    def write(self, folder: Path) -> None:
        """Write the files into a folder that is there and empty. In any thread."""
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
        """Return the mean over the devices, as `average_running_stats` computes it; of one device, its bits."""
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
        raise StateError(
            "save_checkpoint: got a network that has no values yet; expected known shapes. Pass one batch through it."
        )
    told = json.dumps(progress or {}, indent=1)
    is_np = bool(mx.util.is_np_shape())
    if trainer is None:
        average_replicas(net)
        return Snapshot(*_copied_params(net), told, is_np=is_np)
    trainer._check_applied()
    described = describe(trainer.optimizer)
    average_replicas(net)
    if this_process().num_processes > 1:
        sync_running_stats(net)
        average_over_processes(net)  # all of them go on from the statistics of the one that writes
    copies = {name: array.as_nd_ndarray().copy() for name, array in (arrays or {}).items()}
    params, shares = _copied_params(net)
    training = {"optimizer": described, **_training(trainer, copies), "place": place or {}, "versions": _versions()}
    training["devices"] = len(trainer.contexts)
    training["seen"] = describe_seen(_running(net)) if len(trainer.contexts) > 1 else {}
    for name, param in _running(net).items():
        copies.update({f"device/{i}/{name}": array for i, array in enumerate(_copies(param.list_data()))})
    training["random"] = _reseeded(trainer, (place or {}).get("step", 0), base)
    training["ranks"] = _told_by_all(training["random"], (place or {}).get("generators"))
    return Snapshot(params, shares, told, copies, training, is_np)


@dataclass(frozen=True)
class Content:
    """What was read from a checkpoint's folder, its files having been compared with their checksums.

    Attributes
    ----------
    folder : pathlib.Path
    progress : dict
    arrays : dict of str to numpy.ndarray
    training : dict, optional
    params : dict of str to NDArray
        By structural name, on the CPU. Empty when the network has them.
    """

    folder: Path
    progress: Dict[str, Any]
    arrays: Dict[str, np.ndarray]
    training: Optional[Dict[str, Any]]
    params: Dict[str, Array] = field(default_factory=dict)

    @property
    def place(self) -> ProgressRecord:
        """Where the run was, with this process's own random numbers where each had others."""
        place = dict((self.training or {}).get("place", {}))
        begun = _own(self.training or {}).get("begun")
        return {**place, "generators": begun} if begun is not None and "generators" in place else place


def read_content(folder: Path, *, with_training: bool) -> Content:
    """Return what a checkpoint holds.

    Its files belong together, also where another program replaces the folder meanwhile.

    Raises
    ------
    StateError
        It is no checkpoint, or an older one, or damaged, or lacks a file.
    """
    with open_folder(folder, (*FILES, OLD_STATES), "load_checkpoint") as opened:
        return content_of(opened, with_training=with_training)


def content_of(opened: OpenFolder, *, with_training: bool) -> Content:
    """Return what a checkpoint holds whose files are open: see `read_content`."""
    if MANIFEST not in opened:
        return _without_manifest(opened, with_training)
    manifest = opened.check("load_checkpoint")
    wanted = (PARAMS, PROGRESS) + ((STATES, TRAINING) if with_training else ())
    _check_there(opened, [name for name in wanted if name not in manifest["files"]])
    mode = "np" if mx.util.is_np_shape() else "nd"
    if (manifest.get("arrays"), mode) == ("np", "nd"):
        raise StateError(
            f"load_checkpoint: got {opened.path}, which was saved with mx.npx.set_np(), in a program without; expected np "
            "arrays. Call mx.npx.set_np() first."
        )
    training = _read_json(opened, TRAINING) if with_training else None
    arrays = _read_arrays(opened, STATES) if with_training else {}
    return Content(opened.path, _read_json(opened, PROGRESS), arrays, training, _read_params(opened))


def check_content(content: Content, net: gluon.Block, trainer: Trainer) -> None:
    """Raise `StateError` unless what was read is as `take_snapshot` makes it, and belongs to this network and optimizer."""
    told: Any = content.training
    _check_training(content, TRAINING_FILE, told)
    _check_training(content, lambda found: _misnamed_states(content.arrays, found["states"]), told)
    check_same(str(content.folder), told, trainer._replicas, "load_checkpoint")
    differing = differences(told["optimizer"], trainer.optimizer)
    if differing:
        raise StateError(
            f"load_checkpoint: got {content.folder} of a trainer with {'; '.join(differing[:3])}; expected the same "
            "optimizer and schedule. Make the trainer with the options of the checkpoint, or load the network alone."
        )
    _check_training(content, lambda found: _misfit(found["optimizer"], trainer), told)
    check_counts(
        str(content.folder / TRAINING),
        _states(content),
        _counts(content),
        trainer._replicas,
        trainer.optimizer,
        "load_checkpoint",
    )
    broken = failure(with_values(told["optimizer"], trainer.optimizer), _counts(content))
    if broken:
        raise StateError(
            f"load_checkpoint: got {content.folder / TRAINING} of an optimizer that cannot train ({broken}); expected one "
            "as it was saved. Use another checkpoint."
        )
    _check_training(content, _misplaced, told)
    _check_training(content, lambda found: _misshapen(found["shapes"], _shapes(content, net, trainer)), told)
    _check_running(content, net, trainer)


def states_of(content: Content, net: gluon.Block, trainer: Trainer) -> List[Dict[int, Any]]:
    """Return the optimizer's states on each device, which are not yet the trainer's.

    Raises
    ------
    StateError
        They do not fit the parameters.
    """
    told, shapes = _states(content), _shapes(content, net, trainer)
    states = states_on(trainer._replicas, trainer.optimizer, told, str(content.folder / STATES), shapes)
    for index in told:
        for (_, saved), (_, fresh) in zip(leaves(told[index]), leaves(states[0][index])):
            if is_device_array(fresh) and saved.dtype != np.dtype(fresh.dtype):
                raise _damaged(content.folder / STATES, TypeError(f"{saved.dtype} where {np.dtype(fresh.dtype)} is needed"))
    return states


def restore(content: Content, net: gluon.Block, trainer: Trainer, states: List[Dict[int, Any]]) -> None:
    """Let a trainer, whose network has the parameters already, go on from what was read and checked."""
    told: Any = content.training
    trainer.resolve_shapes()  # the parameters may have brought them
    if trainer.loss_scaler is not None and told.get("loss_scaler") is not None:
        trainer.loss_scaler.restore(told["loss_scaler"])
    restore_optimizer(told["optimizer"], trainer.optimizer)
    trainer.discard()
    trainer._use(trainer.optimizer)
    trainer._update.restore(states, _counts(content), told.get("order"))
    remember_equal(net)
    if told["devices"] == len(trainer.contexts):
        for name, param in _running(net).items():
            for i, array in enumerate(param.list_data()):
                array.as_nd_ndarray()[:] = mx.nd.array(content.arrays[f"device/{i}/{name}"], ctx=array.context, dtype=array.dtype)
        restore_seen(_running(net), told.get("seen", {}))
    rng.set_random_state(_own(told).get("now", told["random"]))
    mx.random.seed(rng.seed_of(**_seeds(told["random"])))


def _check_training(content: Content, shape: schema.Schema, told: Any) -> None:
    schema.check(shape, told, operation="load_checkpoint", file=content.folder / TRAINING)


def _misfit(told: Dict[str, Any], trainer: Trainer) -> Optional[schema.Wrong]:
    """Return what is wrong with a description of an optimizer of the same class and options as this trainer's."""
    mine, optimizer = describe(trainer.optimizer), trainer.optimizer
    wrong = misfit(mine["values"], told["values"], optimizer, exact=True)
    if wrong is not None:
        return wrong.below("values").below("optimizer")
    if mine["schedule"] is not None:
        wrong = misfit(mine["schedule"]["values"], told["schedule"]["values"], optimizer.lr_scheduler, exact=True)
    return wrong and wrong.below("values").below("schedule").below("optimizer")


def _misplaced(told: Dict[str, Any]) -> Optional[schema.Wrong]:
    """Return what is wrong with parts that older checkpoints do not hold: the order of updates, and examples by device."""
    places = list(range(len(told["names"])))
    if sorted(told.get("order", places)) != places:
        return schema.Wrong(told["order"], f"each of 0 to {len(places) - 1} once").below("order")
    for name, one in told.get("seen", {}).items():
        for part, values in one.items():
            if len(values) != told["devices"]:
                return schema.Wrong(values, f"one for each of {told['devices']} devices").below(part).below(name).below("seen")
    return None


def _shapes(content: Content, net: gluon.Block, trainer: Trainer) -> Dict[int, Tuple[int, ...]]:
    """Return the shapes of a trainer's parameters, by index, as those have them that were read."""
    names = {id(param): name for name, param in net._collect_params_with_prefix().items()}
    found = {index: names.get(id(param), "") for index, param in enumerate(trainer._replicas.params)}
    return {index: tuple(content.params[name].shape) for index, name in found.items() if name in content.params}


def _check_running(content: Content, net: gluon.Block, trainer: Trainer) -> None:
    """Raise `StateError` unless each device's running statistics are there that the number of devices promises, and no others."""
    told: Any = content.training
    running = _running(net)
    there = {key: array for key, array in content.arrays.items() if key.startswith("device/")}
    wanted = {f"device/{i}/{name}": content.params[name] for i in range(min(told["devices"], len(there) + 1)) for name in running}
    differing = sorted(there.keys() ^ wanted.keys())
    for key in wanted.keys() & there.keys():
        if there[key].shape != wanted[key].shape or there[key].dtype != np.dtype(wanted[key].dtype):
            differing.append(key)
    if differing:
        raise _damaged(
            content.folder / STATES, KeyError(f"{schema.shown(differing[0])} for {schema.shown(told['devices'])} devices")
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
    """Return the form of an optimizer's state, in what JSON holds, having put its arrays among the others."""
    if is_device_array(state):
        arrays[name] = state.as_nd_ndarray().copy()
        return {"array": name}
    if isinstance(state, (list, tuple)):
        return [_kept(one, f"{name}/{i}", arrays) for i, one in enumerate(state)]
    if state is None or isinstance(state, (bool, int, float, str)):
        return state
    raise StateError(
        f"save_checkpoint: got {type(state).__name__} as an optimizer's state; expected arrays and numbers. Train with another "
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
    if len(set(processes.all_gather_bytes(hashlib.sha256(mine).digest()))) == 1:
        return []
    return [json.loads(one) for one in processes.all_gather_bytes(mine)]


def _own(told: Dict[str, Any]) -> Dict[str, Any]:
    """Return what was told of the generators of this process, nothing where all had the same, or there were more or fewer."""
    process, ranks = this_process(), told.get("ranks") or []
    return dict(ranks[process.rank]) if len(ranks) == process.num_processes else {}


def _seeds(told: Dict[str, Any]) -> Dict[str, int]:
    return {"base": told["base"], "step": told["step"], "rank": this_process().rank}


def _copied_params(net: gluon.Block) -> Tuple[Dict[str, List[Array]], Dict[str, List[float]]]:
    """Return copies of one device's parameters; of running statistics, those of each, unless the first one's count alone.

    And what each device counts in the mean of the latter.
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
    """Return the parameters that each device has values of its own of: those of no gradient, and not of whole numbers."""
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
    """Write arrays as `numpy.savez` does, which takes no file that is only written to."""
    with zipfile.ZipFile(file, "w") as archive:  # type: ignore[call-overload]
        for name, array in arrays.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, values_of(array), allow_pickle=False)  # type: ignore[no-untyped-call]


def _read_params(opened: OpenFolder) -> Dict[str, Array]:
    try:
        check_params(opened.file(PARAMS))
        loaded = (mx.npx.load if mx.util.is_np_array() else mx.nd.load)(opened.location(PARAMS))
    except (mx.MXNetError, ValueError) as error:
        told = str(error).strip().splitlines()[-1]
        raise StateError(
            f"load_checkpoint: got {opened.path / PARAMS}, which is damaged ({told}); expected a file of save_checkpoint. Use "
            "another one."
        ) from error
    return loaded if isinstance(loaded, dict) else {}


def _read_arrays(opened: OpenFolder, name: str) -> Dict[str, np.ndarray]:
    try:
        with np.load(opened.file(name), allow_pickle=False) as file:
            found = dict(file.items())
        strange = [key for key, value in found.items() if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiubV"]
        if strange or len(found) < len(file.files):
            raise ValueError(f"{schema.shown(strange[0])} is no array of numbers" if strange else "an array is there twice")
        return found
    except Exception as error:  # whatever zipfile, zlib, tokenize and NumPy say of damaged bytes
        raise _damaged(opened.path / name, error) from error


def _read_json(opened: OpenFolder, name: str) -> Dict[str, Any]:
    content: Dict[str, Any] = schema.parse_json(opened.read(name), operation="load_checkpoint", file=opened.path / name)
    schema.check(schema.record({}, closed=False), content, operation="load_checkpoint", file=opened.path / name)
    return content


def _without_manifest(opened: OpenFolder, with_training: bool) -> Content:
    """Return what a folder of an older version holds, as far as that can be read without executing anything in it."""
    _check_there(opened, [name for name in (PARAMS, PROGRESS) if name not in opened])
    if with_training and OLD_STATES in opened:
        raise StateError(
            f"load_checkpoint: got {opened.path} of an older gluon_mgpu, whose {OLD_STATES} is a pickle; expected {STATES}, as "
            "reading a pickle executes what is in it. Load the network alone, then, if you trust the file, "
            f"trainer.load_states({str(opened.path / OLD_STATES)!r})."
        )
    if with_training or STATES in opened:
        _check_there(opened, [MANIFEST])
    return Content(opened.path, _read_json(opened, PROGRESS), {}, None, _read_params(opened))


def _check_there(opened: OpenFolder, missing: List[str]) -> None:
    if missing:
        raise StateError(
            f"load_checkpoint: got {opened.path} without {', '.join(missing)}; expected a folder of save_checkpoint. Check "
            "the path."
        )


def _damaged(path: Path, error: Exception) -> StateError:
    told = " ".join(str(error).split())[:_SHOWN]
    return StateError(
        f"load_checkpoint: got {path}, which is damaged ({type(error).__name__}: {told}); expected a file of "
        "save_checkpoint. Use another one."
    )


def _misshapen(told: List[Any], shapes: Dict[int, Tuple[int, ...]]) -> Optional[schema.Wrong]:
    differing = ((index, shape) for index, shape in shapes.items() if tuple(told[index] or ()) != shape)
    return next((schema.Wrong(told[i], f"{shape}, as in {PARAMS}", ("shapes", i)) for i, shape in differing), None)


def _misnamed_states(arrays: Dict[str, np.ndarray], told: Dict[str, Any]) -> Optional[schema.Wrong]:
    found = ((index, _misnamed(arrays, form, f"state/{index}")) for index, form in told.items())
    return next((wrong.below(index).below("states") for index, wrong in found if wrong is not None), None)


def _misnamed(arrays: Dict[str, np.ndarray], form: Any, name: str) -> Optional[schema.Wrong]:
    """Return what is wrong with the form of an optimizer's state: see `_kept`."""
    if isinstance(form, list):
        found = ((i, _misnamed(arrays, one, f"{name}/{i}")) for i, one in enumerate(form))
        return next((wrong.below(i) for i, wrong in found if wrong is not None), None)
    if isinstance(form, dict):
        is_right = form == {"array": name} and name in arrays
        return None if is_right else schema.Wrong(form.get("array"), f'"{name}", which is in {STATES}', ("array",))
    is_plain = form is None or isinstance(form, (bool, int, float, str))
    return None if is_plain else schema.Wrong(form, "an array, a number, a text or null")


def _step_differs(told: Dict[str, Any]) -> Optional[schema.Wrong]:
    step, place = told["random"]["step"], told["place"].get("step", 0)
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
            "ranks": schema.list_of(schema.record({"now": rng.RANDOM_STATE, "begun": schema.nullable(rng.RANDOM_STATE)})),
        },
        closed=False,
    ),
    _step_differs,
)

"""Save a network with its trainer into a folder, and load it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Dict, Optional, Sequence, Union

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from ..checks import flag, instance, path_of
from ..data_parallel.step import check_network
from ..distributed import group
from ..distributed.process import this_process
from ..errors import StateError
from ..mxnet_internals.parameters import has_values, set_values, structural_params
from ..trainer.parameters import average_replicas, check_initialised, named_params
from ..trainer.trainer import Trainer
from ..trainer.trainer_state import restore
from .params_file import mxnet_array
from .replace_folder import explained, new_folder
from .snapshot import AVERAGE, FILES, CheckpointData, check_content, read_content, restore_generators, take_snapshot


def save_checkpoint(
    net: gluon.Block, folder: Union[str, Path], trainer: Optional[Trainer] = None, *, progress: Optional[Dict[str, Any]] = None
) -> None:
    """Save a network, and the state that its training needs to resume, into a folder.

    ```
    net.params       plain Gluon: net.load_parameters reads it, with or without this package
    progress.json    the dictionary that was passed, such as the epoch
    states.npz       the optimizer's states                                              with a trainer
    training.json    its options and schedule, counts, loss scale, RNG state             with a trainer
    manifest.json    the sizes and checksums of the other files
    ```

    The folder is written under another name, synced to the disk, and then renamed: a folder of this name is always complete.
    Reading it executes none of its content.

    Saving changes the training in two ways, so that a resumed run goes on alike: devices that differ, after passes that no step
    has used or with `LocalSGD`, are averaged; with a trainer, MXNet's random generators, whose state cannot be read, are seeded.

    In a job of several processes, all processes must call this; the first one writes, and the others wait until it has.

    Parameters
    ----------
    net : gluon.Block
    folder : str or pathlib.Path
        Replaced if it holds a checkpoint.
    trainer : Trainer, optional
    progress : dict, optional
        Values that JSON can represent.

    Raises
    ------
    StateError
        The folder holds other files, the network has no values, or optimizer or schedule keep a value that cannot be saved.
    SaveError
        The folder cannot be written. An existing checkpoint is kept.
    TrainerError
        Gradients were accumulated and not applied: the files would not hold them.

    Examples
    --------
    >>> import tempfile
    >>> import mxnet as mx
    >>> net = gluon.nn.Dense(1, in_units=1)
    >>> net.initialize(mx.init.One(), ctx=[mx.cpu(0), mx.cpu(1)])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_checkpoint(net, folder + "/c", Trainer(net, "adam"), progress={"epoch": 3})
    ...     load_checkpoint(net, folder + "/c", Trainer(net, "adam"))
    {'epoch': 3}
    """
    folder = path_of("save_checkpoint", "folder", folder, error=StateError)
    _check_given("save_checkpoint", net, trainer)
    advice = "Pass for example {'epoch': 3}."
    instance("save_checkpoint", "progress", progress, (dict, type(None)), "a dict", advice=advice, error=StateError)
    check_folder(folder, FILES, "save_checkpoint", "checkpoint")
    snapshot, processes = take_snapshot(net, trainer, progress), group()
    try:
        if not this_process().rank:
            with explained("save_checkpoint", folder, left="The previous checkpoint is kept."), new_folder(folder) as new:
                snapshot.write(new)
    finally:
        if processes is not None:
            processes.barrier()  # none loads it before


def load_checkpoint(
    net: gluon.Block,
    folder: Union[str, Path],
    trainer: Optional[Trainer] = None,
    *,
    states_only: bool = False,
    averaged: bool = False,
) -> Dict[str, Any]:
    """Load a checkpoint of `save_checkpoint` or `fit` into a network, on any number of devices.

    A trainer gets the optimizer's states with their update counts, the loss scale and, if it has no schedule, the learning rate.
    It keeps its other options and its schedule, which follows the update counts. The random generators of Python, NumPy and
    MXNet are restored.

    Parameters
    ----------
    net : gluon.Block
    folder : str or pathlib.Path
    trainer : Trainer, optional
    states_only : bool
        The trainer keeps its learning rate, and the random generators their state.
    averaged : bool
        Load the weights that `WeightAverage` has averaged, instead of the trained ones; without a trainer.

    Returns
    -------
    dict
        The `progress` that was saved.

    Raises
    ------
    StateError
        The checkpoint is missing, damaged or of a newer version, or it belongs to another network or optimizer.
        Nothing was changed.

    Examples
    --------
    Train on with ten times the learning rate:

    >>> import tempfile
    >>> import mxnet as mx
    >>> net = gluon.nn.Dense(1, in_units=1)
    >>> net.initialize(mx.init.One())
    >>> trainer = Trainer(net, "sgd", {"learning_rate": 1.0, "momentum": 0.8})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_checkpoint(net, folder + "/c", Trainer(net, "sgd", {"learning_rate": 0.1, "momentum": 0.9}))
    ...     load_checkpoint(net, folder + "/c", trainer, states_only=True)
    {}
    >>> trainer.learning_rate
    1.0
    """
    flag("load_checkpoint", "states_only", states_only)
    if states_only and trainer is None:
        raise StateError(
            "load_checkpoint: got states_only=True without a trainer; expected the trainer that takes the states. Pass it, or "
            "leave states_only out to load the network alone."
        )
    if flag("load_checkpoint", "averaged", averaged):
        return _load_average(net, folder, trainer)
    read = read_checkpoint(net, folder, trainer)
    return read.restore(generators=not states_only, learning_rate=not states_only).progress


def _load_average(net: gluon.Block, folder: Union[str, Path], trainer: Optional[Trainer]) -> Dict[str, Any]:
    """Load a checkpoint's averaged weights, and its running statistics."""
    if trainer is not None:
        raise StateError(
            "load_checkpoint: got averaged=True with a trainer, whose states belong to the trained weights; expected no trainer. "
            "Leave the trainer out."
        )
    folder = path_of("load_checkpoint", "folder", folder, error=StateError)
    check_network("load_checkpoint", net)
    content = read_content(folder, partial(check_shapes, net=net), with_training=True)
    check_parameters(content, net)
    first = {id(param): name for name, param in named_params(net).items()}  # a shared parameter has several names
    averages = {}
    for name, param in structural_params(net).items():
        average = content.arrays.get(AVERAGE + first[id(param)])
        if average is not None:
            averages[name] = average.astype(content.params[name].dtype)
    if not averages:
        raise StateError(
            f"load_checkpoint: got {content.folder} without averaged weights; expected a checkpoint of a run with WeightAverage. "
            "Load the trained weights without averaged=True."
        )
    set_parameters(replace(content, params={**content.params, **averages}), net)
    return content.progress


@dataclass(frozen=True)
class ReadCheckpoint:
    """A checkpoint that was read and fits a network and its trainer, which are not changed yet.

    Attributes
    ----------
    content : CheckpointData
    """

    content: CheckpointData
    _net: gluon.Block
    _trainer: Optional[Trainer]

    def restore(self, *, generators: bool = True, learning_rate: bool = True) -> CheckpointData:
        """Set the network and its trainer to the checkpoint's state; return the content without the parameters.

        With `generators`, also restore the RNG state of Python, NumPy and MXNet; with `learning_rate`, that of the trainer.
        """
        with autograd.pause():
            if self._trainer is None:
                return set_parameters(self.content, self._net)
            average_replicas(self._net)  # marks replicas that train separately (`LocalSGD`) as equal again
            without = set_parameters(self.content, self._net)
            self._trainer.steps.resolve_shapes()  # the loaded parameters may have set them
            restore(self._trainer.steps, without.state(), learning_rate=learning_rate)
        if generators:
            restore_generators(without)
        return without


def read_checkpoint(net: gluon.Block, folder: Union[str, Path], trainer: Optional[Trainer] = None) -> ReadCheckpoint:
    """Read a checkpoint of this network and trainer, and check all of it; raise `StateError` as `load_checkpoint` does."""
    folder = path_of("load_checkpoint", "folder", folder, error=StateError)
    _check_given("load_checkpoint", net, trainer)
    content = read_content(folder, partial(check_shapes, net=net), with_training=trainer is not None)
    check_parameters(content, net)
    if trainer is not None:
        check_content(content, net, trainer)
    return ReadCheckpoint(content, net, trainer)


def remember(net: gluon.Block, trainer: Trainer) -> ReadCheckpoint:
    """Return a checkpoint in memory, whose `restore` sets network, trainer and random generators to their state now.

    Each process has its own. See `save_checkpoint` about MXNet's random generators.

    Raises
    ------
    StateError, TrainerError
        As for `save_checkpoint`.
    """
    snapshot = take_snapshot(net, trainer)
    params = {name: array.asnumpy() for name, array in snapshot.params.items()}
    arrays = {name: array.asnumpy() for name, array in snapshot.arrays.items()}
    content = CheckpointData(Path("memory"), {}, arrays, json.loads(json.dumps(snapshot.training)), params)
    check_content(content, net, trainer)
    return ReadCheckpoint(content, net, trainer)


def _check_given(operation: str, net: Any, trainer: Any) -> None:
    check_network(operation, net)
    advice = "Pass Trainer(net, 'sgd'), or None."
    instance(operation, "trainer", trainer, (Trainer, type(None)), "a gluon_mgpu.Trainer", advice=advice)


def check_folder(folder: Path, ours: Sequence[str], operation: str, example: str) -> None:
    """Raise `StateError` unless a folder does not exist yet, or holds only files of these names.

    Also raise for a link: saving replaces the folder, which would replace the link and not its target.
    """
    with explained(operation, folder):
        others = [path.name for path in folder.iterdir() if path.name not in ours] if folder.is_dir() else []
    if os.path.islink(folder):
        raise StateError(
            f"{operation}: got {folder}, which is a link to {os.readlink(folder)}; expected a folder of its own, because saving "
            "replaces it. Remove the link, or pass its target; a folder further up may be a link."
        )
    if others or not folder.name or (os.path.lexists(folder) and not folder.is_dir()):
        raise StateError(
            f"{operation}: got {folder}, which holds {', '.join(sorted(others)[:3]) or f'no {example}'}; expected a folder "
            f"of its own, because saving replaces it. Pass for example {folder / example}."
        )


def check_shapes(content: CheckpointData, net: gluon.Block) -> None:
    """Raise `StateError` unless a checkpoint has exactly this network's parameters: names, dtypes, shapes."""
    here, there = structural_params(net), content.params
    differing = [
        f"{name} {_form(there.get(name))} where this one has {_form(here.get(name))}"
        for name in {**there, **here}
        if name not in there or name not in here or not _fits(there[name], here[name])
    ]
    if differing:
        raise StateError(
            f"load_checkpoint: got {content.folder} of another network: {'; '.join(differing[:3])}; expected the same layers. "
            "Build the network as it was when it was saved, with the same options."
        )


def check_parameters(content: CheckpointData, net: gluon.Block) -> None:
    """Raise `StateError` unless a checkpoint holds exactly this network's parameters, those with several names once."""
    check_shapes(content, net)
    names: Dict[int, str] = {}
    for name, param in structural_params(net).items():
        first = names.setdefault(id(param), name)
        if first != name and content.params[first].tobytes() != content.params[name].tobytes():
            raise StateError(
                f"load_checkpoint: got {content.folder} with different values of {first} and {name}, one parameter in this "
                "network; expected the same layers. Build the network as it was when it was saved."
            )


def set_parameters(content: CheckpointData, net: gluon.Block) -> CheckpointData:
    """Set a network's parameters to those of a checkpoint that `check_parameters` has accepted; return it without them.

    This does what Gluon's `load_parameters` does, but reads no file: the checked file may have been replaced.
    """
    params = structural_params(net)
    check_initialised("load_checkpoint", params)
    for name, param in params.items():
        if has_values(param) and param.shape == ():  # where Gluon's methods raise
            for array in param.list_data():
                array[()] = mxnet_array(content.params[name])
        else:
            set_values(param, mxnet_array(content.params[name]), param.list_ctx())
    return replace(content, params={})


def _fits(array: np.ndarray, param: gluon.Parameter) -> bool:
    """Return whether a parameter can take these values: its dtype and its shape, as far as it is known."""
    shape, unknown = param.shape, -1 if mx.util.is_np_shape() else 0
    if np.dtype(param.dtype) != array.dtype:
        return False
    is_unknown = not has_values(param)
    if is_unknown and (shape is None or shape == () and not unknown):
        return True
    sizes = zip(shape, array.shape)
    return len(shape) == array.ndim and all(one == other or is_unknown and one == unknown for one, other in sizes)


def _form(values: Any) -> str:
    return "nothing" if values is None else f"{np.dtype(values.dtype).name} {tuple(values.shape or ())}"

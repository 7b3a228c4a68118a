"""Save and load a network with its trainer, a folder at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Dict, Optional, Sequence, Tuple, Union

import mxnet as mx
import numpy as np
from mxnet import gluon

from .distributed.process import this_process
from .errors import StateError
from .evaluation import devices_of
from .folders import new_folder, put_in_place, whole
from .parameters import has_values, shape_fits
from .replicas import average_replicas
from .snapshot import FILES, OLD_STATES, PARAMS, Content, check_content, read_content, restore, states_of, take_snapshot
from .trainer import Trainer


def save_checkpoint(
    folder: Union[str, Path],
    net: gluon.Block,
    trainer: Optional[Trainer] = None,
    progress: Optional[Dict[str, Any]] = None,
) -> None:
    """Write a network, and what its training needs to go on, into a folder.

    ```
    net.params       plain Gluon: net.load_parameters reads it, here or without this package
    progress.json    whatever was passed: the epoch, say
    states.npz       the optimizer's states, and each device's running statistics        with a trainer
    training.json    its options and schedule, counts, random numbers, versions          with a trainer
    manifest.json    the sizes and checksums of the others
    ```

    The folder is written beside, forced to the disk, and then renamed: one of this name is whole, the new or the old one. Reading
    it executes nothing that is in it.

    `net.params` holds the mean of BatchNorm's running statistics over the devices, which is what `evaluate` measures. Training is
    left as it is, but that MXNet's random generators, which do not tell where they are, are seeded anew where a trainer is saved:
    this run and one that goes on from the folder draw the same numbers from here on.

    In a job of several processes, the first one writes. Each is to call it.

    Parameters
    ----------
    folder : str or pathlib.Path
        Replaced if it is there, and refused if it holds anything else.
    net : gluon.Block
    trainer : Trainer, optional
    progress : dict, optional
        Anything that JSON holds.

    Raises
    ------
    StateError
        The folder holds something else, the network has no values, or optimizer or schedule keep what a file cannot hold.
    TrainerError
        Gradients were accumulated and not applied: the files would not hold them.

    Examples
    --------
    >>> import tempfile
    >>> net = gluon.nn.Dense(1, in_units=1)
    >>> net.initialize(mx.init.One(), ctx=[mx.cpu(0), mx.cpu(1)])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_checkpoint(folder + "/c", net, Trainer(net, "adam"), {"epoch": 3})
    ...     load_checkpoint(folder + "/c", net, Trainer(net, "adam"))
    {'epoch': 3}
    """
    folder = Path(folder)
    check_folder(folder, (*FILES, OLD_STATES), "save_checkpoint", "checkpoint")
    snapshot = take_snapshot(net, trainer, progress)
    if this_process().rank:
        return
    with new_folder(folder) as new:
        snapshot.write(new)
    put_in_place(folder)


def load_checkpoint(folder: Union[str, Path], net: gluon.Block, trainer: Optional[Trainer] = None) -> Dict[str, Any]:
    """Read what `save_checkpoint` wrote into a network that is on its devices, as many as then or not.

    With a trainer, Python's, NumPy's and MXNet's random generators go on from where they were, too; and on as many devices as
    then, each has its own running statistics again, where without a trainer, or on others, all have their mean.

    Returns
    -------
    dict
        The `progress` that was saved.

    Raises
    ------
    StateError
        There is no checkpoint, it is damaged or of a newer version, or it belongs to another network, optimizer or schedule.
        Nothing was changed.
    """
    return read_checkpoint(folder, net, trainer).progress


def read_checkpoint(
    folder: Union[str, Path],
    net: gluon.Block,
    trainer: Optional[Trainer] = None,
    *,
    check: Callable[[Content], None] = lambda content: None,
) -> Content:
    """Do what `load_checkpoint` does, and return all that was read; `check` may refuse it before anything is changed."""
    folder = whole(Path(folder))
    content = read_content(folder, with_training=trainer is not None)
    _check_parameters(folder, net)
    if trainer is None:
        net.load_parameters(str(folder / PARAMS), ctx=devices_of(net))
        return content
    check_content(content, trainer)
    check(content)
    states = states_of(content, trainer) if has_values(net) else None
    average_replicas(net)  # where they are apart, they are told that they are no longer
    net.load_parameters(str(folder / PARAMS), ctx=devices_of(net))
    restore(content, net, trainer, states_of(content, trainer) if states is None else states)  # the parameters bring the shapes
    return content


def check_folder(folder: Path, ours: Sequence[str], operation: str, example: str) -> None:
    """Raise `StateError` unless a folder is not there yet, or holds nothing but files of these names."""
    others = [path.name for path in folder.iterdir() if path.name not in ours] if folder.is_dir() else []
    if others or not folder.name or (folder.exists() and not folder.is_dir()):
        raise StateError(
            f"{operation}: got {folder}, which holds {', '.join(sorted(others)[:3]) or f'no {example}'}; need a folder of its "
            f"own, which is replaced as a whole. Pass {folder / example}, say."
        )


def _check_parameters(folder: Path, net: gluon.Block) -> None:
    """Raise `StateError` unless the file holds this network's parameters: Gluon looks at them one by one, as it loads."""
    try:
        loaded = (mx.npx.load if mx.util.is_np_array() else mx.nd.load)(str(folder / PARAMS))
    except (mx.MXNetError, ValueError) as error:
        told = str(error).strip().splitlines()[-1]
        raise StateError(
            f"load_checkpoint: got {folder / PARAMS}, which is damaged ({told}); need a file of save_checkpoint. Use another one."
        ) from error
    params = net._collect_params_with_prefix().items()
    here = {name: (np.dtype(param.dtype).name, tuple(param.shape or ())) for name, param in params}
    saved = loaded.items() if isinstance(loaded, dict) else ()
    there = {name: (np.dtype(array.dtype).name, array.shape) for name, array in saved}
    differing = [
        f"{name} {_worded(there.get(name))} where this one has {_worded(here.get(name))}"
        for name in {**there, **here}
        if name not in there
        or name not in here
        or there[name][0] != here[name][0]
        or not shape_fits(there[name][1], here[name][1])
    ]
    if differing:
        raise StateError(
            f"load_checkpoint: got {folder} of another network: {'; '.join(differing[:3])}; need the same layers. "
            "Build the network as it was when it was saved."
        )


def _worded(described: Optional[Tuple[str, Tuple[int, ...]]]) -> str:
    return f"{described[0]} {described[1]}" if described else "nothing"

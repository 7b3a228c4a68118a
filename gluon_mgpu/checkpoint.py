"""Save and load a network with its trainer, a folder at a time."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Dict, Optional, Tuple, Union

import mxnet as mx
import numpy as np
from mxnet import gluon

from .batchnorm import settle_batch_norm
from .errors import StateError
from .evaluation import devices_of
from .parameters import has_values, shape_fits
from .trainer import Trainer

_PARAMS, _STATES, _PROGRESS = _FILES = "net.params", "trainer.states", "progress.json"


def save_checkpoint(
    folder: Union[str, Path],
    net: gluon.Block,
    trainer: Optional[Trainer] = None,
    progress: Optional[Dict[str, Any]] = None,
) -> None:
    """Write a network, and what its training needs to go on, into a folder.

    ```
    net.params        plain Gluon: net.load_parameters reads it, here or without this package
    trainer.states    optimizer and its states
    progress.json     whatever was passed: the epoch, say
    ```

    The folder is written beside and then renamed: one of this name is whole, the new or the old one. BatchNorm's running
    statistics are averaged over the devices first, so that what is saved is what `evaluate` measures.

    Parameters
    ----------
    folder : str or pathlib.Path
        Replaced if it is there, and refused if it holds anything else.
    net : gluon.Block
    trainer : Trainer, optional
    progress : dict, optional
        Anything that JSON holds.
    """
    if not has_values(net):
        raise StateError("save_checkpoint: got a network that has no values yet; need known shapes. Pass one batch through it.")
    folder = Path(folder)
    others = [path.name for path in folder.iterdir() if path.name not in _FILES] if folder.is_dir() else []
    if others or not folder.name or (folder.exists() and not folder.is_dir()):
        raise StateError(
            f"save_checkpoint: got {folder}, which holds {', '.join(others[:3]) or 'no checkpoint'}; need a "
            "folder of its own, which is "
            f"replaced as a whole. Pass {folder / 'checkpoint'}, say."
        )
    new, old = _beside(folder, "new"), _beside(folder, "old")
    settle_batch_norm(net)
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        _save_parameters(net, str(new / _PARAMS))
        if trainer is not None:
            trainer.save_states(str(new / _STATES))
        (new / _PROGRESS).write_text(json.dumps(progress or {}, indent=1), encoding="utf-8")
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(folder: Union[str, Path], net: gluon.Block, trainer: Optional[Trainer] = None) -> Dict[str, Any]:
    """Read what `save_checkpoint` wrote into a network that is on its devices, as many as then or not.

    Returns
    -------
    dict
        The `progress` that was saved.

    Raises
    ------
    StateError
        There is no checkpoint, it is damaged, or it belongs to another network or optimizer. Nothing was changed.
    """
    folder = Path(folder)
    if not folder.exists() and _beside(folder, "old").exists():  # stopped between two renames of save_checkpoint
        folder = _beside(folder, "old")
    missing = [name for name in (_PARAMS, _PROGRESS) + ((_STATES,) if trainer else ()) if not (folder / name).is_file()]
    if missing:
        raise StateError(
            f"load_checkpoint: got {folder} without {', '.join(missing)}; need a folder of save_checkpoint. Check the path."
        )
    progress = _read_progress(folder)
    _check_parameters(folder, net)
    if trainer is not None:
        trainer.check_states(str(folder / _STATES))
    net.load_parameters(str(folder / _PARAMS), ctx=devices_of(net))
    if trainer is not None:
        trainer.load_states(str(folder / _STATES))  # after the parameters, which may bring the shapes
    return progress


def _read_progress(folder: Path) -> Dict[str, Any]:
    try:
        progress: Dict[str, Any] = json.loads((folder / _PROGRESS).read_text(encoding="utf-8"))
        return progress
    except ValueError as error:
        raise StateError(
            f"load_checkpoint: got {folder / _PROGRESS}, which is damaged ({error}); need a file of "
            "save_checkpoint. Use another one."
        ) from error


def _check_parameters(folder: Path, net: gluon.Block) -> None:
    """Raise `StateError` unless the file holds this network's parameters: Gluon looks at them one by one, as it loads."""
    try:
        loaded = (mx.npx.load if mx.util.is_np_array() else mx.nd.load)(str(folder / _PARAMS))
    except (mx.MXNetError, ValueError) as error:
        told = str(error).strip().splitlines()[-1]
        raise StateError(
            f"load_checkpoint: got {folder / _PARAMS}, which is damaged ({told}); need a file of save_checkpoint. "
            "Use another one."
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


def _save_parameters(net: gluon.Block, path: str) -> None:
    """Write what `net.save_parameters` writes, but one replica's bits: the mean of three equal numbers may be another one."""
    save = mx.npx.save if mx.util.is_np_array() else mx.nd.save
    arrays = {name: param.list_data()[0] for name, param in net._collect_params_with_prefix().items()}
    save(path, {name: array.as_in_context(mx.cpu()) for name, array in arrays.items()})


def _beside(folder: Path, what: str) -> Path:
    return folder.with_name(f".{folder.name}.{what}")

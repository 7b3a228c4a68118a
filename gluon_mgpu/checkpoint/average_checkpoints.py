"""The mean of the last checkpoints of a run, as a checkpoint of its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Optional, Sequence, Union

import mxnet as mx
import numpy as np

from ..checks import path_of, whole_number
from ..errors import StateError
from ..runtime.new_files import sync
from .replace_folder import explained, make, new_folder
from .rotation import INNER, checkpoint_in, find_checkpoints, outer_of
from .save_and_load import check_folder
from .snapshot import FILES, CheckpointData, Snapshot, read_content


def average_checkpoints(
    run: Union[str, Path, Sequence[Union[str, Path]]], *, last: Optional[int] = None, output: Union[None, str, Path] = None
) -> Path:
    """Average the weights of checkpoints of one run, save them as another checkpoint, and return its folder.

    The result has no optimizer state: `load_checkpoint` reads it without a trainer, and Gluon's `load_parameters` reads its
    `net.params`. The average of a translator's checkpoints is a translator: `load_translator` reads it. BatchNorm's running
    statistics are averaged like weights: call `update_bn` for those of the averaged weights. In a job, one process calls this.

    Parameters
    ----------
    run : str, pathlib.Path or list of them
        The folder of a `Checkpoint`, whose `last` and `step-...` are averaged; set `keep` there. Or the folders of checkpoints.
    last : int, optional
        Only so many of the latest ones of a run.
    output : str or pathlib.Path, optional
        By default the folder `average` of the run.

    Raises
    ------
    StateError
        There are fewer checkpoints than that, or fewer than two, or they are of different networks, or damaged.
    SaveError
        The folder cannot be written.

    Examples
    --------
    >>> import tempfile
    >>> import mxnet as mx
    >>> from gluon_mgpu import load_checkpoint, save_checkpoint
    >>> net = mx.gluon.nn.Dense(1, in_units=1, use_bias=False)
    >>> net.initialize()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for value in (1, 5):
    ...         net.weight.set_data(mx.nd.array([[value]]))
    ...         save_checkpoint(f"{folder}/{value}", net)
    ...     average = average_checkpoints([folder + "/1", folder + "/5"], output=folder + "/average")
    ...     _ = load_checkpoint(average, net)
    >>> net.weight.data().asnumpy().item()
    3.0

    Source: checkpoint averaging as in Vaswani et al., "Attention Is All You Need", 2017, section 6.1.
    """
    if last is not None:
        whole_number("average_checkpoints", "last", last, low=2, advice="5 are usual.")
    if isinstance(run, (str, Path)):
        folder = path_of("average_checkpoints", "run", run)
        paths = [path for path in find_checkpoints(folder) if outer_of(path) != folder / "best"]
    else:
        paths = [checkpoint_in(Path(path)) or Path(path) for path in run]
    if len(paths) < (last or 2):
        raise StateError(
            f"average_checkpoints: got {len(paths)} checkpoints in {run}; expected {last or '2 or more'}. Train with "
            f"Checkpoint(folder, keep={last or 5}), or --keep {last or 5}."
        )
    outer = outer_of(paths[0])
    target = outer.parent / "average" if output is None else path_of("average_checkpoints", "output", output)
    is_part = outer != paths[0]  # of a translator, whose other files do not change
    others = [path for path in outer.iterdir() if is_part and path.is_file() and not path.is_symlink()]
    check_folder(target, [INNER, *(path.name for path in others)] if is_part else FILES, "average_checkpoints", "average")
    snapshot = _mean([read_content(path, with_training=False) for path in paths[:last]])
    with explained("average_checkpoints", target), new_folder(target) as new:
        for path in others:
            shutil.copyfile(path, new / path.name)
            sync(new / path.name)
        inner = new / INNER if is_part else new
        make(inner)
        snapshot.write(inner)
    return target


def _mean(contents: Sequence[CheckpointData]) -> Snapshot:
    """Return the mean of floating-point parameters, computed in float64, and the latest of others."""
    latest = contents[0]
    forms = [{name: (array.shape, np.dtype(array.dtype)) for name, array in one.params.items()} for one in contents]
    for one, form in zip(contents, forms):
        if form != forms[0]:
            names = sorted(name for name in {**form, **forms[0]} if form.get(name) != forms[0].get(name))
            raise StateError(
                f"average_checkpoints: got {one.folder} with another {names[0]} than {latest.folder}; expected checkpoints of "
                "one network. Pass the folder of one run."
            )
    params = dict(latest.params)
    for name, array in latest.params.items():
        if np.issubdtype(np.dtype(array.dtype), np.floating):
            mean = np.mean([one.params[name].asnumpy() for one in contents], axis=0, dtype="float64")
            params[name] = mx.nd.array(mean, dtype=array.dtype)
    progress = {**latest.progress, "averaged": [str(one.folder) for one in contents]}
    return Snapshot(params, json.dumps(progress, indent=1), is_np=latest.is_np)

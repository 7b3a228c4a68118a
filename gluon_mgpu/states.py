"""Files of optimizer states: with the parameters' names and shapes, for any number of devices."""

from __future__ import annotations

import os
import pickle
import re
from itertools import zip_longest
from typing import Any, Dict, List, Optional, Tuple

from mxnet import optimizer as opt

from .errors import StateError
from .nested import is_device_array
from .parameters import shape_fits
from .replicas import Replicas
from .update import Update, filled

_FORMAT = "gluon_mgpu.Trainer"

Content = Dict[str, Any]


def write_states(
    fname: str, replicas: Replicas, optimizer: opt.Optimizer, update: Update, loss_scaler: Optional[Dict[str, float]] = None
) -> None:
    """Write an optimizer, its states and update counts.

    The file is written beside and renamed, so that a file of this name is always whole. It waits for the devices.
    """
    content = {
        "format": _FORMAT,
        "version": 1,
        "names": replicas.names,
        "structural": replicas.structural,
        "shapes": [param.shape for param in replicas.params],
        "optimizer": pickle.dumps(optimizer),
        "states": {index: _to_numpy(state) for index, state in update.states().items()},
        "counts": update.counts(),
        "loss_scaler": loss_scaler,
    }
    beside = f"{fname}.{os.getpid()}.new"
    try:
        with open(beside, "wb") as file:
            pickle.dump(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, fname)
    except BaseException:
        if os.path.exists(beside):
            os.unlink(beside)
        raise


def read_states(fname: str, replicas: Replicas, optimizer: opt.Optimizer) -> Tuple[Content, opt.Optimizer]:
    """Return the content of a file and its optimizer, having checked that they belong to this network and optimizer.

    A file of `gluon.Trainer` is read in Gluon's order (names sorted as strings); only its shapes can be checked.

    Raises
    ------
    StateError
        They do not, or the file is something else.
    """
    content = _read(fname, replicas)
    found = pickle.loads(content["optimizer"]) if content["optimizer"] else optimizer
    if type(found) is not type(optimizer):
        raise StateError(
            f"load_states: got {fname} of optimizer {type(found).__name__} for a trainer with "
            f"{type(optimizer).__name__}; need the same. Make the trainer with the optimizer of the file."
        )
    return content, found


def states_on(replicas: Replicas, optimizer: opt.Optimizer, states: Dict[int, Any], fname: str) -> List[Dict[int, Any]]:
    """Return the states of a file on each device: made afresh, with the values of the file.

    Raises
    ------
    StateError
        They do not fit the parameters.
    """
    on_devices: List[Dict[int, Any]] = [{} for _ in replicas.contexts]
    for index, value in states.items():
        name, param = replicas.names[index], replicas.params[index]
        if param._data is None:
            raise StateError(
                f"load_states: got {name} without a shape yet; need values on the devices. Pass one batch through the network."
            )
        for context, restored in zip(replicas.contexts, on_devices):
            state = optimizer.create_state_multi_precision(index, param.data(context).as_nd_ndarray())
            restored[index] = filled(state, value, f"{fname}, {name}")
    return on_devices


def _read(fname: str, replicas: Replicas) -> Content:
    try:
        with open(fname, "rb") as file:
            content = pickle.load(file)
    except OSError:
        raise
    except Exception as error:  # pickle raises whatever the damaged bytes happen to call
        raise StateError(
            f"load_states: got {fname}, which is damaged ({error}); need a file of save_states. Save it again."
        ) from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        return _from_gluon(fname, content, replicas)
    if content["version"] != 1:
        raise StateError(f"load_states: got {fname} of version {content['version']}; need version 1. Install a newer gluon_mgpu.")
    check_same(fname, content, replicas)
    return content


def check_same(fname: str, content: Content, replicas: Replicas, operation: str = "load_states") -> None:
    """Raise `StateError` unless the names and shapes of a file's parameters are those of this network, in its order."""
    # A parameter's own name counts the layers that were made before it: dense7_weight. Its last word does not.
    exact = replicas.structural and content["structural"]
    here = _described(replicas.names, [param.shape for param in replicas.params], exact)
    there = _described(content["names"], content["shapes"], exact)
    differing = [
        f"{_worded(theirs)} where this one has {_worded(mine)}"
        for mine, theirs in zip_longest(here, there)
        if not mine or not theirs or mine[0] != theirs[0] or not shape_fits(theirs[1], mine[1])
    ]
    if differing:
        raise StateError(
            f"{operation}: got {fname} of another network: {'; '.join(differing[:3])}; need the same parameters in the same "
            "order. Build the network as it was when it was saved."
        )


def _from_gluon(fname: str, content: Any, replicas: Replicas) -> Content:
    params = replicas.params
    states, optimizer = content if isinstance(content, tuple) and len(content) == 2 else (content, None)
    if not isinstance(states, dict) or not all(isinstance(key, int) and key < len(params) for key in states):
        raise StateError(f"load_states: got {fname}, which holds no trainer states; need a file of save_states. Save it again.")
    by_name = sorted(range(len(params)), key=lambda index: params[index].name)
    counts: Dict[int, int] = {}
    if optimizer is not None:
        all_counts = optimizer._all_index_update_counts.values()
        counts = max(all_counts, key=lambda one: max(one.values(), default=0), default={})
    return {
        "optimizer": pickle.dumps(optimizer) if optimizer is not None else b"",
        "states": {by_name[key]: _to_numpy(state) for key, state in states.items()},
        "counts": {by_name[key]: count for key, count in counts.items()},
    }


def _described(names: List[str], shapes: List[Any], exact: bool) -> List[Tuple[str, Tuple[int, ...]]]:
    told = names if exact else [re.split(r"[._]", name)[-1] for name in names]
    return [(name, tuple(shape or ())) for name, shape in zip(told, shapes)]


def _worded(described: Optional[Tuple[str, Tuple[int, ...]]]) -> str:
    return f"{described[0]} {described[1]}" if described else "nothing"


def _to_numpy(state: Any) -> Any:
    if is_device_array(state):
        return state.asnumpy()
    return type(state)(_to_numpy(item) for item in state) if isinstance(state, (list, tuple)) else state

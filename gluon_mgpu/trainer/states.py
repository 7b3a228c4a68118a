"""Files of optimizer states for any number of devices, with names and shapes of the parameters. Gluon also reads them.

```
1st pickle   (states, optimizer), as gluon.Trainer.save_states writes them, by position in Gluon's order; it reads only this one
2nd pickle   names, shapes, order, counts, loss scale
```
"""

from __future__ import annotations

import io
import os
import pickle
import re
import warnings
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import optimizer as opt

from ..checks import is_whole, short
from ..errors import StateError
from ..nested import is_device_array, leaves
from .layout import Layout
from .optimizer_config import Description, class_name, failure, is_known, with_values
from .parameters import shape_fits
from .update import State, Update, filled

_FORMAT, _VERSION = "gluon_mgpu.Trainer", 1
_NUM_DEVICES = 16  # Gluon counts updates by device number: for a number that the file lacks, it starts at 0
_ADVICE = "Use another file, or save it again"
_SHOWN = 120  # characters of another library's error

StateData = Dict[str, Any]


@dataclass(frozen=True)
class TrainerState:
    """What a trainer holds in addition to the weights: values for JSON, except for the arrays of the optimizer.

    Attributes
    ----------
    names, shapes : list
        Of its parameters.
    structural : bool
        Whether the names are structural.
    order : list of int
        The positions of the parameters in Gluon's order.
    states, counts : dict
        By position of the parameter: the optimizer's state, and the number of updates.
    optimizer : dict
        See `optimizer_config.describe`.
    loss_scaler, virtual_shards : dict, optional
    """

    names: List[str]
    structural: bool
    shapes: List[Any]
    order: List[int]
    states: Dict[int, State]
    counts: Dict[int, int]
    optimizer: Description
    loss_scaler: Optional[Dict[str, float]] = None
    virtual_shards: Optional[Dict[str, Any]] = None


def write_states(
    fname: str, layout: Layout, optimizer: opt.Optimizer, update: Update, loss_scaler: Optional[Dict[str, float]] = None
) -> None:
    """Write an optimizer, its states and update counts.

    A temporary file next to the target is renamed, so the target is always complete. It waits for the devices.
    """
    counts, rank = update.counts(), {index: place for place, index in enumerate(update.order)}
    content = {
        "format": _FORMAT,
        "version": _VERSION,
        "names": layout.names,
        "structural": layout.structural,
        "shapes": [param.shape for param in layout.params],
        "order": update.order,
        "counts": counts,
        "loss_scaler": loss_scaler,
    }
    states = {rank[index]: _to_pickle(state) for index, state in update.states().items()}
    numbered = _numbered(optimizer, counts, rank)
    temporary = f"{fname}.{os.getpid()}.new"
    try:
        with open(temporary, "wb") as file:
            pickle.dump((dict(sorted(states.items())), numbered), file)
            pickle.dump(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, fname)
    except BaseException:
        with suppress(OSError, ValueError):  # the first error counts
            os.unlink(temporary)
        raise


def read_states(fname: str, layout: Layout, optimizer: opt.Optimizer, order: Sequence[int]) -> Tuple[StateData, opt.Optimizer]:
    """Return the content of a file and its optimizer, having checked that they belong to this network and optimizer.

    A file of `gluon.Trainer` is read in Gluon's order, which is `order`; only its shapes can be checked.

    Raises
    ------
    StateError
        They do not, or the file is something else.
    """
    content = _read(fname, layout, order)
    found = content["optimizer"] or optimizer
    if type(found) is not type(optimizer):
        raise StateError(
            f"load_states: got {fname} of optimizer {type(found).__name__} for a trainer with "
            f"{type(optimizer).__name__}; expected the same. Make the trainer with the optimizer of the file."
        )
    broken = failure(found, content["counts"])
    if broken:
        raise StateError(
            f"load_states: got {fname} of an optimizer that cannot train ({broken}); expected an undamaged one. {_ADVICE}."
        )
    check_counts(fname, content["states"], content["counts"], layout, found)
    return content, found


def states_on(
    layout: Layout,
    optimizer: opt.Optimizer,
    states: Dict[int, Any],
    fname: str,
    shapes: Optional[Mapping[int, Sequence[int]]] = None,
) -> List[Dict[int, Any]]:
    """Return newly created states on each device, or on the parameter's owner, with the values of a file.

    Parameters
    ----------
    shapes : mapping of int to shape, optional
        Of parameters that have no values yet.

    Raises
    ------
    StateError
        The states do not fit the parameters.
    """
    most_copies = max(len(param.list_ctx()) for param in layout.params)
    on_devices: List[Dict[int, Any]] = [{} for _ in range(most_copies)]
    for index, value in states.items():
        name, param = layout.names[index], layout.params[index]
        if param._data is None and index not in (shapes or {}):
            raise StateError(
                f"load_states: got {name} without a shape yet; expected values on the devices. Pass one batch through the "
                "network."
            )
        owner = (layout.owner_of(index) or 0) if layout.is_sharded else None
        for replica, (context, restored) in enumerate(zip(param.list_ctx(), on_devices)):
            if owner not in (None, replica):
                continue
            if param._data is None:
                weight = mx.nd.zeros(shapes[index], ctx=context, dtype=param.dtype)  # type: ignore[index]
            else:
                weight = param.data(context).as_nd_ndarray()
            restored[index] = filled(optimizer.create_state_multi_precision(index, weight), value, f"{fname}, {name}")
    return on_devices


def check_state(
    state: TrainerState,
    source: Any,
    operation: str,
    layout: Layout,
    optimizer: opt.Optimizer,
    shapes: Optional[Mapping[int, Sequence[int]]],
) -> None:
    """Raise `StateError`, or another exception for damaged values, unless a state belongs to this network and optimizer."""
    check_same(str(source), vars(state), layout, operation)
    saved_class = state.optimizer["class"]
    if saved_class != class_name(optimizer):
        raise StateError(
            f"{operation}: got {source} of a trainer with {short(saved_class)} where this one has "
            f"{class_name(optimizer)}, with MXNet {mx.__version__}; expected the same class. Make the trainer with the optimizer "
            "of the checkpoint, or load the network alone: load_checkpoint(folder, net)."
        )
    check_counts(str(source), state.states, state.counts, layout, optimizer, operation)
    by_index = {i: shapes[id(param)] for i, param in enumerate(layout.params) if id(param) in shapes} if shapes else None
    found = states_on(layout, optimizer, state.states, str(source), by_index)
    for index, saved in state.states.items():
        fresh = next(one[index] for one in found if index in one)
        for (_, mine), (_, theirs) in zip(leaves(fresh), leaves(saved)):
            if is_device_array(mine) and theirs.dtype != np.dtype(mine.dtype):
                raise TypeError(f"{theirs.dtype} instead of {np.dtype(mine.dtype)}")
    if not is_whole(state.optimizer["values"].get("num_update", 0)):
        raise ValueError("num_update is not a whole number")
    broken = failure(with_values(state.optimizer, optimizer), state.counts)
    if broken:
        raise ValueError(f"optimizer: {broken}")
    if sorted(state.order) != list(range(len(state.names))):
        raise ValueError("order is no permutation")


def _read(fname: str, layout: Layout, order: Sequence[int]) -> StateData:
    with open(fname, "rb") as file:
        pickled = io.BytesIO(file.read())
    first = _unpickled(fname, lambda: pickle.load(pickled))
    rest = pickled.read()
    content = _unpickled(fname, lambda: pickle.loads(rest)) if rest else None
    if content is None:
        return _numbered_states(fname, first, order)
    if not _is_ours(content):
        raise StateError(
            f"load_states: got {fname}, which contains no trainer states; expected a file of save_states. Save it again."
        )
    if content.get("version") != _VERSION:
        found = f"{fname} of version {short(content.get('version'))}; expected version {_VERSION}"
        raise StateError(f"load_states: got {found}. Install a newer gluon_mgpu.")
    check_same(fname, content, layout)
    own_order = content["order"]
    if sorted(own_order) != list(range(len(layout.params))):
        raise StateError(
            f"load_states: got {fname} with an order of {len(own_order)} numbers; expected each of 0 to "
            f"{len(layout.params) - 1} once. {_ADVICE}."
        )
    return {**content, **_numbered_states(fname, first, own_order, content["counts"])}


def _is_ours(content: Any) -> bool:
    return isinstance(content, dict) and isinstance(content.get("format"), str) and content["format"] == _FORMAT


def _unpickled(fname: str, load: Callable[[], Any]) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # damaged bytes may call code that warns
            return load()
    except Exception as error:  # damaged bytes may raise any exception
        reason = " ".join(str(error).split())[:_SHOWN]
        raise StateError(
            f"load_states: got {fname}, which is damaged ({type(error).__name__}: {reason}); expected a file of save_states. "
            f"{_ADVICE}."
        ) from error


def check_counts(
    fname: str,
    states: Mapping[int, Any],
    counts: Mapping[int, Any],
    layout: Layout,
    optimizer: opt.Optimizer,
    operation: str = "load_states",
) -> None:
    """Raise `StateError` unless states and counts belong to existing parameters, and to the same ones."""
    known = set(range(len(layout.params)))
    strange, alone = sorted({*states, *counts} - known), sorted({*states} ^ {*counts})
    if strange:
        found, expected = f"parameter {short(strange[0])}", f"parameters of 0 to {len(known) - 1}"
    elif counts and alone and is_known(optimizer):  # other classes may count differently
        found, expected = f"a state or a count of {layout.names[alone[0]]}, and not both", "both for the same parameters"
    else:
        return
    raise StateError(f"{operation}: got {fname} with {found}; expected {expected}. {_ADVICE}.")


def check_same(fname: str, content: StateData, layout: Layout, operation: str = "load_states") -> None:
    """Raise `StateError` unless a file's parameters have the names and shapes of this network, in its order."""
    # A parameter's own name counts the layers before it: dense7_weight. Its last word does not.
    exact = layout.structural and content["structural"]
    here = _names_and_shapes(layout.names, [param.shape for param in layout.params], exact)
    there = _names_and_shapes(content["names"], content["shapes"], exact)
    differing = [
        f"{_in_words(theirs)} where this one has {_in_words(mine)}"
        for mine, theirs in zip_longest(here, there)
        if not mine or not theirs or mine[0] != theirs[0] or not shape_fits(theirs[1], mine[1])
    ]
    if differing:
        raise StateError(
            f"{operation}: got {fname} of another network: {'; '.join(differing[:3])}; expected the same parameters in the same "
            "order. Build the same network as when the file was saved."
        )


def _numbered_states(fname: str, content: Any, order: Sequence[int], counts: Optional[Dict[int, int]] = None) -> StateData:
    """Return the content of a `gluon.Trainer`'s file by position in the network; `order` holds the position of each number."""
    states, optimizer = content if isinstance(content, tuple) and len(content) == 2 else (content, None)
    known = isinstance(states, dict) and all(is_whole(key) and 0 <= key < len(order) for key in states)
    if not known or not (optimizer is None or isinstance(optimizer, opt.Optimizer)):
        raise StateError(
            f"load_states: got {fname}, which contains no trainer states; expected a file of save_states. Save it again."
        )
    if optimizer is not None:
        by_device: Dict[int, Dict[int, int]] = getattr(optimizer, "_all_index_update_counts", {})
        latest: Dict[int, int] = max(by_device.values(), key=lambda one: max(one.values(), default=0), default={})
        numbered = dict(enumerate(order))
        found = optimizer
        optimizer = _unpickled(fname, lambda: _numbered(found, latest, numbered))
        if counts is None:
            begin = getattr(optimizer, "begin_num_update", 0)
            counts = {order[key]: latest.get(key, begin) for key in states}
    return {
        "optimizer": optimizer,
        "states": {order[key]: _to_numpy(state) for key, state in states.items()},
        "counts": counts or {},
    }


def _numbered(optimizer: opt.Optimizer, counts: Mapping[int, int], numbers: Mapping[int, int]) -> opt.Optimizer:
    """Return a copy of an optimizer with other numbers of the parameters, in its counts and in the sums of LBSGD."""
    copied = pickle.loads(pickle.dumps(optimizer))
    counts = {numbers[index]: count for index, count in sorted(counts.items())}
    copied._all_index_update_counts = {device: dict(counts) for device in range(_NUM_DEVICES)}
    copied._index_update_count = copied._all_index_update_counts[0]
    vars(copied).pop("allow_np_array", None)  # Gluon then uses the mode of the reading program
    if isinstance(getattr(copied, "cumgrads", None), dict):
        copied.cumgrads = {numbers[index]: sums for index, sums in copied.cumgrads.items()}
    return copied


class _Pickled:
    """An array that unpickles as an MXNet array in the mode of the reading program, also without GPUs."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __reduce__(self) -> Tuple[Any, ...]:
        return mx.nd.array, (self.values, None, self.values.dtype)


def _to_pickle(state: Any) -> Any:
    if is_device_array(state):
        return _Pickled(state.asnumpy())
    return type(state)(_to_pickle(item) for item in state) if isinstance(state, (list, tuple)) else state


def _names_and_shapes(names: List[str], shapes: List[Any], exact: bool) -> List[Tuple[str, Tuple[int, ...]]]:
    compared = names if exact else [re.split(r"[._]", name)[-1] for name in names]
    return [(name, tuple(shape or ())) for name, shape in zip(compared, shapes)]


def _in_words(described: Optional[Tuple[str, Tuple[int, ...]]]) -> str:
    if not described:
        return "nothing"
    name, shape = described
    name = name if re.fullmatch(r"[\w.]{1,100}", name) else short(name)
    return f"{name} {shape if len(shape) <= 8 else f'of {len(shape)} dimensions'}"


def _to_numpy(state: Any) -> Any:
    if is_device_array(state):
        return state.asnumpy()
    return type(state)(_to_numpy(item) for item in state) if isinstance(state, (list, tuple)) else state

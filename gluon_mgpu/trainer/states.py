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
from itertools import zip_longest
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import optimizer as opt

from .. import schema
from ..errors import StateError
from ..nested import is_device_array
from . import loss_scaler
from .optimizer_config import failure, is_known, misfit, plain_attributes
from .parameters import shape_fits
from .replicas import Replicas
from .update import Update, filled

_FORMAT = "gluon_mgpu.Trainer"
_NUM_DEVICES = 16  # Gluon counts updates by device number: for a number that the file lacks, it starts at 0
_ADVICE = "Use another file, or save it again"
_SHOWN = 120  # characters of another library's error

StateData = Dict[str, Any]


def write_states(
    fname: str, replicas: Replicas, optimizer: opt.Optimizer, update: Update, loss_scaler: Optional[Dict[str, float]] = None
) -> None:
    """Write an optimizer, its states and update counts.

    A temporary file next to the target is renamed, so the target is always complete. It waits for the devices.
    """
    counts, rank = update.counts(), {index: place for place, index in enumerate(update.order)}
    content = {
        "format": _FORMAT,
        "version": 2,
        "names": replicas.names,
        "structural": replicas.structural,
        "shapes": [param.shape for param in replicas.params],
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


def read_states(
    fname: str, replicas: Replicas, optimizer: opt.Optimizer, order: Sequence[int]
) -> Tuple[StateData, opt.Optimizer]:
    """Return the content of a file and its optimizer, having checked that they belong to this network and optimizer.

    A file of `gluon.Trainer` is read in Gluon's order, which is `order`; only its shapes can be checked.

    Raises
    ------
    StateError
        They do not, or the file is something else.
    """
    content = _read(fname, replicas, order)
    found = content["optimizer"] or optimizer
    if type(found) is not type(optimizer):
        raise StateError(
            f"load_states: got {fname} of optimizer {type(found).__name__} for a trainer with "
            f"{type(optimizer).__name__}; expected the same. Make the trainer with the optimizer of the file."
        )
    _check_optimizer(fname, found, optimizer, content["counts"])
    check_counts(fname, content["states"], content["counts"], replicas, found)
    return content, found


def states_on(
    replicas: Replicas,
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
    most_copies = max(len(param.list_ctx()) for param in replicas.params)
    on_devices: List[Dict[int, Any]] = [{} for _ in range(most_copies)]
    for index, value in states.items():
        name, param = replicas.names[index], replicas.params[index]
        if param._data is None and index not in (shapes or {}):
            raise StateError(
                f"load_states: got {name} without a shape yet; expected values on the devices. Pass one batch through the "
                "network."
            )
        owner = (replicas.owner_of(index) or 0) if replicas.is_sharded else None
        for replica, (context, restored) in enumerate(zip(param.list_ctx(), on_devices)):
            if owner not in (None, replica):
                continue
            if param._data is None:
                weight = mx.nd.zeros(shapes[index], ctx=context, dtype=param.dtype)  # type: ignore[index]
            else:
                weight = param.data(context).as_nd_ndarray()
            restored[index] = filled(optimizer.create_state_multi_precision(index, weight), value, f"{fname}, {name}")
    return on_devices


def _read(fname: str, replicas: Replicas, order: Sequence[int]) -> StateData:
    with open(fname, "rb") as file:
        pickled = io.BytesIO(file.read())
    first = _unpickled(fname, lambda: pickle.load(pickled))
    rest = pickled.read()
    content = _unpickled(fname, lambda: pickle.loads(rest)) if rest else None
    if _is_ours(first):  # version 1: all in one
        content = first
    elif content is None:
        return _numbered_states(fname, first, order)
    if not _is_ours(content):
        raise StateError(
            f"load_states: got {fname}, which contains no trainer states; expected a file of save_states. Save it again."
        )
    if schema.is_whole(content.get("version")) and content["version"] > 2:
        found = f"{fname} of version {content['version']}; expected version 1 or 2"
        raise StateError(f"load_states: got {found}. Install a newer gluon_mgpu.")
    schema.check(CONTENT_1 if content is first else CONTENT, content, operation="load_states", file=fname, advice=_ADVICE)
    if content is first:
        first = content["states"], _unpickled(fname, lambda: pickle.loads(content["optimizer"]))
    check_same(fname, content, replicas)
    own_order = content.get("order", range(len(replicas.params)))
    if sorted(own_order) != list(range(len(replicas.params))):
        raise StateError(
            f"load_states: got {fname} with an order of {len(own_order)} numbers; expected each of 0 to "
            f"{len(replicas.params) - 1} once. {_ADVICE}."
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


def _check_optimizer(fname: str, found: opt.Optimizer, optimizer: opt.Optimizer, counts: Dict[int, int]) -> None:
    """Raise `StateError` unless the optimizer of a file has the attributes of its class, of the same kinds, and can train."""
    mine, theirs = plain_attributes(optimizer), plain_attributes(found)
    wrong = misfit(mine, theirs, optimizer)
    if wrong is not None:
        raise StateError(f"load_states: got {fname} {wrong.below('optimizer').message()}; expected {wrong.expected}. {_ADVICE}.")
    broken = failure(found, counts)
    if broken:
        raise StateError(
            f"load_states: got {fname} of an optimizer that cannot train ({broken}); expected an undamaged one. {_ADVICE}."
        )


def check_counts(
    fname: str,
    states: Mapping[int, Any],
    counts: Mapping[int, Any],
    replicas: Replicas,
    optimizer: opt.Optimizer,
    operation: str = "load_states",
) -> None:
    """Raise `StateError` unless states and counts belong to existing parameters, and to the same ones."""
    known = set(range(len(replicas.params)))
    strange, alone = sorted({*states, *counts} - known), sorted({*states} ^ {*counts})
    if strange:
        found, expected = f"parameter {schema.shown(strange[0])}", f"parameters of 0 to {len(known) - 1}"
    elif counts and alone and is_known(optimizer):  # other classes may count differently
        found, expected = f"a state or a count of {replicas.names[alone[0]]}, and not both", "both for the same parameters"
    else:
        return
    raise StateError(f"{operation}: got {fname} with {found}; expected {expected}. {_ADVICE}.")


def check_same(fname: str, content: StateData, replicas: Replicas, operation: str = "load_states") -> None:
    """Raise `StateError` unless a file's parameters have the names and shapes of this network, in its order."""
    # A parameter's own name counts the layers before it: dense7_weight. Its last word does not.
    exact = replicas.structural and content["structural"]
    here = _names_and_shapes(replicas.names, [param.shape for param in replicas.params], exact)
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
    known = isinstance(states, dict) and all(schema.is_whole(key) and 0 <= key < len(order) for key in states)
    if not known or not (optimizer is None or isinstance(optimizer, opt.Optimizer)):
        raise StateError(
            f"load_states: got {fname}, which contains no trainer states; expected a file of save_states. Save it again."
        )
    if optimizer is not None:
        by_device = getattr(optimizer, "_all_index_update_counts", None)
        numbers = schema.mapping(schema.anything, schema.mapping(_number_below(len(order)), schema.steps()))
        schema.check(numbers, by_device, operation="load_states", file=f"{fname}, the optimizer's counts", advice=_ADVICE)
        latest: Dict[int, int] = max(by_device.values(), key=lambda one: max(one.values(), default=0), default={})  # type: ignore[union-attr]
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
    name = name if re.fullmatch(r"[\w.]{1,100}", name) else schema.shown(name)
    return f"{name} {shape if len(shape) <= 8 else f'of {len(shape)} dimensions'}"


def _to_numpy(state: Any) -> Any:
    if is_device_array(state):
        return state.asnumpy()
    return type(state)(_to_numpy(item) for item in state) if isinstance(state, (list, tuple)) else state


def _number_below(count: int) -> schema.Schema:
    return schema.that(f"the number of one of {count} parameters", lambda key: schema.is_whole(key) and 0 <= key < count)


_INDEX = schema.that("the number of a parameter", lambda key: schema.is_whole(key) and key >= 0)
SHAPE = schema.nullable(schema.list_of(schema.integer(-1)))
_BOTH = {
    "format": schema.constant(_FORMAT),
    "names": schema.list_of(schema.text()),
    "structural": schema.constant(True, False),
    "shapes": schema.list_of(SHAPE),
    "counts": schema.mapping(_INDEX, schema.steps()),
    "loss_scaler": schema.nullable(loss_scaler.STATE),
}
CONTENT = schema.record({**_BOTH, "version": schema.constant(2), "order": schema.list_of(schema.integer(0))}, closed=False)
CONTENT_1 = schema.record(
    {
        **_BOTH,
        "version": schema.constant(1),
        "optimizer": schema.that("a pickled optimizer", lambda value: isinstance(value, bytes) and len(value) > 0),
        "states": schema.mapping(_INDEX, schema.anything),  # checked against newly created states
    },
    closed=False,
)

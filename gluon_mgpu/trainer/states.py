"""What a trainer holds in addition to the weights: values for JSON and arrays, in checkpoints and in files of `save_states`."""

from __future__ import annotations

import copy
import io
import json
import math
import re
import zipfile
from dataclasses import dataclass, fields
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO, Dict, List, Mapping, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import optimizer as opt

from ..checks import reason_of, short
from ..errors import StateError
from ..nested import Array, is_device_array
from ..runtime.new_files import new_file
from ..runtime.untrusted_files import COUNT, MEMORY, check_form, open_regular, values_of
from .layout import Layout
from .optimizer_config import FORM as OPTIMIZER
from .optimizer_config import Description, check_described, class_name, is_known
from .parameters import shape_fits
from .update import State, states_on

STATE = "state/"  # begins the names of the optimizer's states among the arrays
FORM = {  # of the values of `as_values`
    "names": [str],
    "structural": bool,
    "shapes": [(None, [range(-1, 2**31)])],
    "order": [COUNT],
    "states": {"*": object},
    "counts": {"*": COUNT},
    "optimizer": OPTIMIZER,
    "loss_scaler": (None, {"scale": float, "num_good": COUNT}),
    "virtual_shards": (None, {"number": COUNT, "base": (None, COUNT), "batches": COUNT}),
}
_VALUES = "trainer.json"  # the entry of a file of states that holds all but the arrays
_VERSION = 1
_NPY = re.compile(  # the beginning of an array as `write_arrays` writes it
    rb"\x93NUMPY\x01\x00..\{'descr': (?:'[<|]([biuf]\d)'|\[\('bfloat16', '<(u2)'\)\]), 'fortran_order': False, "
    rb"'shape': \(((?:\d{1,10}, ?)*\d{0,10})\), \} *\n",
    re.DOTALL,
)


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


def as_values(state: TrainerState, arrays: Dict[str, Array]) -> Dict[str, Any]:
    """Return a trainer's state as values for JSON, and add copies of its arrays to `arrays`."""
    return {**vars(state), "states": {index: _form(one, f"{STATE}{index}", arrays) for index, one in state.states.items()}}


def from_values(values: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> TrainerState:
    """Return a trainer's state, of NumPy arrays, from values that `as_values` has returned.

    Raises
    ------
    ValueError, TypeError, LookupError
        The values are others, or there are other arrays.
    """
    kept = {field.name: values[field.name] for field in fields(TrainerState)}
    check_form(kept, FORM, "the trainer's state")
    others = dict(arrays)
    kept["states"] = {int(index): _state(form, others) for index, form in values["states"].items()}
    if others:
        raise ValueError(f"the array {short(min(others))}, which is not a state")
    kept["counts"] = {int(index): count for index, count in values["counts"].items()}
    return TrainerState(**kept)


def write_arrays(file: BinaryIO, arrays: Mapping[str, Any]) -> None:
    """Write arrays, MXNet's or NumPy's, as `numpy.savez` does; equal arrays give equal files."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            values = array.asnumpy() if is_device_array(array) else array
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, values, allow_pickle=False)  # type: ignore[no-untyped-call]


def read_arrays(file: BinaryIO) -> Dict[str, np.ndarray]:
    """Return the arrays of a file of `write_arrays`. What it says of sizes is checked before memory is taken.

    Raises
    ------
    Exception
        The file is damaged, or anything else, such as one with compressed arrays. Damaged bytes may raise any exception.

    Source: NEP 1, "A simple file format for NumPy arrays".
    """
    arrays: Dict[str, np.ndarray] = {}
    num_bytes = file.seek(0, io.SEEK_END)
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        if any(one.compress_type or one.compress_size != one.file_size for one in entries):
            raise ValueError("arrays that are compressed")
        if sum(one.file_size for one in entries) > num_bytes or len({one.filename for one in entries}) < len(entries):
            raise ValueError("arrays that overlap or repeat")
        for one in entries:
            entry = archive.read(one)
            found = _NPY.match(entry)
            if found is None or found.end() != 10 + int.from_bytes(entry[8:10], "little") or one.filename[-4:] != ".npy":
                raise ValueError(f"{short(one.filename)}, which is not an array of numbers")
            kind = np.dtype(found[1].decode()) if found[1] else np.dtype([("bfloat16", np.uint16)])
            shape = tuple(int(size) for size in found[3].split(b",") if size.strip())
            if len(entry) - found.end() != math.prod(shape) * kind.itemsize:
                raise ValueError(f"{short(one.filename)} of another size than its shape {shape}")
            arrays[one.filename[:-4]] = np.ndarray(shape, kind, entry, found.end()).copy()
    return arrays


def write_states(fname: str, state: TrainerState) -> None:
    """Write a state: the file is always complete."""
    arrays: Dict[str, Any] = {}
    values = json.dumps({**as_values(state, arrays), "version": _VERSION})
    arrays[_VALUES] = np.frombuffer(values.encode(), np.uint8)
    with new_file(Path(fname)) as path, open(path, "wb") as file:
        write_arrays(file, arrays)


def read_states(fname: str) -> TrainerState:
    """Return the state in a file of `save_states`; see `check_state`.

    Raises
    ------
    StateError
        The file is damaged, or something else.
    """
    try:
        with open_regular(fname, MEMORY, follow=True) as file:
            arrays = read_arrays(file)
        values = values_of(arrays.pop(_VALUES).tobytes(), {"version": COUNT, "*": object}, _VALUES)
        if values["version"] == _VERSION:
            return from_values(values, arrays)
    except (FileNotFoundError, PermissionError):
        raise
    except Exception as error:  # damaged bytes may raise any exception
        raise StateError(
            f"load_states: got {fname}, which is damaged or no file of Trainer.save_states ({reason_of(error)}); expected an "
            "undamaged one. Save it again, or load the weights alone. Those of gluon.Trainer name no parameters."
        ) from error
    found = f"{fname} of version {short(values['version'])}; expected version {_VERSION}"
    raise StateError(f"load_states: got {found}. Install a newer gluon_mgpu.")


def check_state(
    state: TrainerState,
    source: Any,
    operation: str,
    layout: Layout,
    optimizer: opt.Optimizer,
    shapes: Optional[Mapping[int, Sequence[int]]],
    parts: Sequence[Tuple[Any, Any]],
) -> None:
    """Raise `StateError` unless a state belongs to this network and optimizer, and is not damaged.

    `parts`: of the trainer, each with its state.
    """
    try:
        _check_same(str(source), state, layout, operation)
        saved_class = state.optimizer["class"]
        if saved_class != class_name(optimizer):
            raise StateError(
                f"{operation}: got {source} of a trainer with {short(saved_class)} where this one has {class_name(optimizer)}, "
                f"with MXNet {mx.__version__}; expected the same class. Make the trainer with the optimizer of the file, or load "
                "the network alone: load_checkpoint(net, folder)."
            )
        _check_counts(state, layout, optimizer)
        states_on(layout, optimizer, state.states, str(source), shapes or {})
        check_described(state.optimizer, optimizer, max(state.counts.values(), default=0))
        if sorted(state.order) != list(range(len(state.names))):
            raise ValueError("order is not a permutation")
        for part, saved in parts:
            copy.copy(part).restore(saved)
    except StateError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise StateError(
            f"{operation}: got {source}, which is damaged ({type(error).__name__}: {reason_of(error)}); expected an undamaged "
            "one. Use another file, or save it again."
        ) from error


def _check_counts(state: TrainerState, layout: Layout, optimizer: opt.Optimizer) -> None:
    """Raise `ValueError` unless states and counts belong to existing parameters, and to the same ones."""
    strange = {*state.states, *state.counts}.difference(range(len(layout.params)))
    if strange:
        raise ValueError(f"a state or a count of parameter {short(min(strange))}, of {len(layout.params)}")
    alone = {*state.states} ^ {*state.counts}
    if state.counts and alone and is_known(optimizer):  # other classes may count differently
        raise ValueError(f"a state or a count of {layout.names[min(alone)]}, and not both")


def _check_same(fname: str, state: TrainerState, layout: Layout, operation: str) -> None:
    """Raise `StateError` unless a file's parameters have the names and shapes of this network, in its order."""
    # A parameter's own name counts the layers before it: dense7_weight. Its last word does not.
    exact = layout.structural and state.structural
    here = _names_and_shapes(layout.names, [param.shape for param in layout.params], exact)
    there = _names_and_shapes(state.names, state.shapes, exact)
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


def _form(state: Any, name: str, arrays: Dict[str, Array]) -> Any:
    """Return an optimizer's state of a parameter as values for JSON, and add copies of its arrays to `arrays`."""
    if is_device_array(state):
        arrays[name] = state.as_nd_ndarray().copy()
        return {"array": name}
    if isinstance(state, (list, tuple)):
        return [_form(one, f"{name}/{i}", arrays) for i, one in enumerate(state)]
    if state is None or isinstance(state, (bool, int, float, str)):
        return state
    raise StateError(
        f"save_checkpoint: got {type(state).__name__} as an optimizer's state; expected arrays and numbers. Use another "
        "optimizer, or save the network alone."
    )


def _state(form: Any, arrays: Dict[str, np.ndarray]) -> Any:
    """Return an optimizer's state of a parameter from a result of `_form`; take its arrays from `arrays`."""
    if isinstance(form, dict):
        return arrays.pop(form["array"])
    return tuple(_state(one, arrays) for one in form) if isinstance(form, list) else form


def _names_and_shapes(names: List[str], shapes: List[Any], exact: bool) -> List[Tuple[str, Tuple[int, ...]]]:
    compared = names if exact else [re.split(r"[._]", name)[-1] for name in names]
    return [(name, tuple(shape or ())) for name, shape in zip(compared, shapes)]


def _in_words(described: Optional[Tuple[str, Tuple[int, ...]]]) -> str:
    return f"{short(described[0])} {short(described[1])}" if described else "nothing"

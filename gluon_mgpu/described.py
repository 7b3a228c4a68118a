"""An optimizer and its schedule as plain values: described, compared with another's, and set again."""

from __future__ import annotations

import inspect
import re
from typing import Any, Dict, List, Set

import numpy as np
from mxnet import lr_scheduler
from mxnet import optimizer as opt

from .errors import StateError

# What Trainer and Update set, or what names things of this run: counts are kept with the states, by the parameters' names.
_NOT_KEPT = {"param_dict", "_all_index_update_counts", "_index_update_count", "idx2name", "sym_info", "rescale_grad"}
_NOT_KEPT |= {"aggregate_num", "allow_np_array", "lr_scheduler"}
_MOVED_BY_SCHEDULES = {"base_lr", "count", "cur_step_ind"}  # in MXNet's own; all else is what they were made with

Description = Dict[str, Any]


def describe(optimizer: opt.Optimizer) -> Description:
    """Return an optimizer's hyper-parameters and counts, and its schedule's, in a form that JSON holds.

    Raises
    ------
    StateError
        One of them is no number, text, or list of such.

    Examples
    --------
    >>> described = describe(opt.SGD(learning_rate=0.5, momentum=0.9))
    >>> described["class"], described["values"]["momentum"], described["schedule"]
    ('mxnet.optimizer.optimizer.SGD', 0.9, None)
    """
    return {**_described(optimizer, _NOT_KEPT), "schedule": _described(optimizer.lr_scheduler, set())}


def differences(told: Description, optimizer: opt.Optimizer) -> List[str]:
    """Return in words where an optimizer is made otherwise than the described one; [] where training can go on with it.

    What moves while training may differ: the learning rate, counts, and where a schedule is. Of classes that are neither MXNet's
    nor ours, nothing but the class is compared.

    Examples
    --------
    >>> differences(describe(opt.SGD(momentum=0.9)), opt.SGD(momentum=0.5, learning_rate=2.0))
    ['momentum 0.9 where this one has 0.5']
    """
    here, found = describe(optimizer), []
    pairs = [(told, here, _options(optimizer), "")]
    if (told["schedule"] is None) != (here["schedule"] is None):
        found.append(f"{_class_name(told['schedule'])} as its schedule where this one has {_class_name(here['schedule'])}")
    elif told["schedule"] is not None:
        pairs.append((told["schedule"], here["schedule"], _options(optimizer.lr_scheduler), "schedule's "))
    for theirs, mine, options, of in pairs:
        if theirs["class"] != mine["class"]:
            found.append(f"{of}{_class_name(theirs)} where this one has {_class_name(mine)}")
            continue
        values = [(name, theirs["values"].get(name), mine["values"][name]) for name in mine["values"] if name in options]
        found += [f"{of}{name} {_told(one)} where this one has {_told(other)}" for name, one, other in values if one != other]
    return found


def set_again(told: Description, optimizer: opt.Optimizer) -> None:
    """Set an optimizer's values, and its schedule's, to those that were described. Both stay the objects that they are."""
    for values, thing in ((told["values"], optimizer), ((told["schedule"] or {}).get("values", {}), optimizer.lr_scheduler)):
        for name, value in values.items():
            if re.fullmatch(r"(?!__)\w+", name) and not callable(getattr(type(thing), name, None)):
                setattr(thing, name, _value(value))


def _described(thing: Any, left_out: Set[str]) -> Any:
    if thing is None:
        return None
    values = {}
    for name, value in getattr(thing, "__dict__", {}).items():
        if name not in left_out:
            try:
                values[name] = _plain(value)
            except TypeError:
                raise StateError(
                    f"save_checkpoint: got {name} of type {type(value).__name__} in {type(thing).__name__}; need numbers, texts, "
                    "and lists of them, which files can hold without executing anything. Train with another optimizer or "
                    "schedule, or save the network alone."
                ) from None
    return {"class": f"{type(thing).__module__}.{type(thing).__qualname__}", "values": values}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (np.bool_, np.integer, np.floating)):
        return value.item()
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, tuple):
        return {"tuple": [_plain(one) for one in value]}
    if isinstance(value, dict):
        return {"dict": [[_plain(key), _plain(one)] for key, one in value.items()]}
    raise TypeError


def _value(plain: Any) -> Any:
    if isinstance(plain, dict):
        ((kind, items),) = plain.items()
        values = [_value(item) for item in items]
        return tuple(values) if kind == "tuple" else dict(values)
    return [_value(one) for one in plain] if isinstance(plain, list) else plain


def _options(thing: Any) -> Set[str]:
    """Return the attributes that say how something was made: of MXNet's classes and ours, whose ways are known."""
    kinds = type(thing).__mro__
    if isinstance(thing, lr_scheduler.LRScheduler):
        return set(vars(thing)) - _MOVED_BY_SCHEDULES if kinds[0].__module__ == lr_scheduler.__name__ else set()
    if not isinstance(thing, opt.Optimizer) or kinds[0].__module__.split(".")[0] not in ("mxnet", "gluon_mgpu"):
        return set()
    return {name for kind in kinds if "__init__" in vars(kind) for name in inspect.signature(vars(kind)["__init__"]).parameters}


def _class_name(described: Any) -> str:
    return str(described["class"]).rsplit(".", 1)[-1] if described else "none"


def _told(value: Any) -> str:
    return repr(_value(value))

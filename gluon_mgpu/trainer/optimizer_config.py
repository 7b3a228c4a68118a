"""What training changes in an optimizer and its schedule, as plain values: described and restored."""

from __future__ import annotations

import copy
import inspect
import math
import re
from typing import Any, Dict, Set, Tuple

import numpy as np
from mxnet import lr_scheduler
from mxnet import optimizer as opt

from ..checks import is_number
from ..errors import StateError
from ..mxnet_internals.optimizers import COUNTS
from ..mxnet_internals.versions import LBSGD
from ..runtime.untrusted_files import check_form

# Set by Trainer and Update, or names of this run: counts are saved with the states, by the parameters' names.
_NOT_KEPT = {"param_dict", *COUNTS, "idx2name", "sym_info", "rescale_grad"}
_NOT_KEPT |= {"aggregate_num", "allow_np_array", "lr_scheduler"}
_NOT_KEPT |= {"lr", "lr_mult", "wd_mult"}  # options, under other names than the constructors' arguments
_MOVED_BY_SCHEDULES = {"base_lr", "count", "cur_step_ind"}  # by MXNet's schedules; other attributes are their arguments
_MOVED_BY_OPTIMIZERS = {"num_update", "m_schedule", "last_lr", "cur_lr"}  # by MXNet's: Nadam's schedule, rates of LARS

_FARTHEST = 2**20  # between the updates of the optimizer and of its parameters: MXNet's schedules count up to them one by one

Description = Dict[str, Any]
_DESCRIBED = {"class": str, "values": {"num_update?": range(2**31), "*": object}}
FORM = {  # of a description
    **_DESCRIBED,
    "learning_rate": (None, lambda rate: is_number(rate) and abs(rate) < 3.4e38),  # a float32
    "schedule": (None, _DESCRIBED),
}


def describe(optimizer: opt.Optimizer) -> Description:
    """Return the classes of an optimizer and its schedule, its learning rate, and what else training changes in them.

    The other options belong to the program, and so does the schedule: MXNet's find their position by the number of updates. Of
    the user's own classes, all attributes that are no arguments of a constructor count as changed by training.

    Raises
    ------
    StateError
        A value is not a number, a text, or a list, tuple or dict of them; or the optimizer holds sums of gradients.

    Examples
    --------
    >>> describe(opt.SGD(learning_rate=0.5, momentum=0.9))["values"], describe(opt.SGD(learning_rate=0.5))["learning_rate"]
    ({'num_update': 0}, 0.5)
    """
    if isinstance(optimizer, LBSGD):
        raise StateError(
            "save_states: got LBSGD, which holds sums of gradients outside of its states; expected an optimizer whose states are "
            "all that it holds. Use lars, and accumulate() for large batches."
        )
    rate = None if optimizer.lr_scheduler is not None else _plain(optimizer.lr)
    return {**_described(optimizer), "learning_rate": rate, "schedule": _described(optimizer.lr_scheduler)}


def options_of(optimizer: opt.Optimizer) -> Dict[str, Any]:
    """Return the classes of an optimizer and its schedule, and their numbers and texts as they are now.

    Examples
    --------
    >>> options = options_of(opt.SGD(learning_rate=0.5, momentum=0.9))
    >>> options["learning_rate"], options["momentum"], options["wd"]
    (0.5, 0.9, 0.0)
    """
    found = {"optimizer": class_name(optimizer), "learning_rate": optimizer.lr}
    for thing, prefix in ((optimizer, ""), (optimizer.lr_scheduler, "lr_scheduler.")):
        for name, value in vars(thing).items() if thing is not None else ():
            if isinstance(value, (bool, int, float, str, list, type(None))) and name not in _NOT_KEPT:
                found[prefix + name] = value
    return found


def restore_optimizer(
    saved: Description, optimizer: opt.Optimizer, at_first: Tuple[Any, Any] = (None, None), *, learning_rate: bool = True
) -> None:
    """Set the values of an optimizer, and of its schedule if it is of the same class. Both stay the same objects.

    `at_first` is the optimizer's schedule with a copy from before the first update: MXNet's find only later positions by the
    number of updates. A schedule that the program has not changed since goes back. Without `learning_rate`, the optimizer keeps
    its own.
    """
    schedule, first = at_first
    if is_known(schedule) and schedule is optimizer.lr_scheduler:
        replayed = copy.copy(first)
        replayed(optimizer.num_update)
        if vars(replayed) == vars(schedule):
            schedule.__dict__.update(vars(first))
    _restore(saved["values"], optimizer)
    schedule = saved["schedule"]
    if schedule and optimizer.lr_scheduler is not None and schedule["class"] == class_name(optimizer.lr_scheduler):
        _restore(schedule["values"], optimizer.lr_scheduler)
    if is_known(optimizer.lr_scheduler):  # go to its place; behind its end, MXNet's keep the rate that they had last
        optimizer.lr_scheduler(min(optimizer.num_update, getattr(optimizer.lr_scheduler, "max_update", math.inf)))
    if learning_rate and optimizer.lr_scheduler is None and saved["learning_rate"] is not None:
        optimizer.set_learning_rate(saved["learning_rate"])


def check_described(saved: Description, optimizer: opt.Optimizer, num_updates: int) -> None:
    """Raise an error unless `restore_optimizer` can take a description, after so many updates of a parameter.

    It is restored in a copy. The error is any that Python raises for wrong values.
    """
    if abs(saved["values"].get("num_update", num_updates) - max(num_updates, optimizer.begin_num_update)) > _FARTHEST:
        raise ValueError(f"num_update={saved['values']['num_update']} after {num_updates} updates")
    trial = copy.copy(optimizer)
    trial.lr_scheduler = copy.copy(optimizer.lr_scheduler)
    restore_optimizer(saved, trial)


def class_name(thing: Any) -> str:
    """Return the name of an object's class, with its module."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _restore(values: Dict[str, Any], thing: Any) -> None:
    """Set attributes that training changes; raise `ValueError` for another value than a number where there is or must be one."""
    known, moved = is_known(thing), _moved(thing)
    allowed = moved if known else set(values) - _NOT_KEPT - (_arguments(thing) - moved)
    for name in sorted(allowed & set(values)):
        value, was_number = _value(values[name]), is_number(getattr(thing, name, None))
        if known or was_number:
            number = float if known else is_number
            check_form(value, number if known and was_number else (None, number), name)
        if re.fullmatch(r"(?!__)\w+", name) and not callable(getattr(type(thing), name, None)):
            setattr(thing, name, value)


def _described(thing: Any) -> Any:
    if thing is None:
        return None
    values, moved = {}, _moved(thing)
    for name in sorted(set(vars(thing)) - _NOT_KEPT - (_arguments(thing) - moved)):  # arguments belong to the program
        try:
            values[name] = _plain(vars(thing)[name])
        except TypeError:
            raise StateError(
                f"Trainer: got {name} of type {type(vars(thing)[name]).__name__} in {type(thing).__name__}; expected "
                "numbers, strings and lists of them, which can be read without executing code. Train with another optimizer or "
                "schedule, or save only the network."
            ) from None
    return {"class": class_name(thing), "values": {name: value for name, value in values.items() if name in moved}}


def _moved(thing: Any) -> Set[str]:
    """Return the names of the attributes that training changes."""
    is_schedule = isinstance(thing, lr_scheduler.LRScheduler)
    if is_known(thing):
        return set() if is_schedule else _MOVED_BY_OPTIMIZERS
    return set(vars(thing)) - _NOT_KEPT - _arguments(thing) | (_MOVED_BY_SCHEDULES if is_schedule else set())


def _arguments(thing: Any) -> Set[str]:
    """Return the names of the arguments of an object's constructors."""
    made = [vars(kind)["__init__"] for kind in type(thing).__mro__ if inspect.isfunction(vars(kind).get("__init__"))]
    return {name for one in made for name in inspect.signature(one).parameters}


def is_known(thing: Any) -> bool:
    """Return whether this is an optimizer or a schedule of MXNet or of this package."""
    return type(thing).__module__.split(".")[0] in ("mxnet", "gluon_mgpu")


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

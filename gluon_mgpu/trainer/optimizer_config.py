"""An optimizer and its schedule as plain values: described, compared and restored."""

from __future__ import annotations

import copy
import difflib
import inspect
import re
from typing import Any, Dict, List, Mapping, Optional, Set

import mxnet as mx
import numpy as np
from mxnet import lr_scheduler
from mxnet import optimizer as opt

from .. import schema
from ..checks import short
from ..errors import StateError, TrainerError
from ..moved import current_class
from ..runtime.mxnet2 import update_one

_SHOWN = 60  # characters of an option in an error
_MOST_CAUGHT_UP = 10**6  # steps that a schedule counts one by one, in about a second
# Set by Trainer and Update, or names of this run: counts are saved with the states, by the parameters' names.
_NOT_KEPT = {"param_dict", "_all_index_update_counts", "_index_update_count", "idx2name", "sym_info", "rescale_grad"}
_NOT_KEPT |= {"aggregate_num", "allow_np_array", "lr_scheduler"}
_MOVED_BY_SCHEDULES = {"base_lr", "count", "cur_step_ind"}  # by MXNet's schedules; other attributes are their arguments
_LENGTHS = {"max_update", "max_steps", "step", "warmup_steps"}  # options of MXNet's schedules that follow the number of epochs
_MOVED_BY_OPTIMIZERS = {"num_update", "m_schedule"}  # m_schedule is Nadam's
_OTHER_NAMES = {"lr": "learning_rate", "weight_decay": "wd", "eps": "epsilon", "betas": "beta1"}
_SET_BY_TRAINERS = {"begin_num_update", "param_dict", "param_idx2name", "rescale_grad", "sym"}  # accepted, but not proposed

Description = Dict[str, Any]


def describe(optimizer: opt.Optimizer) -> Description:
    """Return an optimizer's hyper-parameters and counts, and its schedule's, as values for JSON.

    Raises
    ------
    StateError
        A value is not a number, a text, or a list of them.

    Examples
    --------
    >>> described = describe(opt.SGD(learning_rate=0.5, momentum=0.9))
    >>> described["class"], described["values"]["momentum"], described["schedule"]
    ('mxnet.optimizer.optimizer.SGD', 0.9, None)
    """
    return {**_described(optimizer, _NOT_KEPT), "schedule": _described(optimizer.lr_scheduler, set())}


def differences(saved: Description, optimizer: opt.Optimizer, *, lengths: bool = True) -> List[str]:
    """Return, in words, how an optimizer differs from a described one; [] if training can continue with it.

    Values that change in training may differ: the learning rate, counts, and the position of a schedule. Without `lengths`, so
    may the numbers of updates over which a schedule runs. For classes that are neither MXNet's nor ours, only the class is
    compared.

    Examples
    --------
    >>> differences(describe(opt.SGD(momentum=0.9)), opt.SGD(momentum=0.5, learning_rate=2.0))
    ['momentum 0.9 where this one has 0.5']
    """
    here, found = describe(optimizer), []
    pairs = [(saved, here, _options(optimizer), "")]
    if (saved["schedule"] is None) != (here["schedule"] is None):
        found.append(f"{_class_name(saved['schedule'])} as its schedule where this one has {_class_name(here['schedule'])}")
    elif saved["schedule"] is not None:
        options = _options(optimizer.lr_scheduler) - (set() if lengths else _LENGTHS)
        pairs.append((saved["schedule"], here["schedule"], options, "schedule's "))
    for theirs, mine, options, of in pairs:
        if current_class(theirs["class"]) != mine["class"]:
            found.append(f"{of}{_class_name(theirs)} where this one has {_class_name(mine)}")
            continue
        values = [(name, theirs["values"].get(name), mine["values"][name]) for name in mine["values"] if name in options]
        found += [f"{of}{name} {_shown(one)} where this one has {_shown(other)}" for name, one, other in values if one != other]
    return found


def other_class(saved: Description, optimizer: opt.Optimizer) -> List[str]:
    """Return, in words, that a described optimizer is of another class; [] if it is of the same one."""
    mine = {"class": f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"}
    is_same = current_class(saved["class"]) == mine["class"]
    return [] if is_same else [f"{_class_name(saved)} where this one has {_class_name(mine)}"]


def is_of_other_mxnet(saved: Description, optimizer: opt.Optimizer) -> bool:
    """Return whether a described optimizer is the same one in another version of MXNet, where it has other attributes.

    Examples
    --------
    >>> is_of_other_mxnet({"class": "mxnet.optimizer.adam.Adam"}, opt.Adam())
    True
    """
    saved_module, _, saved_name = saved["class"].rpartition(".")
    module, name = type(optimizer).__module__, type(optimizer).__qualname__
    return saved_name == name and saved_module != module and {saved_module[:6], module[:6]} == {"mxnet."}


def without_hyperparameters(described: Description, optimizer: opt.Optimizer) -> Description:
    """Return the values of a description that training changes by itself: no learning rate, and no option.

    Of a schedule, these are its `moved` values if this optimizer's schedule is of the same class. MXNet's schedules find their
    position by the number of updates.

    Examples
    --------
    >>> without_hyperparameters(describe(opt.SGD(momentum=0.9)), opt.SGD())["values"]
    {'num_update': 0}
    """
    values = {name: value for name, value in described["values"].items() if name in _MOVED_BY_OPTIMIZERS}
    return {**without_schedule(described, optimizer), "values": values}


def without_schedule(described: Description, optimizer: opt.Optimizer) -> Description:
    """Return a description without the options of its schedule: this optimizer's own then follows the number of updates.

    Examples
    --------
    >>> schedule = lr_scheduler.CosineScheduler(max_update=8)
    >>> without_schedule(describe(opt.SGD(lr_scheduler=schedule)), opt.SGD(lr_scheduler=schedule))["schedule"]["values"]
    {}
    """
    schedule, mine = described["schedule"], _described(optimizer.lr_scheduler, set())
    if schedule is None or mine is None or current_class(schedule["class"]) != mine["class"]:
        return {**described, "schedule": None}
    names = getattr(optimizer.lr_scheduler, "moved", ())
    moved = {name: value for name, value in schedule["values"].items() if name in names}
    return {**described, "schedule": {**schedule, "values": moved}}


def misfit(mine: Mapping[str, Any], theirs: Mapping[str, Any], thing: Any, *, exact: bool = False) -> Optional[schema.Wrong]:
    """Return the first plain value of another that cannot replace that of this optimizer or schedule; None if all can.

    Parameters
    ----------
    mine, theirs : mapping
        Attributes by name, as `describe` returns them.
    thing : mxnet.optimizer.Optimizer or schedule
        Their target. For classes that are neither MXNet's nor ours, more is accepted.
    exact : bool
        Reject names that this one does not have.
    """
    known, defaults = is_known(thing), _mxnets_defaults(thing)
    for name in mine:
        if name not in theirs and (known or name in defaults or name in _attributes(thing)):
            return schema.Wrong(None, "it", (name,), is_missing=True)
    for name, value in theirs.items():
        if exact and name not in mine and (known or not _is_free(thing, name)):
            return schema.Wrong(value, f"no attributes but those of {type(thing).__name__}", (name,))
        if name in _attributes(thing):
            wrong = _attributes(thing)[name](value)
        elif value is None and defaults.get(name) is not None:
            wrong = schema.Wrong(value, _kind(mine.get(name)))
        else:
            wrong = _unlike(mine[name], value, known) if name in mine else None
        if wrong is not None:
            return wrong.below(name)
    return None


def plain_attributes(thing: Any) -> Dict[str, Any]:
    """Return the attributes of an optimizer as `describe` returns them; of other attributes, the name of their class.

    Examples
    --------
    >>> plain_attributes(opt.SGD(momentum=0.5))["momentum"]
    0.5
    """
    found = {}
    for name, value in vars(thing).items():
        if name not in ("param_dict", "lr_scheduler", "sym_info", "allow_np_array"):
            try:
                found[name] = _plain(value)
            except (TypeError, RecursionError):
                found[name] = {type(value).__name__: None}
    return found


def failure(optimizer: opt.Optimizer, counts: Mapping[int, int]) -> str:
    """Return, in words, why an optimizer cannot train; "" if it can. A copy of it updates an array of one element.

    Parameters
    ----------
    optimizer : mxnet.optimizer.Optimizer
        Not changed. For classes that are neither MXNet's nor ours, only the schedule is tried.
    counts : mapping of int to int
        The number of updates of each parameter.

    Examples
    --------
    >>> failure(opt.SGD(momentum=0.9), {0: 7})
    ''
    >>> broken = opt.SGD(momentum=0.9)
    >>> broken.momentum = "0.9"
    >>> failure(broken, {0: 7})
    'TypeError'
    """
    try:
        schedule = optimizer.lr_scheduler
        if schedule is not None and not callable(schedule):
            return "its schedule is not a function"
        if isinstance(schedule, lr_scheduler.FactorScheduler):
            behind = (optimizer.num_update - schedule.count) / schedule.step
            if not (schedule.step >= 1 and behind <= _MOST_CAUGHT_UP):
                return f"its schedule is {behind:.3g} steps behind"
        if isinstance(schedule, lr_scheduler.LRScheduler) and not schema.is_finite(copy.deepcopy(schedule)(optimizer.num_update)):
            return "its schedule returns no finite number"
        # SGLD draws random numbers, and LBSGD adds up whole gradients.
        if is_known(optimizer) and not isinstance(optimizer, (opt.SGLD, opt.LBSGD)):
            tried = copy.deepcopy(optimizer)
            tried._all_index_update_counts = {0: dict(counts)}
            tried._set_current_context(0)
            for index in counts:
                weight, gradient = mx.nd.zeros((1, 1)), mx.nd.zeros((1, 1))  # GroupAdaGrad takes rows only
                update_one(tried, index, weight, gradient, tried.create_state_multi_precision(index, weight))
                weight.wait_to_read()
    except Exception as error:  # its arithmetic, or MXNet's operators, may raise any exception
        return type(error).__name__
    return ""


def with_values(saved: Description, optimizer: opt.Optimizer) -> opt.Optimizer:
    """Return a copy of an optimizer, and of its schedule, with the described values."""
    other = copy.copy(optimizer)
    if isinstance(other.lr_scheduler, lr_scheduler.LRScheduler):
        other.lr_scheduler = copy.copy(optimizer.lr_scheduler)
        restore_optimizer(saved, other)
    else:
        restore_optimizer({**saved, "schedule": None}, other)  # a function is not copied
    return other


def restore_optimizer(saved: Description, optimizer: opt.Optimizer) -> None:
    """Set an optimizer's values, and its schedule's, to the described ones. Both stay the same objects."""
    for values, thing in ((saved["values"], optimizer), ((saved["schedule"] or {}).get("values", {}), optimizer.lr_scheduler)):
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
                    f"save_checkpoint: got {name} of type {type(value).__name__} in {type(thing).__name__}; expected "
                    "numbers, texts "
                    "and lists of them, which can be read without executing code. Train with another optimizer or "
                    "schedule, or save only the network."
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
    """Return the attributes that hold the arguments of an optimizer or schedule of MXNet or of this package."""
    kinds = type(thing).__mro__
    if not is_known(thing):
        return set()
    if isinstance(thing, lr_scheduler.LRScheduler):
        return set(vars(thing)) - _MOVED_BY_SCHEDULES - set(getattr(thing, "moved", ()))
    return {name for kind in kinds if "__init__" in vars(kind) for name in inspect.signature(vars(kind)["__init__"]).parameters}


def is_known(thing: Any) -> bool:
    """Return whether this is an optimizer or a schedule of MXNet or of this package."""
    is_one = isinstance(thing, (opt.Optimizer, lr_scheduler.LRScheduler))
    return is_one and type(thing).__module__.split(".")[0] in ("mxnet", "gluon_mgpu")


def _is_free(thing: Any, name: str) -> bool:
    """Return whether a missing attribute of this name may appear while it trains."""
    return bool(re.fullmatch(r"(?!__)\w+", name)) and name not in _NOT_KEPT and not hasattr(type(thing), name)


def _unlike(mine: Any, theirs: Any, known: bool) -> Optional[schema.Wrong]:
    """Return what is wrong with a value that replaces another: they must be of one kind."""
    if mine is None or theirs is None:
        fits = not known or theirs is None or schema.is_finite(theirs)
        return None if fits else schema.Wrong(theirs, "null or a finite number")
    if not known and isinstance(mine, (bool, int, float)) and isinstance(theirs, (bool, int, float)):
        return None
    if isinstance(mine, bool) or isinstance(theirs, bool):
        return None if isinstance(mine, bool) and isinstance(theirs, bool) else schema.Wrong(theirs, _kind(mine))
    if isinstance(mine, (int, float)):
        return None if schema.is_finite(theirs) or repr(mine) == repr(theirs) else schema.Wrong(theirs, "a finite number")
    alike = type(mine) is type(theirs) and (not isinstance(mine, dict) or mine.keys() == theirs.keys())
    return None if alike else schema.Wrong(theirs, _kind(mine))


def _kind(value: Any) -> str:
    if isinstance(value, dict):
        return f"a {next(iter(value))}"
    return {bool: "true or false", str: "a text", list: "a list"}.get(type(value), "a finite number")


def _class_name(described: Any) -> str:
    if not described:
        return "none"
    name = described["class"].rsplit(".", 1)[-1]
    return name if re.fullmatch(r"\w{1,60}", name) else schema.shown(name)


def _shown(value: Any) -> str:
    text = repr(_value(value))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _mxnets_defaults(thing: Any) -> Dict[str, Any]:
    """Return an optimizer's options from classes of MXNet and of this package, with defaults: a user may subclass them."""
    kinds = [kind for kind in type(thing).__mro__ if kind.__module__.split(".")[0] in ("mxnet", "gluon_mgpu")]
    made = [inspect.signature(vars(kind)["__init__"]).parameters for kind in reversed(kinds) if "__init__" in vars(kind)]
    return {name: one.default for found in made for name, one in found.items() if one.default is not one.empty}


def _attributes(thing: Any) -> Dict[str, schema.Schema]:
    """Return the schemas of attributes that every optimizer has, or MXNet's schedules and ours."""
    if isinstance(thing, opt.Optimizer):
        return _OF_OPTIMIZERS
    return _OF_SCHEDULES if is_known(thing) else {}


def _is_plain(value: Any) -> bool:
    return repr(_plain(_value(value))) == repr(value)


_VALUE = schema.that("a number, a text, true, false, null, or lists of them as they were saved", _is_plain)
_NAMED = {"class": schema.text(), "values": schema.mapping(schema.text(), _VALUE)}
DESCRIPTION = schema.record({**_NAMED, "schedule": schema.nullable(schema.record(_NAMED))})

_KEY = schema.that("a number or a name", lambda key: schema.is_whole(key) or isinstance(key, str))
_MULTIPLIERS = schema.record({"dict": schema.list_of(schema.items(_KEY, schema.number()))})
_OF_SCHEDULES: Dict[str, schema.Schema] = {
    "base_lr": schema.number(),
    "count": schema.steps(),
    "cur_step_ind": schema.steps(),
}
_OF_OPTIMIZERS: Dict[str, schema.Schema] = {
    "lr": schema.nullable(schema.number()),
    "wd": schema.number(),
    "clip_gradient": schema.nullable(schema.number()),
    "aggregate_num": schema.integer(0, 2**16),
    "idx2name": schema.record({"dict": schema.anything}),
    "num_update": schema.steps(),
    "begin_num_update": schema.steps(),
    "lr_mult": _MULTIPLIERS,
    "wd_mult": _MULTIPLIERS,
}


def check_hyperparameters(optimizer: str, params: Dict[str, Any]) -> None:
    """Raise `TrainerError` if an optimizer has no hyperparameters of these names."""
    kinds = opt.Optimizer.opt_registry[optimizer.lower()].__mro__[:-1]
    parameters = [one for kind in kinds for one in inspect.signature(kind.__init__).parameters.values()]
    known = {one.name for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)} - {"self"}
    for name in params:
        if name not in known:
            close = [_OTHER_NAMES[name]] if _OTHER_NAMES.get(name) in known else difflib.get_close_matches(name, sorted(known), 1)
            meant = f"Did you mean {close[0]}?" if close else "Leave it out."
            raise TrainerError(
                f"Trainer: got an unknown hyperparameter {short(name)} of {optimizer}; expected some of "
                f"{', '.join(sorted(known - _SET_BY_TRAINERS))}. {meant}"
            ) from None

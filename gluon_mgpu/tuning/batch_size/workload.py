"""A user's function, named so that another process finds it."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, Dict, Union

from mxnet import gluon

from ...data_parallel.step import train_batch
from ...errors import TrainerError

Workload = Union[str, Callable[..., Any]]

_FILE_MODULE = "gluon_mgpu_workload"  # not __main__, so that the script's main block does not run


@dataclass(frozen=True)
class Question:
    """The request to a probe's process, sent as JSON.

    Attributes
    ----------
    workload : str
        `module:function` or `path/to/file.py:function`.
    options : dict
        Keyword arguments of the function.
    devices : str
        As `use_devices` accepts them.
    batch_size : int
        0 only checks that the devices and the function exist.
    np : bool
        Whether to work in `npx.set_np()` mode.
    """

    workload: str
    options: Dict[str, Any]
    devices: str
    batch_size: int = 0
    np: bool = False


def reference_of(workload: Workload) -> str:
    """Return the name under which another process finds a function.

    Parameters
    ----------
    workload : str or callable
        `module:function`, `path/to/file.py:function`, or a function at the top level of a module or script.

    Raises
    ------
    TrainerError
        Another process cannot import it: a nested function, a lambda, a method, or a function typed into a notebook.

    Examples
    --------
    >>> reference_of(reference_of)
    'gluon_mgpu.tuning.batch_size.workload:reference_of'
    >>> reference_of("train:make")
    'train:make'
    >>> reference_of(lambda batch_size, ctx: None)
    Traceback (most recent call last):
    gluon_mgpu.errors.TrainerError: find_batch_size: got ...; expected a function that a new process can import. ...
    """
    if isinstance(workload, str):
        return _checked_form(workload)
    place, name = getattr(workload, "__module__", None) or "", getattr(workload, "__qualname__", "")
    found = getattr(sys.modules.get(place), name, None)
    place = _main_place() if place == "__main__" else place
    if not place or not callable(workload) or found is not workload:
        raise TrainerError(
            f"find_batch_size: got {name or repr(workload)}; expected a function that a new process can import. Put it at "
            "the top level of a file, such as workload.py, and pass 'workload.py:make'. Pass its arguments other than batch_size "
            "and ctx as options=."
        )
    return f"{place}:{name}"


def load_workload(question: Question) -> Callable[..., Any]:
    """Return the function of a question, after checking that it accepts the question's arguments.

    Raises
    ------
    TrainerError
        The file, module or function does not exist, or has other arguments.
    """
    place, _, name = question.workload.rpartition(":")
    module = _load_file(place) if place.endswith(".py") else _import_module(place)
    make = getattr(module, name, None)
    if not callable(make):
        raise TrainerError(f"find_batch_size: got {place}:{name}; expected a function {name} in {place}. Check its name.")
    try:
        inspect.signature(make).bind(1, [], **question.options)
    except TypeError as error:
        raise TrainerError(
            f"find_batch_size: got {place}:{name}, called with batch_size, ctx and the options {question.options}: {error}"
            f"; expected a function that accepts them. Write def {name}(batch_size, ctx)."
        ) from error
    return make  # type: ignore[no-any-return]


def step_of(made: Any, reference: str) -> Callable[[], Any]:
    """Return the training step, a function without arguments, from a workload's result: the step, or `train_batch`'s arguments.

    Raises
    ------
    TrainerError
        The result is neither.
    """
    if isinstance(made, tuple) and len(made) == 5:
        return partial(train_batch, *made)
    if callable(made) and not isinstance(made, gluon.Block):
        return made  # type: ignore[no-any-return]
    raise TrainerError(
        f"find_batch_size: got {type(made).__name__} from {reference}; expected a function without arguments that makes a "
        "step, or the arguments of train_batch. Return (net, loss, trainer, X, y)."
    )


def _checked_form(text: str) -> str:
    place, _, name = text.rpartition(":")
    if name.isidentifier() and place.endswith(".py"):
        return f"{os.path.abspath(place)}:{name}"
    if name.isidentifier() and all(part.isidentifier() for part in place.split(".")):
        return text
    raise TrainerError(
        f"find_batch_size: got {text!r} as the workload; expected 'module:function' or 'file.py:function'. "
        "The function takes batch_size and ctx, and returns the step."
    )


def _main_place() -> str:
    """Return the module or script from which the functions of `__main__` can be imported; "" for a notebook."""
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:  # python -m
        return str(spec.name)
    return os.path.abspath(file) if file and file.endswith(".py") and os.path.exists(file) else ""


def _load_file(path: str) -> Any:
    if not os.path.exists(path):
        raise TrainerError(f"find_batch_size: got {path}; expected a file that exists. Check its path.")
    sys.path.insert(0, os.path.dirname(path))  # as for a script that is run
    spec: Any = importlib.util.spec_from_file_location(_FILE_MODULE, path)
    module = sys.modules[_FILE_MODULE] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _import_module(name: str) -> Any:
    sys.path.append(os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists, but one of its imports does not
        raise TrainerError(
            f"find_batch_size: got {name}; expected a module that can be imported from {os.getcwd()}. "
            "Pass 'path/to/file.py:function' for a file elsewhere."
        ) from error

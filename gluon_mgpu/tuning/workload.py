"""A user's function, named so that another process finds it."""

from __future__ import annotations

import importlib.util
import os
import sys
from functools import partial
from typing import Any, Callable, Union

from mxnet import gluon

from ..data_parallel.step import train_batch
from ..errors import TrainerError

Workload = Union[str, Callable[..., Any]]

_FILE_MODULE = "gluon_mgpu_workload"  # not __main__, so that the script's main block does not run


def reference_of(operation: str, workload: Workload) -> str:
    """Return `module:function` or `/path/to/file.py:function`, under which another process finds a function.

    Examples
    --------
    >>> reference_of("agree", reference_of), reference_of("agree", "train:make")
    ('gluon_mgpu.tuning.workload:reference_of', 'train:make')
    """
    text = workload
    if callable(workload):
        place = getattr(workload, "__module__", "")
        place = getattr(sys.modules["__main__"], "__file__", "") if place == "__main__" else place
        text = f"{place}:{getattr(workload, '__qualname__', '')}"
    place, _, name = str(text).rpartition(":")
    if name.isidentifier() and place.endswith(".py"):
        return f"{os.path.abspath(place)}:{name}"
    if name.isidentifier() and all(part.isidentifier() for part in place.split(".")):
        return str(text)
    raise TrainerError(
        f"{operation}: got {text!r} as the workload; expected 'module:function', 'file.py:function', or a function at the top "
        "level of a module or script, which another process can import. It takes batch_size and ctx, and returns the step."
    )


def load_workload(operation: str, reference: str) -> Callable[..., Any]:
    """Return the function of a reference; raise `TrainerError` if there is none."""
    place, _, name = reference.rpartition(":")
    try:
        module = _import_file(operation, place) if place.endswith(".py") else _import_module(place)
    except ModuleNotFoundError as error:
        if not f"{place}.".startswith(f"{error.name}."):  # one that the user's module imports
            raise
        what = "a file that ends in .py" if os.path.exists(place) else "a module that Python finds here"
        raise TrainerError(f"{operation}: got {place}; expected {what}. Check its name, or pass FILE.py:{name}.") from None
    except (SyntaxError, ValueError) as error:
        if not isinstance(error, SyntaxError) and "null byte" not in str(error):  # what older Pythons say about binary files
            raise
        raise TrainerError(f"{operation}: got {place}: {error}; expected a Python program. Correct it.") from error
    make = getattr(module, name, None)
    if not callable(make):
        raise TrainerError(f"{operation}: got {reference}; expected a function {name} in {place}. Check its name.")
    return make  # type: ignore[no-any-return]


def _import_file(operation: str, path: str) -> Any:
    if not os.path.isfile(path):
        raise TrainerError(f"{operation}: got {path}; expected a file that exists. Check its path.")
    sys.path.insert(0, os.path.dirname(path))  # as for a script that is run
    spec: Any = importlib.util.spec_from_file_location(_FILE_MODULE, path)
    module = sys.modules[_FILE_MODULE] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _import_module(name: str) -> Any:
    sys.path.append(os.getcwd())
    return importlib.import_module(name)


def step_of(made: Any, reference: str) -> Callable[[], Any]:
    """Return the training step, a function without arguments, from a workload's result: it, or `train_batch`'s arguments."""
    if isinstance(made, tuple) and len(made) == 5:
        return partial(train_batch, *made)
    if callable(made) and not isinstance(made, gluon.Block):
        return made  # type: ignore[no-any-return]
    raise TrainerError(
        f"find_batch_size: got {type(made).__name__} from {reference}; expected a function without arguments that makes a "
        "step, or the arguments of train_batch. Return (net, loss, trainer, X, y)."
    )

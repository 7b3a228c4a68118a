"""Imports MXNet 1.9.1 with newer versions of Python and NumPy, which no longer have some names that MXNet reads.

NumPy has its former names only while `import mxnet` runs. None stays, so that `hasattr(np, "float_")` in a program or package is
right. What MXNet reads later becomes a global name of the modules of MXNet that read it:

| name | reason |
|---|---|
| NumPy, with `bool`, `int`, `Inf` and `compat` | NumPy 1.24 and 2.0 removed them |
| `str`, which writes an operator's arguments | NumPy 2 writes `[np.int64(6)]`, which MXNet's library refuses |
| NumPy and OpenCV, with arrays that have `tostring` | NumPy 2.3 removed it; `recordio` calls it |
| `multiprocessing`, with another `Pool` | Python 3.14 no longer forks: workers would not inherit these names |

`np.set_printoptions(legacy="1.25")` would also write `[6]`, but only in the thread that calls it, and in all that it prints.
"""

from __future__ import annotations

import re
import sys
import warnings
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType, SimpleNamespace
from typing import Any, Callable, Dict, Iterator, Optional

import numpy as np


def _financial(*_: Any, **__: Any) -> None:
    raise NotImplementedError(
        "mxnet.numpy: got a call of mirr, npv, pmt, ppmt, pv or rate; expected a function that NumPy has, which removed these. "
        "Use the package numpy_financial."
    )


# Source: mxnet 1.9.1, numpy/utils.py, numpy/fallback.py, numpy_dispatch_protocol.py, gluon/contrib/estimator/event_handler.py.
# MXNet keeps functions of NumPy as keys, so each former one is a function of its own.
_AT_IMPORT = {
    "bool": bool,
    **dict.fromkeys(("Inf", "PINF"), np.inf),
    **dict.fromkeys(("NaN", "NAN"), np.nan),
    **{"NINF": -np.inf, "PZERO": 0.0, "NZERO": -0.0},
    "alltrue": lambda *args, **options: np.all(*args, **options),
    "sometrue": lambda *args, **options: np.any(*args, **options),
    "product": lambda *args, **options: np.prod(*args, **options),
    "round_": lambda *args, **options: np.round(*args, **options),
    "trapz": lambda *args, **options: vars(np)["trapezoid"](*args, **options),
    "in1d": lambda ar1, *args, **options: np.isin(np.ravel(ar1), *args, **options),
    "msort": lambda a: np.sort(a, axis=0),
    **dict.fromkeys(("mirr", "npv", "pmt", "ppmt", "pv", "rate"), _financial),
}
_LATER = {"bool": bool, "int": int, "Inf": np.inf, "compat": SimpleNamespace(basestring=(str, bytes))}
_READERS = ("numpy.multiarray", "ndarray.numpy._op", "symbol.numpy._symbol", "test_utils")
_NUMBER = re.compile(r"\bnp\.(?:(True|False)_|(?:float|u?int|u?longlong)\d*\(([^()]*)\))")


class Finder:
    """Finds MXNet as Python does, and gives it a loader of ours. It is one of `sys.meta_path`."""

    @staticmethod
    def find_spec(name: str, path: Any = None, _target: Any = None) -> Optional[ModuleSpec]:
        """Return the specification of MXNet, None for every other module."""
        spec = PathFinder.find_spec(name, path) if name == "mxnet" else None
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        with _former_names(), warnings.catch_warnings():
            for category in (DeprecationWarning, SyntaxWarning):  # which -W error makes errors
                warnings.simplefilter("ignore", category)
            super().exec_module(module)
        _give_names()


@contextmanager
def _former_names() -> Iterator[None]:
    added = {name: value for name, value in _AT_IMPORT.items() if name not in vars(np)}
    vars(np).update(added)
    try:
        yield
    finally:
        for name, value in added.items():
            if vars(np).get(name) is value:
                delattr(np, name)


def _give_names() -> None:
    """Give MXNet's modules the global names that they read when they run."""
    numpy = _with(np, **{name: value for name, value in _LATER.items() if name not in vars(np)})
    for names in _names_of("gluon.contrib.estimator.event_handler", *_READERS):
        names.update({alias: numpy for alias, value in names.items() if value is np})
    if np.lib.NumpyVersion(np.__version__) >= "2.0.0":
        for names in _names_of("_ctypes.ndarray", "_ctypes.symbol", "symbol.symbol", "io.io"):
            names["str"] = as_text
    if not hasattr(np.ndarray, "tostring"):
        for names in _names_of("recordio"):
            names["np"] = _with(np, asarray=lambda *args, **options: np.asarray(*args, **options).view(_Bytes))
            if names["cv2"]:
                names["cv2"] = _with(names["cv2"], imencode=_encoder(names["cv2"]))
    if sys.version_info >= (3, 14):
        for names in _names_of("gluon.data.dataloader"):
            names["multiprocessing"] = _with(names["multiprocessing"], Pool=_pool)


def _names_of(*modules: str) -> Iterator[Dict[str, Any]]:
    """Yield the global names of these modules of MXNet. Other versions of MXNet lack some."""
    for name in modules:
        if f"mxnet.{name}" in sys.modules:
            yield vars(sys.modules[f"mxnet.{name}"])


def _with(module: ModuleType, **names: Any) -> ModuleType:
    """Return a module with the names of another one, and these."""
    made = ModuleType(module.__name__)
    vars(made).update(vars(module), **names)
    return made


class _Text:
    """Stands for `str` in MXNet's modules: numbers of NumPy become those that NumPy 1 wrote."""

    def __call__(self, value: Any) -> str:
        text = str(value)
        return _NUMBER.sub(r"\1\2", text) if "np." in text else text

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, str)


as_text = _Text()


class _Bytes(np.ndarray):
    """An array with the method that `recordio.pack` calls."""

    tostring = np.ndarray.tobytes


def _encoder(cv2: Any) -> Callable[..., Any]:
    def imencode(*args: Any) -> Any:
        done, buffer = cv2.imencode(*args)
        return done, buffer.view(_Bytes)

    return imencode


def _pool(*args: Any, **options: Any) -> Any:
    """Return a pool whose workers fork, as they did before Python 3.14, unless the program has chosen to spawn them."""
    import multiprocessing

    chosen = multiprocessing.get_start_method(allow_none=True)
    return multiprocessing.get_context("spawn" if chosen == "spawn" else "fork").Pool(*args, **options)

"""Checks of arguments, and how errors show an invalid value: in one line, never a whole array."""

from __future__ import annotations

import os
import reprlib
import sys
import traceback
from contextlib import contextmanager
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterator, Sequence, Tuple, Type

import numpy as np

from .errors import TrainerError, first_line, last_line
from .known_errors import advice_on

if TYPE_CHECKING:
    from typing_extensions import TypeGuard

MOST = 2**31 - 1  # the largest count: MXNet keeps sizes of one axis in 32 bits
MOST_SEED = 2**32 - 1  # the largest seed of NumPy's RandomState
_LENGTH = 120  # characters of a value in an error
_LINE = 180  # characters of MXNet's reason in an error
# What MXNet's Python code raises for arguments that it does not accept.
OF_WRONG_DATA = (ValueError, TypeError, AttributeError, AssertionError, IndexError, KeyError, RuntimeError)


def whole_number(
    operation: str, name: str, value: Any, *, low: int = 1, high: int = MOST, advice: str, error: Type[Exception] = TrainerError
) -> int:
    """Return a whole number from `low` to `high` as an int. True and 2.0 are not whole numbers here.

    Parameters
    ----------
    operation, name : str
        The operation and the argument, for the error.
    value : int or numpy integer
    low, high : int
    advice : str
        The error's last sentence: what to do.
    error : type
        The class of the error.

    Raises
    ------
    TrainerError, or `error`
        The value is something else.

    Examples
    --------
    >>> whole_number("fit", "epochs", 10, advice="10 are usual.")
    10
    >>> whole_number("fit", "epochs", 0.5, advice="10 are usual.")
    Traceback (most recent call last):
    gluon_mgpu.errors.TrainerError: fit: got epochs=0.5; expected a whole number of 1 or more. 10 are usual.
    """
    if not is_whole(value) or not low <= value <= high:
        most = f", at most {high}" if high != MOST or (is_whole(value) and value > high) else ""
        raise error(f"{operation}: got {_named(name, value)}; expected a whole number of {low} or more{most}. {advice}")
    return int(value)


def real_number(
    operation: str,
    name: str,
    value: Any,
    *,
    low: float = 0.0,
    high: float = sys.float_info.max,
    above: bool = False,
    below: bool = False,
    advice: str,
    error: Type[Exception] = TrainerError,
) -> float:
    """Return a finite number from `low` to `high` as a float; `above` and `below` exclude these bounds.

    Arguments and errors are those of `whole_number`.

    Examples
    --------
    >>> real_number("Trainer", "clip_norm", 0, above=True, advice="Pass None not to clip.")
    Traceback (most recent call last):
    gluon_mgpu.errors.TrainerError: Trainer: got clip_norm=0; expected a finite number above 0. Pass None not to clip.
    """
    number = value.item() if isinstance(value, np.floating) else value  # a float32 beside `high` would overflow
    if not is_number(number) or not low <= number <= high or (above and number == low) or (below and number == high):
        bound = f"above {low:g}" if above else f"of {low:g} or more"
        most = "" if high == sys.float_info.max else f" and below {high:g}" if below else f", at most {high:g}"
        raise error(f"{operation}: got {_named(name, value)}; expected a finite number {bound}{most}. {advice}")
    return float(number)


def one_of(
    operation: str, name: str, value: Any, choices: Sequence[Any], *, advice: str, error: Type[Exception] = TrainerError
) -> None:
    """Raise unless a value is one of the choices, which are strings or None.

    Examples
    --------
    >>> one_of("callbacks", "mode", "best", (None, "min", "max"), advice="None decides by the name.")
    Traceback (most recent call last):
    gluon_mgpu.errors.TrainerError: callbacks: got mode='best'; expected one of None, 'min', 'max'. None decides by the name.
    """
    if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
        raise error(f"{operation}: got {_named(name, value)}; expected one of {', '.join(map(repr, choices))}. {advice}")


def check_function(operation: str, name: str, value: Any, *, advice: str) -> None:
    """Raise unless a value can be called, and is not a class.

    Examples
    --------
    >>> check_function("fit", "loss", None, advice="Pass a loss of gluon.loss.")
    Traceback (most recent call last):
    gluon_mgpu.errors.TrainerError: fit: got loss=None; expected a function. Pass a loss of gluon.loss.
    """
    if not callable(value) or isinstance(value, type):
        raise TrainerError(f"{operation}: got {_named(name, value)}; expected a function. {advice}")


def texts_of(operation: str, name: str, texts: Any, *, error: Type[Exception] = TrainerError) -> Tuple[str, ...]:
    """Return an iterable of strings as a tuple; raise `error` for anything else."""
    try:
        found = tuple(texts) if not isinstance(texts, (str, dict)) else (None,)
    except TypeError:  # not an iterable, such as an array of no dimension
        found = (None,)
    if not all(isinstance(text, str) for text in found):
        raise error(f"{operation}: got {name}={short(texts)}; expected a list of strings. Pass for example ['one', 'two'].")
    return found


def path_of(operation: str, name: str, value: Any, *, error: Type[Exception] = TrainerError) -> Path:
    """Return a path as a `pathlib.Path`.

    Examples
    --------
    >>> path_of("save_checkpoint", "folder", None)
    Traceback (most recent call last):
    gluon_mgpu.errors.TrainerError: save_checkpoint: got folder=None; expected a path. Pass a str or a pathlib.Path.
    """
    try:
        if not isinstance(value, (str, os.PathLike)) or not value or b"\0" in os.fsencode(value):
            raise ValueError
        return Path(value)
    except (TypeError, ValueError):  # a PathLike of bytes, or characters that file names cannot hold
        raise error(f"{operation}: got {_named(name, value)}; expected a path. Pass a str or a pathlib.Path.") from None


def flag(operation: str, name: str, value: Any, *, error: Type[Exception] = TrainerError) -> bool:
    """Return a flag as a bool. It may be Python's or NumPy's bool, or an integer.

    Examples
    --------
    >>> flag("Trainer", "sharded_data", "no")
    Traceback (most recent call last):
    gluon_mgpu.errors.TrainerError: Trainer: got sharded_data='no'; expected True or False. Pass one of them.
    """
    if not isinstance(value, (bool, Integral)) and type(value).__name__ not in ("bool_", "bool"):
        raise error(f"{operation}: got {_named(name, value)}; expected True or False. Pass one of them.")
    return bool(value)


def instance(
    operation: str, name: str, value: Any, kind: Any, what: str, *, advice: str, error: Type[Exception] = TrainerError
) -> None:
    """Raise unless a value is of a type, or of one of several.

    Examples
    --------
    >>> instance("Progress", "unit", 5, str, "a text", advice="Pass for example 'images'.")
    Traceback (most recent call last):
    gluon_mgpu.errors.TrainerError: Progress: got unit=5; expected a text. Pass for example 'images'.
    """
    if not isinstance(value, kind):
        raise error(f"{operation}: got {_named(name, value)}; expected {what}. {advice}")


@contextmanager
def explaining(operation: str, what: str, expected: str, *, advice: str, error: Type[Exception] = TrainerError) -> Iterator[None]:
    """Raise MXNet's errors about wrong data again, in one line that says what was expected."""
    try:
        yield
    except Exception as cause:
        if not is_of_mxnet(cause):
            raise
        raise error(f"{operation}: got {what}: {reason_of(cause)}; expected {expected}. {advice}") from cause


def is_of_mxnet(error: Exception) -> bool:
    """Return whether MXNet raised this error about its data: an MXNetError, or a builtin error of its Python code."""
    if any(kind.__module__.split(".")[0] == "mxnet" for kind in type(error).__mro__):
        return True
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    raised_by = str(frames[-1].f_globals.get("__name__", "")) if frames else ""
    return type(error) in OF_WRONG_DATA and raised_by.split(".")[0] == "mxnet"


def reason_of(error: BaseException) -> str:
    """Return the reason of one of MXNet's errors, in one short line.

    An MXNetError ends with the reason. An error of MXNet's Python code begins with it, and may print an array after it.
    """
    line = last_line(error) if type(error).__name__ == "MXNetError" else first_line(error)
    line = line.rstrip(" (,:;")
    return line if len(line) <= _LINE else f"{line[: _LINE // 4]} ... {line[-_LINE // 3 * 2 :]}"


def advice_for(error: BaseException, otherwise: str) -> str:
    """Return what `gluon-mgpu explain` says about an error of MXNet's, in one line; `otherwise` if it does not know the error."""
    return advice_on(str(error)) or otherwise


def is_whole(value: Any) -> TypeGuard[int]:
    """Return whether this is a whole number, Python's or NumPy's, and not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether this is a real number, Python's or NumPy's, and not a bool. NaN is one."""
    return isinstance(value, Real) and not isinstance(value, bool)


def _named(name: str, value: Any) -> str:
    return f"{name}={short(value)}" if name.isidentifier() else f"{name} {short(value)}"


def short(value: Any) -> str:
    """Return a value for an error message: one line of at most about 120 characters. Arrays are described, not printed.

    Examples
    --------
    >>> import numpy as np
    >>> short(np.zeros((1000, 3))), short("two\\nlines"), short(list(range(1000)))
    ('ndarray of shape (1000, 3) and dtype float64', "'two\\\\nlines'", '[0, 1, 2, 3, 4, 5, ...]')
    """
    return _SHORT.repr(value)


class _Short(reprlib.Repr):
    """reprlib's text, except for arrays, functions, and objects whose own text has several lines."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 60
        self.maxlevel = 3

    def repr(self, x: Any) -> str:
        """Return a value's short form."""
        text = " ".join(super().repr(x).split())
        return text if len(text) <= _LENGTH else f"{text[: _LENGTH - 3]}..."

    def repr1(self, x: Any, level: int) -> str:
        """Return the short form of a value inside another."""
        kind = type(x).__name__
        try:
            if isinstance(x, type):
                return f"the class {_public_name(x)}"
            if hasattr(x, "dtype") and getattr(x, "shape", ()) != ():
                return f"{kind} of shape {tuple(x.shape)} and dtype {getattr(x.dtype, '__name__', x.dtype)}"
            if isinstance(x, partial):
                return f"{self.repr1(x.func, level)} with {self.repr1(x.keywords, level)}"
            if callable(x) and hasattr(x, "__name__"):
                return f"the function {x.__name__}"
            text = super().repr1(x, level)
        except Exception:  # any error of the value's own code
            text = "\n"
        own = "\n" in text or (text.startswith("<") and " at 0x" in text)
        return f"an object of type {_public_name(type(x))}" if own else text


def _public_name(kind: type) -> str:
    """Return the name of a class, after the shortest module that exports it: several libraries have a Trainer."""
    parts = kind.__module__.split(".") if kind.__module__ not in ("__main__", "builtins") else []
    modules = [".".join(parts[: end + 1]) for end in range(len(parts))]
    exports = (f"{one}." for one in modules if getattr(sys.modules.get(one), kind.__name__, None) is kind)
    return next(exports, "") + kind.__name__


_SHORT = _Short()

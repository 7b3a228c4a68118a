"""Files that others may have written: read if regular and not too large, and JSON if it has the expected form."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Callable, Iterator, List, Optional, Union

from ..checks import is_number, short

# Bytes, half of this machine's memory: with what becomes of it, a larger file does not fit.
MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
MOST_JSON = 2**25  # bytes
COUNT = range(2**53)
_DEEPEST = 64
_SLOW = re.compile(r"[0-9]{41}")  # digits of a number

Most = Union[int, Callable[[int], int]]  # bytes, or a function that returns them from a descriptor of the open file


@contextmanager
def open_regular(path: Union[str, Path], most: Most, *, folder: Optional[int] = None, follow: bool = False) -> Iterator[BinaryIO]:
    """Open a file to read, after its kind and its size were checked.

    Parameters
    ----------
    path : str or pathlib.Path
    most : int or callable, bytes
    folder : int, optional
        The descriptor of the folder in which the path begins.
    follow : bool
        Whether the file may be a link.

    Raises
    ------
    OSError
        It cannot be read, is a link, a pipe, a device or a folder, or is larger.
    """
    # a pipe without a writer would block
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW), dir_fd=folder)
    try:
        status = os.fstat(number)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "Not a regular file", str(path))
        limit = most(number) if callable(most) else most
        if status.st_size > limit:
            raise OSError(errno.EFBIG, f"{status.st_size} bytes, where {limit} are expected at most", str(path))
        with open(number, "rb", closefd=False) as file:
            yield file
    except MemoryError:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), str(path)) from None
    finally:
        os.close(number)


def read_regular(path: Union[str, Path], most: Most, *, folder: Optional[int] = None) -> bytes:
    """Return the content of a file: see `open_regular`."""
    with open_regular(path, most, folder=folder) as file:
        return file.read(os.fstat(file.fileno()).st_size)


def values_of(content: bytes, form: Any, name: str) -> Any:
    """Return the values of a file of JSON; raise `ValueError` unless it has a form: see `check_form`.

    Examples
    --------
    >>> values_of(b'{"epoch": 3}', {"epoch": COUNT, "row?": dict}, "progress.json")
    {'epoch': 3}
    >>> values_of(b'{"epoch": "3"}', {"epoch": COUNT}, "progress.json")
    Traceback (most recent call last):
    ValueError: progress.json has epoch='3'
    """
    try:
        text = content.decode()
        values = json.loads(text, parse_int=_whole if _SLOW.search(text) else None)
        _check_depth(values)
    except ValueError as error:
        raise ValueError(f"{name} is not JSON: {short(str(error))}") from None
    except (RecursionError, MemoryError):
        raise ValueError(f"{name} is not JSON of this size and depth") from None
    check_form(values, form, name)
    return values


def check_form(value: Any, form: Any, name: str) -> None:
    """Raise `ValueError` unless a value of JSON has a form.

    Parameters
    ----------
    value : any value of JSON
    form
        `float`: a finite number. Another type: a value of this type. A range: a whole number in it. A tuple: a value of one of
        these forms. A list of one form: a list of such values; of several: a list of exactly these. A dict: an object of these
        names, of which `name?` may be missing, and any others have the form of `*`. A function: what it accepts, returning
        True. All else: this value.
    name : str
        The file, for the error.
    """
    wrong = _misfit(value, form, "")
    if wrong:
        raise ValueError(f"{name} has {wrong.lstrip('.=')}")


def _misfit(value: Any, form: Any, where: str) -> str:
    """Return the place of the first value that has another form, and the value; "" if all fit."""
    wrong = f"{where}={short(value)}"
    if isinstance(form, tuple):
        return "" if any(not _misfit(value, one, where) for one in form) else wrong
    if isinstance(form, list) and type(value) is list and len(form) in (1, len(value)):
        pairs = zip(value, form * len(value) if len(form) == 1 else form)
        return next(filter(None, (_misfit(one, other, f"{where}[{i}]") for i, (one, other) in enumerate(pairs))), "")
    if isinstance(form, dict) and type(value) is dict:
        missing = [name for name in form if name != "*" and name[-1] != "?" and name not in value]
        if missing:
            return f"{where}.{missing[0]}=nothing"
        forms = ((name, one, form.get(name, form.get(f"{name}?", form.get("*", ())))) for name, one in value.items())
        return next(filter(None, (_misfit(one, other, f"{where}.{short(name)[1:-1]}") for name, one, other in forms)), "")
    if isinstance(form, (list, dict)):
        return wrong
    if isinstance(form, range):
        return "" if type(value) is int and value in form else wrong
    if form is float:
        return "" if is_number(value) and math.isfinite(value) else wrong
    if isinstance(form, type):
        return "" if form is object or type(value) is form else wrong
    is_right = form(value) if callable(form) else type(value) is type(form) and value == form
    return "" if is_right else wrong


def _whole(digits: str) -> int:
    if _SLOW.search(digits):
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _check_depth(values: Any) -> None:
    """Raise `ValueError` for lists and objects within too many others."""
    level: List[Any] = [[values]]
    for _ in range(_DEEPEST):
        inner = (one.values() if isinstance(one, dict) else one for one in level)
        level = [one for some in inner for one in some if isinstance(one, (dict, list))]
    if level:
        raise ValueError(f"more than {_DEEPEST} levels")

"""Schemas for the plain values in files: a file is checked completely before its content is used."""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Dict, Mapping, Optional, Sequence, Tuple, Union

import numpy as np

from .errors import StateError

MOST = 2**53  # the largest count that is the same in every reader of JSON
MOST_STEPS = 2 * 10**9  # of steps, updates and epochs: MXNet's operators take 32 bits, and some schedules count up to it
_SHOWN = 40  # characters of a value in an error


@dataclass(frozen=True)
class Wrong:
    """A value that a schema rejects.

    Attributes
    ----------
    value : object
    expected : str
        A description of the values that the schema accepts.
    path : tuple of str and int
        The keys and indices that lead to the value.
    is_missing : bool
        Whether there is no value at this path.
    """

    value: Any
    expected: str
    path: Tuple[Union[str, int], ...] = ()
    is_missing: bool = False

    def below(self, key: Union[str, int]) -> Wrong:
        """Return the same for the container that holds the value under this key."""
        return replace(self, path=(key, *self.path))

    def message(self) -> str:
        """Return the path and the value as text: `with place.step = "7"`."""
        where = "".join(_step(key) for key in self.path).lstrip(".")
        if self.is_missing:
            return f"without {where}"
        return f"with {where} = {shown(self.value)}" if where else f"with {shown(self.value)}"


Schema = Callable[[Any], Optional[Wrong]]


def check(schema: Schema, value: Any, *, operation: str, file: object, advice: str = "Use another checkpoint") -> None:
    """Raise unless a file's content satisfies its schema.

    Parameters
    ----------
    schema : callable (value) -> Wrong or None
    value : object
    operation : str
    file : object
        The name of the file in errors.
    advice : str
        The advice in errors.

    Raises
    ------
    StateError
        It does not. The message names the value and its path.

    Examples
    --------
    >>> check(record({"step": integer()}), {"step": "7"}, operation="load", file="a.json")
    Traceback (most recent call last):
        ...
    gluon_mgpu.errors.StateError: load: got a.json with step = "7"; expected a whole number of 0 or more. Use another checkpoint.
    """
    wrong = schema(value)
    if wrong is not None:
        raise StateError(f"{operation}: got {file} {wrong.message()}; expected {wrong.expected}. {advice}.")


def parse_json(content: bytes, *, operation: str, file: Path, advice: str = "Use another one") -> Any:
    """Return the value of a JSON file.

    Raises
    ------
    StateError
        The content is not JSON, or an object has a key twice.
    """
    try:
        return json.loads(content.decode(), object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise StateError(
            f"{operation}: got {file}, which is damaged ({type(error).__name__}: {error}); expected JSON as it was written. "
            f"{advice}."
        ) from error


def shown(value: Any) -> str:
    """Return a value as errors show it: on one line and shortened; for a container, its size."""
    if isinstance(value, Mapping):
        return f"an object of {len(value)} keys"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape} and dtype {value.dtype}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**_SHOWN:
        return f"a whole number of {value.bit_length()} bits"
    if value is None or isinstance(value, (bool, int, float, str)):
        text = json.dumps(value[: _SHOWN + 1] if isinstance(value, str) else value)
        return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    return f"an object of type {type(value).__name__}"


def that(expected: str, fits: Callable[[Any], bool]) -> Schema:
    """Return the schema of values that a function accepts. If the function raises, the value is rejected."""

    def schema(value: Any) -> Optional[Wrong]:
        try:
            accepted = fits(value)
        except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError):
            accepted = False
        return None if accepted else Wrong(value, expected)

    return schema


def integer(least: int = 0, most: int = MOST) -> Schema:
    """Return the schema of whole numbers in a range."""
    expected = f"a whole number of {least} or more" + ("" if most == MOST else f", at most {most}")

    def schema(value: Any) -> Optional[Wrong]:
        if is_whole(value) and least <= value <= most:
            return None
        too_large = is_whole(value) and value > most
        return Wrong(value, f"a whole number of at most {most}" if too_large else expected)

    return schema


def steps(least: int = 0) -> Schema:
    """Return the schema of numbers of steps, updates and epochs."""
    return integer(least, MOST_STEPS)


def number(least: float = -math.inf, most: float = math.inf, *, below: float = math.inf) -> Schema:
    """Return the schema of finite numbers in a range."""
    bounds = [f"{least:g} or more"] if least > -math.inf else []
    bounds += [f"at most {most:g}"] if most < math.inf else []
    bounds += [f"less than {below:g}"] if below < math.inf else []
    expected = "a finite number" + (f", {', '.join(bounds)}" if bounds else "")
    return that(expected, lambda value: is_finite(value) and least <= value <= most and value < below)


def constant(*values: Any) -> Schema:
    """Return the schema of these values only."""
    return that(_listed(values), lambda value: any(type(value) is type(one) and value == one for one in values))


def text(most: int = 10_000) -> Schema:
    """Return the schema of texts with at most this many characters."""
    return that(f"a text of at most {most} characters", lambda value: isinstance(value, str) and len(value) <= most)


def nullable(schema: Schema) -> Schema:
    """Return the schema of None and of the values that another schema accepts."""

    def either(value: Any) -> Optional[Wrong]:
        wrong = None if value is None else schema(value)
        return replace(wrong, expected=f"{wrong.expected}, or null") if wrong is not None and not wrong.path else wrong

    return either


def list_of(one: Schema, *, length: Optional[int] = None) -> Schema:
    """Return the schema of lists whose items all have one schema."""
    expected = "a list" if length is None else f"a list of {length}"

    def schema(value: Any) -> Optional[Wrong]:
        if not isinstance(value, (list, tuple)) or length not in (None, len(value)):
            return Wrong(value, expected)
        return next((wrong.below(i) for i, wrong in enumerate(map(one, value)) if wrong is not None), None)

    return schema


def items(*each: Schema) -> Schema:
    """Return the schema of a list with one schema for each of its items."""

    def schema(value: Any) -> Optional[Wrong]:
        if not isinstance(value, (list, tuple)) or len(value) != len(each):
            return Wrong(value, f"a list of {len(each)}")
        checked = ((i, one(item)) for i, (one, item) in enumerate(zip(each, value)))
        return next((wrong.below(i) for i, wrong in checked if wrong is not None), None)

    return schema


def record(required: Mapping[str, Schema], optional: Optional[Mapping[str, Schema]] = None, *, closed: bool = True) -> Schema:
    """Return the schema of objects with these keys; an open one may have any others."""
    known = {**required, **(optional or {})}

    def schema(value: Any) -> Optional[Wrong]:
        if not isinstance(value, dict):
            return Wrong(value, f"an object with {_listed(known)}" if known else "an object")
        for key in required:
            if key not in value:
                return Wrong(None, "it", (key,), is_missing=True)
        for key, item in value.items():
            if key in known:
                wrong = known[key](item)
                if wrong is not None:
                    return wrong.below(key)
            elif closed:
                return Wrong(item, f"no keys but {_listed(known)}", (key,))
        return None

    return schema


def mapping(key: Schema, item: Schema) -> Schema:
    """Return the schema of objects with one schema for all keys and one for all values."""

    def schema(value: Any) -> Optional[Wrong]:
        if not isinstance(value, dict):
            return Wrong(value, "an object")
        for name, one in value.items():
            wrong = key(name)
            if wrong is not None:
                return replace(wrong, expected=f"{wrong.expected} as each of its keys")
            wrong = item(one)
            if wrong is not None:
                return wrong.below(name)
        return None

    return schema


def also(first: Schema, *more: Schema) -> Schema:
    """Return the schema of values that several schemas accept, checked in order."""

    def schema(value: Any) -> Optional[Wrong]:
        return next((wrong for wrong in (one(value) for one in (first, *more)) if wrong is not None), None)

    return schema


def index_as_text() -> Schema:
    """Return the schema of object keys that are indices: "0", "1" and so on."""
    return that("an index", lambda key: isinstance(key, str) and key.isdigit() and len(key) < 10 and str(int(key)) == key)


def anything(value: Any) -> Optional[Wrong]:
    """Accept any value that this package does not use."""
    return None


def is_whole(value: Any) -> bool:
    """Return whether this is a whole number: Python's or NumPy's, and not a bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    """Return whether this is a finite number that a float holds, and not a bool."""
    is_number = is_whole(value) or isinstance(value, (float, np.floating))
    return is_number and bool(abs(value) <= sys.float_info.max)


def _without_repeats(pairs: Sequence[Tuple[str, Any]]) -> Dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {shown(next(key for key in keys if keys.count(key) > 1))} appears twice")
    return found


def _step(key: Union[str, int]) -> str:
    if isinstance(key, str) and re.fullmatch(r"[A-Za-z_]\w{0,60}", key, re.ASCII):
        return f".{key}"
    return f"[{shown(key)}]"


def _listed(values: Any) -> str:
    texts = [shown(value) if not isinstance(value, str) else value for value in values]
    return f"{', '.join(texts[:-1])} or {texts[-1]}" if len(texts) > 1 else "".join(texts)

"""Checks of fields that another machine has sent: each returns a valid value, or raises ValueError."""

from __future__ import annotations

import math
import re
from ipaddress import IPv4Address
from typing import Any, Callable, Dict, Tuple

from .printable import printable, printable_lines

Field = Callable[[Any], Any]


def integer(least: int, most: int) -> Field:
    """Return a check for integers; True is not an integer here."""

    def check(value: Any) -> int:
        if type(value) is not int or not least <= value <= most:
            raise ValueError(f"expected a whole number from {least} to {most}")
        return value

    return check


def seconds(value: Any) -> float:
    """Return a finite number of seconds, 0 or more."""
    if type(value) not in (int, float) or not math.isfinite(value) or not 0 <= value < 1e12:
        raise ValueError("expected seconds")
    return float(value)


def flag(value: Any) -> bool:
    """Return true or false."""
    if type(value) is not bool:
        raise ValueError("expected true or false")
    return value


def one_of(*choices: Any) -> Field:
    """Return a check for a few values."""

    def check(value: Any) -> Any:
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            raise ValueError(f"expected one of {choices}")
        return value

    return check


def line(longest: int) -> Field:
    """Return a check for text, which it returns as one printable line."""

    def check(value: Any) -> str:
        if type(value) is not str or len(value) > longest:
            raise ValueError(f"expected text of at most {longest} characters")
        return printable(value)

    return check


def lines(longest: int) -> Field:
    """Return a check for text of several lines, which it returns as printable lines."""

    def check(value: Any) -> str:
        if type(value) is not str or len(value) > longest:
            raise ValueError(f"expected text of at most {longest} characters")
        return printable_lines(value)

    return check


def address(value: Any) -> str:
    """Return an IPv4 address."""
    if type(value) is not str or not re.fullmatch(r"[0-9.]{7,15}", value):
        raise ValueError("expected an IPv4 address")
    return str(IPv4Address(value))


def list_of(check: Field, least: int, most: int) -> Field:
    """Return a check for lists, which it returns as tuples."""

    def check_all(value: Any) -> Tuple[Any, ...]:
        if type(value) not in (list, tuple) or not least <= len(value) <= most:
            raise ValueError(f"expected a list of {least} to {most}")
        return tuple(map(check, value))

    return check_all


def pair(first: Field, second: Field) -> Field:
    """Return a check for two values."""

    def check(value: Any) -> Tuple[Any, Any]:
        if type(value) not in (list, tuple) or len(value) != 2:
            raise ValueError("expected two values")
        return first(value[0]), second(value[1])

    return check


def record(**fields: Field) -> Field:
    """Return a check for an object with exactly these fields."""

    def check(value: Any) -> Dict[str, Any]:
        if type(value) is not dict or value.keys() != fields.keys():
            raise ValueError(f"expected the fields {', '.join(fields) or 'none'}")
        return {name: fields[name](value[name]) for name in fields}

    return check


def optional(check: Field) -> Field:
    """Return a check that also accepts null."""
    return lambda value: None if value is None else check(value)

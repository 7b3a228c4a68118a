"""Known errors, their causes and what to do, in English and Korean: the entries of known_errors.txt. It imports no MXNet."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Dict, List, NamedTuple, Tuple

_MOST = 3  # answers to a log
_GAP = "…"  # in a fragment: any text
_QUOTES = str.maketrans('`´‘’“”"', "'" * 7)
_KEYS = {"has": "has", "why": "why", "do": "todo", "원인": "why_ko", "할 일": "todo_ko", "see": "see"}


class Entry(NamedTuple):
    """One error: fragments of its messages, and for a user its cause and the remedies, the likeliest first."""

    name: str
    group: str
    has: Tuple[str, ...]
    why: str
    todo: Tuple[str, ...]
    why_ko: str
    todo_ko: Tuple[str, ...]
    see: str  # a page of the web, or of docs/


def explain_message(text: str) -> List[Entry]:
    """Return the entries that fit the lines of a message or a log, at most three, that of the last line first; [] if none fits.

    Parameters
    ----------
    text : str
        The message, a traceback, a log, or the name of an entry.

    Examples
    --------
    >>> [entry.name for entry in explain_message("AttributeError: module 'numpy' has no attribute 'bool'.")]
    ['numpy-removed-names']
    >>> explain_message("ValueError: the parcel weighs too much")
    []
    """
    named = [entry for entry in entries() if entry.name == text.strip()]
    lines = [f"|{_folded(line)}|" for line in text.splitlines()]
    whole = "\n".join(lines)
    possible = [(parts, entry) for parts, entry in _fragments() if all(part in whole for part in parts)]
    found: Dict[str, Entry] = {}
    for line in reversed(lines):
        fitting = [(max(map(len, parts)), entry) for parts, entry in possible if _contains(line, parts)]
        if fitting:
            _, best = max(fitting, key=lambda pair: pair[0])  # the longest part says most
            found.setdefault(best.name, best)
    return named or list(found.values())[:_MOST]


def advice_on(text: str) -> str:
    """Return the cause and the likeliest remedies of the entry that fits a message best, in one line; "" if none fits.

    Examples
    --------
    >>> advice_on("MXNetError: Failed to allocate CPU Memory").partition(".")[0]
    'The machine, container or job has no memory left, so an allocation failed or the kernel killed the process'
    """
    return " ".join(part for entry in explain_message(text)[:1] for part in (entry.why, *entry.todo[:2]))


def last_error(text: str) -> str:
    """Return the line of a traceback that names the error: the last one like `KeyError: 'a'`; otherwise the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.partition(":")[0].rpartition(" ")[2].endswith(("Error", "Exception"))]
    return (errors or lines or [""])[-1]


@lru_cache(maxsize=None)
def entries() -> Tuple[Entry, ...]:
    """Return all entries, in the order of the file."""
    found = []
    for block in Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").split("\n\n")[1:]:
        title, *lines = block.strip().splitlines()
        name, _, group = title[1:].partition("] ")
        fields: Dict[str, List[str]] = {field: [] for field in _KEYS.values()}
        for line in lines:
            key, _, value = line.partition(": ")
            fields[_KEYS[key]].append(value)
        why, why_ko, see = fields["why"], fields["why_ko"], fields["see"]
        has, todo, todo_ko = tuple(fields["has"]), tuple(fields["todo"]), tuple(fields["todo_ko"])
        found.append(Entry(name, group, has, why[0], todo, why_ko[0], todo_ko, see[0]))
    return tuple(found)


@lru_cache(maxsize=None)
def _fragments() -> Tuple[Tuple[Tuple[str, ...], Entry], ...]:
    """Return each fragment, as the parts between its gaps, with its entry."""
    pairs = ((fragment, entry) for entry in entries() for fragment in entry.has)
    return tuple((tuple(_folded(part) for part in fragment.split(_GAP)), entry) for fragment, entry in pairs)


def _folded(text: str) -> str:
    return " ".join(text.casefold().translate(_QUOTES).split())


def _contains(line: str, parts: Tuple[str, ...]) -> bool:
    """Return whether a line contains these parts one after the other. It searches each part once, so its time is linear."""
    at = 0
    for part in parts:
        at = line.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True

"""Messages as users see them, with … for what varies: their cause and what to do, in English and Korean."""

from __future__ import annotations

from pathlib import Path
from typing import Dict, FrozenSet, Iterator, List, NamedTuple, Tuple


class Entry(NamedTuple):
    """One error: its messages, the usual ones first, and what a user can do."""

    name: str
    origin: str  # whose message it is
    messages: Tuple[str, ...]
    cause: str
    fix: str
    cause_ko: str
    fix_ko: str
    link: str  # a section of docs/
    source: str = ""  # the file that raises it
    follows: FrozenSet[str] = frozenset()  # messages that are notices, or often follow from another error of the same log


def _entries(lines: List[str]) -> Iterator[Entry]:
    """Yield the entries of entries.txt: blocks of a name in brackets, its fields, and its messages."""
    starts = [number for number, line in enumerate(lines) if line.startswith("[")]
    for start, end in zip(starts, [*starts[1:], len(lines)]):
        block = [line for line in lines[start + 1 : end] if line]
        fields: Dict[str, str] = dict(line.split(": ", 1) for line in block if line[:2] not in ("- ", "~ "))
        every = fields.pop("follows", "no") == "yes"
        messages = tuple(line[2:] for line in block if line[:2] in ("- ", "~ "))
        follows = frozenset(line[2:] for line in block if line[:2] == "~ " or (every and line[:2] == "- "))
        yield Entry(name=lines[start][1:-1], messages=messages, follows=follows, **fields)


ENTRIES: Tuple[Entry, ...] = tuple(_entries(Path(__file__).with_name("entries.txt").read_text(encoding="utf-8").splitlines()))

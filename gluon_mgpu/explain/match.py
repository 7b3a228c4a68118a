"""Find the entry of a message: whole fragments first, else the words that it shares, weighted by how rare they are."""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache
from math import log
from typing import Dict, FrozenSet, Iterable, List, NamedTuple, Sequence, Tuple

from .checks import ANY_CHECK, BARE_ASSERTION, entry_of_check
from .entries import ENTRIES, Entry

_LEAST_SHARE = 0.47  # of the words, by weight, that a message without a matching fragment has to share
_LEAST_OF_FEW = 0.6  # if these are fewer than four words
_UNKNOWN = 3.0  # weight of a word that no entry has: a message of another program has many
_CLOSE = 0.6  # of the best score: entries that are mentioned next to the best one
_AT_MOST = 3
_SAYS_LITTLE = 3  # words
_OF_CLASS = 0.3  # of its weight has a word that is the class of an error or begins a check: what follows says more
_CLASS = re.compile(r"(?:error|exception|warning)$|^(?:check|failed|errno)$")
_OPEN = re.compile(r"[^\w…¶]…\W*$")
_SPOKEN = re.compile(r"[a-z]{3}")
_WORD = re.compile(r"(?<!\w)-\d+|[a-z0-9_]+|[=!<>]=?")
FRAME = re.compile(r"^\s*(?:File (?:[\"/~]|[A-Za-z]:)|\S+\.pyc?(?:\]\(\S+)? in |<ipython-\S+ in |(?:Cell|Input) In ?\[)")
_INNER = re.compile(  # frames that are the same whatever the script calls
    r"[/\\]mxnet[/\\](?:base|_ctypes|_ffi|cython|ndarray|symbol)\b|packages[/\\]numpy[/\\]|<string>|"
    r"lib/python[\d.]+/(?!site-|dist-|mxnet)|\\[Ll]ib\\(?!site-)"
)


class Answer(NamedTuple):
    """The entry of a message, and the names of others that are close."""

    entry: Entry
    others: Tuple[str, ...]
    follows: bool = False  # whether such a message often follows from another error
    message: str = ""  # that of the entry which fits; "" if none of them is in the text


class _Score(NamedTuple):
    """How well an entry fits: of two scores, the larger one is the better one."""

    leads: bool  # not by a message that often follows from another error
    weight: float
    message: str = ""  # of the entry


class _Pattern(NamedTuple):
    entry: Entry
    message: str
    fragments: Tuple[str, ...]  # the words between what varies, with a space around each
    words: Tuple[str, ...]
    spoken: FrozenSet[str]  # those that are no sign, number or short word
    several: bool  # whether it spans lines of a message, such as a library's frame and the error
    open: bool  # whether another word has to follow, as after "No module named 'mxnet.…'"
    leads: bool


def _words(text: str) -> List[str]:
    return _WORD.findall(text.lower())


def _spoken(words: Iterable[str]) -> FrozenSet[str]:
    return frozenset(word for word in words if _SPOKEN.search(word))


def _fragment(text: str, continues: bool) -> str:
    """Return the words of a text with spaces around them; none after the last one if it continues in a message."""
    return f" {' '.join(_words(text))}" + ("" if continues else " ")


@lru_cache(maxsize=None)
def _weights() -> Dict[str, float]:
    """Return the weight of each word: the more entries have it, the smaller; a class of errors says little."""
    counts = Counter(word for entry in ENTRIES for word in {w for message in entry.messages for w in _words(message)})
    return {word: log(1 + len(ENTRIES) / count) * (_OF_CLASS if _CLASS.search(word) else 1) for word, count in counts.items()}


@lru_cache(maxsize=None)
def _patterns() -> Dict[str, List[_Pattern]]:
    """Return the messages of all entries, each under its rarest word; under "" those that have no whole word."""
    found: Dict[str, List[_Pattern]] = {}
    for entry in ENTRIES:
        for message in entry.messages:
            *parts, end = re.split("[…¶]", message)
            fragments = [_fragment(part, part[-1:].isalnum() or part.endswith("_")) for part in parts] + [_fragment(end, False)]
            whole = {word for fragment in fragments for word in re.findall(r"(?<= )\S+(?= )", fragment)}
            words = tuple(_words(message))
            pattern = _Pattern(
                entry,
                message,
                tuple(part for part in fragments if part.strip()),
                words,
                _spoken(words),
                "¶" in message,
                bool(_OPEN.search(message)),
                message not in entry.follows,
            )
            found.setdefault(max(sorted(whole), key=_weights().__getitem__, default=""), []).append(pattern)
    return found


def _is_part(pattern: _Pattern, other: _Pattern) -> bool:
    """Return whether another entry's message holds a whole message and more: what stands in a notice is not its cause."""
    return (
        pattern.entry is not other.entry
        and len(pattern.words) < len(other.words)
        and all(any(part in whole for whole in other.fragments) for part in pattern.fragments)
    )


def _exact(line: str, several: bool = False) -> Dict[Entry, _Score]:
    """Return the entries of which a whole message, or one that spans several lines, is in a line, with its words' weight."""
    matched: List[_Pattern] = []
    words = _words(line)
    text = f" {' '.join(words)} "
    for pattern in (pattern for word in sorted({"", *words}) for pattern in _patterns().get(word, ())):
        position = 0
        for fragment in pattern.fragments:
            start = text.find(fragment, max(position - 1, 0))  # two fragments may share the space between them
            position = start + len(fragment) if start >= 0 else len(text) + 1
        if position + pattern.open <= len(text) and pattern.several == several:
            matched.append(pattern)
    found: Dict[Entry, _Score] = {}
    for pattern in matched:
        if not any(_is_part(pattern, other) for other in matched):
            score = _Score(pattern.leads, sum(_weights()[word] for word in pattern.words), pattern.message)
            found[pattern.entry] = max(score, found.get(pattern.entry, score))
    return found


def _similar(line: str) -> Dict[Entry, _Score]:
    """Return the entries whose messages share enough words with a line, with that share, 0 to 1."""
    found: Dict[Entry, _Score] = {}
    every = _spoken(_words(line))
    words = every & _weights().keys()
    unknown = _UNKNOWN * len(every - words)
    for pattern in (pattern for patterns in _patterns().values() for pattern in patterns):
        common = pattern.spoken & words
        if len(common) >= max(2, min(3, len(pattern.spoken))):
            shared, both = (sum(map(_weights().__getitem__, group)) for group in (common, pattern.spoken | words))
            score = _Score(pattern.leads, 2 * shared / (both + unknown + shared), pattern.message)
            if score.weight >= (_LEAST_SHARE if len(common) >= 4 else _LEAST_OF_FEW):
                found[pattern.entry] = max(score, found.get(pattern.entry, score))
    return found


def _telling(frames: Sequence[str]) -> Sequence[str]:
    """Return the last frame of a traceback, and those before it up to one that is not of Python or of MXNet's interface."""
    outer = [number for number, frame in enumerate(frames) if not _INNER.search(frame)]
    return frames[outer[-1] if outer else -1 :]


def explain_message(text: str) -> List[Answer]:
    """Return the answer to one message, which may have several lines; nothing if no entry fits."""
    lines = [line for line in text.splitlines() if "[bt]" not in line]
    frames, lines = [line for line in lines if FRAME.match(line)], [line for line in lines if not FRAME.match(line)]
    whole = " ".join(lines)
    found = _exact(whole)
    best = max((score.weight for score in found.values()), default=0.0)
    for frame in _telling(frames) or [""]:  # a message over several lines, such as a frame and the error, comes first
        for entry, score in _exact(f"{frame} {whole}", several=True).items():
            found[entry] = score._replace(leads=True, weight=best + score.weight)
    found = found or ({} if BARE_ASSERTION.search(whole) else _similar(whole))
    ranked = sorted(found, key=lambda entry: found[entry][:2], reverse=True)
    if not ranked or ranked[0].name == ANY_CHECK:
        name = entry_of_check(whole, " ".join(frames[-1:]))
        ranked = [*(entry for entry in ENTRIES if entry.name == name), *ranked]
        found = {**{entry: _Score(not entry.follows, 0.0) for entry in ranked[:1]}, **found}
    close = [entry.name for entry in ranked[1:_AT_MOST] if found[entry].weight >= _CLOSE * found[ranked[0]].weight]
    return [Answer(ranked[0], tuple(close), not found[ranked[0]].leads, found[ranked[0]].message)] if ranked else []


def is_known(text: str) -> bool:
    """Return whether a message of an entry is in a text."""
    return bool(_exact(text))


def says_little(line: str) -> bool:
    """Return whether an error, such as "KeyError: 0", has to be read with the line of code that raised it."""
    return len(_spoken(_words(line))) < _SAYS_LITTLE

"""Find the entry of a message: whole fragments first, else the words that it shares, weighted by how rare they are."""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache
from math import log
from typing import Dict, FrozenSet, Iterable, Iterator, List, NamedTuple, Sequence, Tuple

from .checks import ANY_CHECK, BARE_ASSERTION, entry_of_check
from .entries import ENTRIES, Entry

_LEAST_SHARE = 0.47  # of the words, by weight, that a message without a matching fragment has to share
_LEAST_OF_FEW = 0.6  # if these are fewer than four words
_UNKNOWN = 3.0  # weight of a word that no entry has: a message of another program has many
_CLOSE = 0.6  # of the best score: entries that are mentioned next to the best one
_AT_MOST = 3
_SAYS_LITTLE = 3  # words: such an error, as "KeyError: 0", is read with the line of code that raised it
_OF_CLASS = 0.3  # of its weight has a word that is the class of an error or begins a check: what follows says more
_CLASS = re.compile(r"(?:error|exception|warning)$|^(?:check|failed|errno)$")
_OPEN = re.compile(r"[^\w…¶]…\W*$")
_WARNS = re.compile(r"\b[A-Z]?\w*Warning: ")
_SPOKEN = re.compile(r"[a-z]{3}")
_WORD = re.compile(r"[a-z0-9_]+|[=!<>]=?")
_PREFIX = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|^.{0,60}?<std(?:err|out)>:|^\s*\[?(?:rank |node )?\d+\]?(?: ?[|:] | (?=\S))")
_PLACE = re.compile(r"\[\d\d:\d\d:\d\d\]|\S+\.(?:cc|h|cuh?):\d+:?|\b[\w.]*MXNetError:")  # says nothing of the cause
_IS_ERROR = re.compile(r"(?:^|[\s.])\w*(?:Error|Exception|Warning)\b(?::|$)|Check failed|terminate called|\berror:", re.MULTILINE)
_FRAME = re.compile(r"^\s*(?:\[bt\]|File [\"/~]|\S+\.pyc?(?:\]\(\S+)? in |<ipython-\S+ in |Cell In ?\[)")
_ERROR = re.compile(r"^\s*[\w.]+(?:Error|Exception): ")
_OF_PYTHON = re.compile(
    r"^\s*(?:File \"[^\"]+\", line \d+, in |\S+\.pyc?(?:\]\(\S+)? in )"
)  # such frames are of a traceback, even without its head
_CODE = re.compile(r"^(?:\s|-+> ?\d+ )")
_AROUND = re.compile(r"^\s+\d+(?:\s|$)|^[\s^~]*$")  # lines next to the one that raised an error, as notebooks show them
_PRINTED = re.compile(r"""(\\n)?['"]\n +['"]""")  # between two lines of a text that Python shows in quotes
_BROKEN = re.compile(r"(terminate called after throwing[^\n]*)\n(?=[^\n]{0,60}what\(\):)")  # C++ prints one message in two lines
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")


class Answer(NamedTuple):
    """The entry of a message, and the names of others that are close."""

    entry: Entry
    others: Tuple[str, ...]


class _Pattern(NamedTuple):
    entry: Entry
    fragments: Tuple[str, ...]  # the words between what varies, with a space around each
    words: Tuple[str, ...]
    spoken: FrozenSet[str]  # those that are no sign, number or short word
    several: bool  # whether it spans lines of a message, such as a library's frame and the error
    open: bool  # whether another word has to follow, as after "No module named 'mxnet.…'"


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
                tuple(part for part in fragments if part.strip()),
                words,
                _spoken(words),
                "¶" in message,
                bool(_OPEN.search(message)),
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


def _exact(line: str, several: bool = False) -> Dict[Entry, float]:
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
    found: Dict[Entry, float] = {}
    for pattern in matched:
        if not any(_is_part(pattern, other) for other in matched):
            found[pattern.entry] = max(
                found.get(pattern.entry, 0.0), sum(_weights()[word] for word in pattern.words) + 0.1 * pattern.open
            )
    return found


def _similar(line: str) -> Dict[Entry, float]:
    """Return the entries whose messages share enough words with a line, with that share, 0 to 1."""
    found: Dict[Entry, float] = {}
    every = _spoken(_words(_PLACE.sub(" ", line)))
    words = every & _weights().keys()
    unknown = _UNKNOWN * len(every - words)
    for pattern in (pattern for patterns in _patterns().values() for pattern in patterns):
        common = pattern.spoken & words
        if len(common) >= max(2, min(3, len(pattern.spoken))) and not all(map(_CLASS.search, common)):
            shared, both = (sum(map(_weights().__getitem__, group)) for group in (common, pattern.spoken | words))
            share = 2 * shared / (both + unknown + shared)
            least = _LEAST_SHARE if len(common) >= 4 else _LEAST_OF_FEW
            if share >= max(least, found.get(pattern.entry, 0.0)):
                found[pattern.entry] = share
    return found


def explain_message(text: str) -> List[Answer]:
    """Return the answer to one message, which may have several lines; nothing if no entry fits."""
    found: Dict[Entry, float] = {}
    frames = [line for line in text.splitlines() if _FRAME.match(line)]
    lines = [line for line in text.splitlines() if not _FRAME.match(line)]
    for line in lines:
        for entry, score in _exact(line).items():
            found[entry] = max(score, found.get(entry, 0.0))
    best = max(found.values(), default=0.0)  # a message over several lines, such as the last frame and the error, comes first
    several = _exact(" ".join([*frames[-1:], *lines]), several=True)
    found.update({entry: best + score for entry, score in several.items()})
    whole = " ".join(lines)
    found = found or _exact(whole) or ({} if BARE_ASSERTION.search(whole) else _similar(whole))
    ranked = sorted(found, key=lambda entry: (entry.follows and entry not in several, -found[entry]))
    if not ranked or ranked[0].name == ANY_CHECK:
        name = entry_of_check(whole, " ".join(frames[-1:]))
        ranked = [*(entry for entry in ENTRIES if entry.name == name), *ranked]
        found.update({entry: found.get(entry, 0.0) for entry in ranked[:1]})
    close = [entry.name for entry in ranked[1:_AT_MOST] if found[entry] >= _CLOSE * found[ranked[0]]]
    return [Answer(ranked[0], tuple(close))] if ranked else []


def _messages(lines: Sequence[str]) -> Iterator[Tuple[bool, str]]:
    """Yield the messages of a log, and whether each is the last error of a traceback, with the lines that belong to it."""
    error: List[str] = []  # until it is clear that no other error follows from it
    inside, ends, frame, code = False, False, "", ""
    for line in lines:
        begins, chained = "Traceback (most recent call last)" in line, line.startswith(_CHAINED)
        if begins or chained or (not inside and _OF_PYTHON.match(line)):
            if error:
                yield ends and not chained, "\n".join(error)
            error, inside, frame, code = [], not chained, "" if begins or chained else line, ""
        elif inside and _FRAME.match(line):
            frame, code = line, ""
        elif inside and _CODE.match(line) and not _ERROR.match(line):
            code = code if _AROUND.match(line) else line
        elif inside:
            little = len(_spoken(_words(line))) < _SAYS_LITTLE
            error, inside, ends = [f"{frame} {code}", *([code] if little else []), line], False, True
        elif _ERROR.match(line) and "Check failed" not in line:  # pasted without its traceback
            if error:
                yield ends, "\n".join(error)
            error, ends = [line], False
        elif error and not _IS_ERROR.search(line):
            error.append(line)
        else:
            yield line.startswith("E   "), line  # so pytest marks the error below the lines of code
    yield ends, "\n".join(error)


def explain_log(text: str) -> List[Answer]:
    """Return at most three answers to the messages of a log: the last errors of tracebacks first, each entry once."""
    if "(most recent call last):\\n" in text:  # a traceback in quotes, as in the results of AutoGluon's trials
        text = _PRINTED.sub(r"\1", text).replace("\\n", "\n")
    lines = [_PREFIX.sub("", line).rstrip() for line in re.split(r"\r\n|\r|\n", _BROKEN.sub(r"\1 ", text))]
    groups: List[List[Answer]] = [[], [], [], []]
    for ends, message in _messages([line for line in lines if line and "[bt]" not in line]):
        if ends or _IS_ERROR.search(message) or _exact(message):
            begin, _, more = message.partition("\n")
            alone = explain_message(begin) if more and not ends and _exact(begin) else []  # what follows may be another's
            for answer in (*explain_message(message), *alone):
                later = answer.entry.follows or bool(not ends and _WARNS.search(message))
                groups[2 * later + (not ends)].append(answer)
    first: Dict[str, Answer] = {}
    for answer in (answer for group in groups for answer in group):
        first.setdefault(answer.entry.name, answer)
    return list(first.values())[:_AT_MOST]

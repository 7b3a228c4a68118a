"""Find the entry of a message: whole fragments first, else the words that it shares, weighted by how rare they are."""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache
from math import log
from typing import Dict, FrozenSet, Iterable, Iterator, List, NamedTuple, Pattern, Sequence, Tuple

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
_WORD = re.compile(r"(?<!\w)-\d+|[a-z0-9_]+|[=!<>]=?")
_COLOUR = re.compile(r"(?:\x1b|#033)\[[0-9;?]*[A-Za-z]")
_IS_ERROR = re.compile(r"(?:^|[\s.])\w*(?:Error|Exception|Warning)\b(?::|$)|Check failed|terminate called|\berror:", re.MULTILINE)
_FRAME = re.compile(r"^\s*(?:File (?:[\"/~]|[A-Za-z]:)|\S+\.pyc?(?:\]\(\S+)? in |<ipython-\S+ in |(?:Cell|Input) In ?\[)")
_ERROR = re.compile(r"^\s*[\w.]+(?:Error|Exception)(?:: |:?$)")
_OF_PYTHON = re.compile(  # such frames are of a traceback, even without its head
    r"^\s*(?:File \"[^\"]+\", line \d+, in |\S+\.pyc?(?:\]\(\S+)? in )"
)
_CODE = re.compile(r"^(?:\s|-+> ?\d+ )")
_AROUND = re.compile(r"^\s+\d+(?:\s|$)|^[\s^~]*$")  # lines next to the one that raised an error, as notebooks show them
_PRINTED = re.compile(r"""(\\n)?['"]\n +['"]""")  # between two lines of a text that Python shows in quotes
_BROKEN = re.compile(r"(terminate called after throwing[^\n]*)\n(?=[^\n]{0,60}what\(\):)")  # C++ prints one message in two lines
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_BEGINS = "Traceback (most recent call last)"
_AT_EXIT = re.compile(r"^(?:Exception ignored in|Error in (?:atexit|sys\.excepthook))")  # Python prints them after an error
_INNER = re.compile(  # frames that are the same whatever the script calls
    r"[/\\]mxnet[/\\](?:base|_ctypes|_ffi|cython|ndarray|symbol)\b|packages[/\\]numpy[/\\]|<string>|"
    r"lib/python[\d.]+/(?!site-|dist-|mxnet)|\\[Ll]ib\\(?!site-)"
)


class Answer(NamedTuple):
    """The entry of a message, and the names of others that are close."""

    entry: Entry
    others: Tuple[str, ...]
    follows: bool = False  # whether such a message often follows from another error


class _Score(NamedTuple):
    """How well an entry fits: of two scores, the larger one is the better one."""

    leads: bool  # not by a message that often follows from another error
    weight: float


class _Pattern(NamedTuple):
    entry: Entry
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
            score = _Score(pattern.leads, sum(_weights()[word] for word in pattern.words))
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
            score = _Score(pattern.leads, 2 * shared / (both + unknown + shared))
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
    frames, lines = [line for line in lines if _FRAME.match(line)], [line for line in lines if not _FRAME.match(line)]
    whole = " ".join(lines)
    found = _exact(whole)
    best = max((score.weight for score in found.values()), default=0.0)
    for frame in _telling(frames) or [""]:  # a message over several lines, such as a frame and the error, comes first
        for entry, score in _exact(f"{frame} {whole}", several=True).items():
            found[entry] = _Score(True, best + score.weight)
    found = found or ({} if BARE_ASSERTION.search(whole) else _similar(whole))
    ranked = sorted(found, key=found.__getitem__, reverse=True)
    if not ranked or ranked[0].name == ANY_CHECK:
        name = entry_of_check(whole, " ".join(frames[-1:]))
        ranked = [*(entry for entry in ENTRIES if entry.name == name), *ranked]
        found = {**{entry: _Score(not entry.follows, 0.0) for entry in ranked[:1]}, **found}
    close = [entry.name for entry in ranked[1:_AT_MOST] if found[entry].weight >= _CLOSE * found[ranked[0]].weight]
    return [Answer(ranked[0], tuple(close), not found[ranked[0]].leads)] if ranked else []


class _Message(NamedTuple):
    """A message of a log, with the lines that belong to it."""

    text: str
    ends: bool = False  # whether it is the last error of a traceback
    at_exit: bool = False  # whether Python printed it while it ended


def _messages(lines: Sequence[str]) -> Iterator[_Message]:
    """Yield the messages of a log."""
    error = _Message("")  # until it is clear that no other error follows from it
    frames: List[List[str]] = []  # of a traceback: where, and the line of code
    inside, at_exit = False, False
    for line in lines:
        begins, chained, exiting = _BEGINS in line, line.startswith(_CHAINED), bool(_AT_EXIT.match(line))
        if begins or chained or exiting or (not inside and _OF_PYTHON.match(line)):
            yield error._replace(ends=error.ends and not chained)
            if exiting or (begins and not line.startswith(_BEGINS)):
                yield _Message(line, exiting, exiting)
            at_exit = exiting or (at_exit and inside)
            error, inside, frames = _Message(""), not chained, [] if begins or chained or exiting else [[line, ""]]
        elif inside and _FRAME.match(line):
            frames.append([line, ""])
        elif inside and frames and _is_code(line, *frames[-1]):
            frames[-1][1] = frames[-1][1] if _AROUND.match(line) else line
        elif inside:
            code = f"{frames[-1][1]} " if frames and len(_spoken(_words(line))) < _SAYS_LITTLE else ""
            error, inside = _Message("\n".join([*map(" ".join, frames), f"{code}{line}"]), True, at_exit), False
        elif _ERROR.match(line):  # pasted without its traceback
            yield error
            error = _Message(line)
        elif error.text and not _IS_ERROR.search(line):
            error = error._replace(text=f"{error.text}\n{line}")
        else:
            yield error
            yield _Message(line, ends=line.startswith("E   "))  # so pytest marks the error below the lines of code
            error = _Message("")
    yield error


def _is_code(line: str, frame: str, code: str) -> bool:
    """Return whether a line below a frame is of its code: indented, or the first one if the whole traceback is not."""
    return not _ERROR.match(line) and bool(_CODE.match(line) or not (code or _CODE.match(frame)))


def _bare(lines: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a log without what a launcher, a logger or a mail puts before each line of a traceback."""
    prefixes: Dict[int, Pattern[str]] = {}  # from the line with this number on
    for number, line in enumerate(lines[:-1]):
        before, begins, _ = line.partition(_BEGINS)
        if begins:
            before = re.sub(r"[A-Z]\w+\s\s+$", "", before)  # a notebook shows the class of the error there
            prefix = re.compile(re.sub(r"\d+", r"\\d+", f"{re.escape(before)}|{re.escape(before.rstrip())}$"))
            prefixes[number] = prefix if prefix.match(lines[number + 1]) else re.compile("")
    prefix = next(iter(prefixes.values()), re.compile(""))
    for number, line in enumerate(lines):
        prefix = prefixes.get(number, prefix)
        found = prefix.match(line)
        yield line[found.end() :] if found else line


def _unwrapped(text: str) -> str:
    """Return a log without the breaks that a terminal put into its long lines: several are then as long as the longest."""
    lengths = [len(line) for line in text.split("\n")]
    width = max(lengths)
    return re.sub(rf"(?m)^(.{{{width}}})\n", r"\1", text) if width >= 60 and lengths.count(width) > 2 else text


def explain_log(text: str) -> List[Answer]:
    """Return at most three answers to the messages of a log: the last errors of tracebacks first, each entry once."""
    if "(most recent call last):\\n" in text:  # a traceback in quotes, as in the results of AutoGluon's trials
        text = _PRINTED.sub(r"\1", text).replace("\\n", "\n")
    text = _unwrapped(re.sub(r"\r\n|\r", "\n", _COLOUR.sub("", text)))
    lines = [line.rstrip() for line in _BROKEN.sub(r"\1 ", text).split("\n")]
    groups: List[List[Answer]] = [[], [], [], []]
    lines = [line for line in _bare([line for line in lines if line and "[bt]" not in line]) if line]
    for message, ends, at_exit in _messages(lines):
        if ends or _IS_ERROR.search(message) or _exact(message):
            frames = sum(1 for line in message.splitlines() if _FRAME.match(line))
            begin = "\n".join(message.splitlines()[: frames + 1])  # what follows may be another's
            alone = explain_message(begin) if begin != message and (ends or _exact(begin)) else []
            warning = not ends and bool(_WARNS.search(message))
            for answer in (*explain_message(message), *alone):
                later = answer.follows or at_exit or warning
                notice = warning or answer.entry.follows.issuperset(answer.entry.messages)
                groups[2 * later + (not ends and (notice or not later))].append(answer)
    first: Dict[str, Answer] = {}
    for answer in (answer for group in groups for answer in group):
        first.setdefault(answer.entry.name, answer)
    return list(first.values())[:_AT_MOST]

"""Find the messages of a log, and which of them say what went wrong: the last errors of tracebacks, before notices."""

from __future__ import annotations

import re
from typing import Dict, Iterator, List, NamedTuple, Pattern, Sequence

from .match import FRAME, Answer, explain_message, is_known, says_little

_AT_MOST = 3
_WARNS = re.compile(r"\b[A-Z]?\w*Warning: ")
_COLOUR = re.compile(r"(?:\x1b|#033)\[[0-9;?]*[A-Za-z]")
_IS_ERROR = re.compile(r"(?:^|[\s.])\w*(?:Error|Exception|Warning)\b(?::|$)|Check failed|terminate called|\berror:", re.MULTILINE)
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
        elif inside and FRAME.match(line):
            frames.append([line, ""])
        elif inside and frames and _is_code(line, *frames[-1]):
            frames[-1][1] = frames[-1][1] if _AROUND.match(line) else line
        elif inside:
            code = f"{frames[-1][1]} " if frames and says_little(line) else ""
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
        if ends or _IS_ERROR.search(message) or is_known(message):
            frames = sum(1 for line in message.splitlines() if FRAME.match(line))
            begin = "\n".join(message.splitlines()[: frames + 1])  # what follows may be another's
            alone = explain_message(begin) if begin != message and (ends or is_known(begin)) else []
            warning = not ends and bool(_WARNS.search(message))
            for answer in (*explain_message(message), *alone):
                later = answer.follows or at_exit or warning
                notice = warning or answer.entry.follows.issuperset(answer.entry.messages)
                groups[2 * later + (not ends and (notice or not later))].append(answer)
    first: Dict[str, Answer] = {}
    for answer in (answer for group in groups for answer in group):
        first.setdefault(answer.entry.name, answer)
    return list(first.values())[:_AT_MOST]

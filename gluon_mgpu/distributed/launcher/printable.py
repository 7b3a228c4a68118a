"""Text of another process or machine, made safe for terminals and logs: it cannot move the cursor or hide its content."""

from __future__ import annotations

import re

_SEQUENCE = re.compile(
    "(?:\x1b\\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor
    "|(?:\x1b[]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\\\|\x9c)"  # OSC, DCS and the like: titles, clipboard
    "|\x1b[ -/]*[0-~]"  # the short ones: reset, character sets
)
_UNFIT = "\N{REPLACEMENT CHARACTER}"


def printable(text: str, longest: int = 0) -> str:
    r"""Return text as one line without escape sequences and control characters.

    Line ends, and characters of Unicode's classes control, format (such as bidirectional marks), surrogate, private and
    unassigned, become U+FFFD. Other blanks become spaces.

    Parameters
    ----------
    text : str
    longest : int
        Number of characters to keep; 0 for all.

    Examples
    --------
    >>> printable("\x1b[2J\x1b]0;title\x07no\tend\n")
    'no end�'
    """
    text = text[:longest] if longest else text
    return "".join(one if one.isprintable() else _replacement(one) for one in _SEQUENCE.sub("", text))


def printable_lines(text: str, longest: int = 0) -> str:
    r"""Return text as `printable` does, but keep its line feeds.

    Examples
    --------
    >>> printable_lines("rank 1 failed\n  \x9b31mValueError\u202e")
    'rank 1 failed\n  ValueError�'
    """
    text = text[:longest] if longest else text
    return "\n".join(map(printable, text.split("\n")))


def _replacement(character: str) -> str:
    return " " if character in "\t\u00a0\u3000" else _UNFIT

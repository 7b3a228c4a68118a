"""Text of another process or machine, made fit for a terminal and a log: it can neither move the cursor nor hide what it says."""

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

    Characters that Unicode calls control, format (bidirectional ones among them), surrogate, private or unassigned, and line
    ends, become U+FFFD; other blanks become spaces.

    Parameters
    ----------
    text : str
    longest : int
        Characters that are kept; 0 for all.

    Examples
    --------
    >>> printable("\x1b[2J\x1b]0;title\x07no\tend\n")
    'no end�'
    """
    text = text[:longest] if longest else text
    return "".join(one if one.isprintable() else _replacement(one) for one in _SEQUENCE.sub("", text))


def printable_lines(text: str, longest: int = 0) -> str:
    r"""Return text as `printable` does, with its line feeds.

    Examples
    --------
    >>> printable_lines("rank 1 failed\n  \x9b31mValueError\u202e")
    'rank 1 failed\n  ValueError�'
    """
    text = text[:longest] if longest else text
    return "\n".join(map(printable, text.split("\n")))


def _replacement(character: str) -> str:
    return " " if character in "\t\u00a0\u3000" else _UNFIT

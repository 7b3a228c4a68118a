"""Vocabularies of words or of characters: plain lists."""

from __future__ import annotations

import re
from typing import Callable, Dict, List, Sequence, Tuple

from ...errors import DataError
from .pairs import normalise
from .vocabulary import SPECIAL, UNK, UNKNOWN, Vocabulary, checked, spoken

FIRST_LINE = "gluon_mgpu vocabulary of "

_JOINED = "￭"  # marks a missing space
_WORDS = re.compile(r"\w+|[^\w\s]")


class ListedVocabulary(Vocabulary):
    """A vocabulary of words or of characters, stored as a list.

    Words are separated from punctuation. A mark records on which sides it had no space (￭), so that decoding is exact.

    Parameters
    ----------
    kind : "words" or "characters"
    tokens : sequence of str
        From number 4 on, all different.

    Raises
    ------
    DataError
        A token is repeated or impossible: empty, with a space, or several characters in a vocabulary of characters.

    Examples
    --------
    >>> vocabulary = ListedVocabulary("words", ["five", "twenty", "￭-￭"])
    >>> vocabulary.encode("twenty-five"), vocabulary.encode("twenty six"), vocabulary.decode([5, 6, 4, 2])
    ([5, 6, 4], [5, 3], 'twenty-five')
    """

    def __init__(self, kind: str, tokens: Sequence[str]) -> None:
        if kind not in LISTED:
            raise DataError(
                f"ListedVocabulary: got kind {kind!r:.40}; expected one of {', '.join(LISTED)}. Subwords have a class."
            )
        self.kind = kind
        self._split, self._join = LISTED[kind]
        self._tokens = (*SPECIAL, *tokens)
        self._numbers = {token: number for number, token in enumerate(self._tokens)}
        for number, token in enumerate(self._tokens[len(SPECIAL) :], len(SPECIAL)):
            if self._numbers[token] != number or not _is_token(kind, token):
                raise DataError(
                    f"ListedVocabulary: got {token!r:.40} as token {number} of {kind}; expected different tokens that "
                    "occur in text. Use build_vocabulary."
                )
        self._known = {token: number for token, number in self._numbers.items() if number >= len(SPECIAL)}

    def __len__(self) -> int:
        return len(self._tokens)

    def encode(self, text: str) -> List[int]:
        return [self._known.get(token, UNK) for token in self._split(normalise(text))]

    def decode(self, numbers: Sequence[int]) -> str:
        return self._join([UNKNOWN if n == UNK else self._tokens[n] for n in spoken(numbers, len(self))])

    def tokens(self, numbers: Sequence[int]) -> List[str]:
        return [self._tokens[n] for n in checked("tokens", numbers, len(self))]

    def to_bytes(self) -> bytes:
        return "".join(f"{line}\n" for line in (FIRST_LINE + self.kind, *self._tokens)).encode()


def split_words(text: str) -> List[str]:
    """Return the words and marks of normalised text; ￭ shows where a mark had no space next to it.

    Examples
    --------
    >>> split_words('He said, "twenty-five."')
    ['He', 'said', '￭,', '"￭', 'twenty', '￭-￭', 'five', '￭.', '￭"']
    """
    text = text.replace(_JOINED, UNKNOWN)
    tokens = []
    for found in _WORDS.finditer(text):
        token, (begin, end) = found.group(), found.span()
        if not _is_word(token):
            before, after = text[max(begin - 1, 0) : begin].strip(), text[end : end + 1]
            token = (_JOINED if before else "") + token + (_JOINED if _is_word(after) else "")
        tokens.append(token)
    return tokens


def join_words(tokens: Sequence[str]) -> str:
    """Return the text of tokens of `split_words`."""
    return " ".join(tokens).replace(f" {_JOINED}", "").replace(f"{_JOINED} ", "").replace(_JOINED, "")


def _is_word(token: str) -> bool:
    return bool(re.match(r"\w", token))


def _is_token(kind: str, token: str) -> bool:
    if kind == "characters":
        return len(token) == 1 and (token == " " or not token.isspace())
    return bool(token) and not any(character.isspace() for character in token)


# Functions that split text into tokens and join them.
LISTED: Dict[str, Tuple[Callable[[str], List[str]], Callable[[Sequence[str]], str]]] = {
    "words": (split_words, join_words),
    "characters": (list, "".join),
}

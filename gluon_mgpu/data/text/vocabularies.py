"""Vocabularies made from a corpus, or read from a file."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Iterable, Union

from ...checks import is_number, one_of, path_of, short, whole_number
from ...errors import DataError
from .pairs import lines_of, normalise
from .subwords import SubwordVocabulary, train_subwords
from .vocabulary import SPECIAL, Vocabulary
from .words import FIRST_LINE, LISTED, ListedVocabulary


def build_vocabulary(
    texts: Iterable[str],
    kind: str = "subwords",
    *,
    size: int = 8000,
    min_count: int = 1,
    character_coverage: float = 0.9995,
) -> Vocabulary:
    """Return a vocabulary made from a corpus.

    Parameters
    ----------
    texts : iterable of str
        Sentences of one language; those of both for a vocabulary that they share.
    kind : "subwords", "words" or "characters"
        Subwords are learnt by sentencepiece (unigram), which the extra `seq2seq` installs.
    size : int
        The most tokens, including the 4 special ones.
    min_count : int
        The least number of occurrences of a word or character. Not used for subwords.
    character_coverage : float, 0 to 1
        The share of the text that the characters of a subword vocabulary must cover; rarer characters are unknown.

    Raises
    ------
    DataError
        There is no text, or an option is invalid.
    MissingExtraError
        sentencepiece is not installed.

    Examples
    --------
    >>> vocabulary = build_vocabulary(["one hundred", "one hundred one"], "words")
    >>> vocabulary.tokens(range(len(vocabulary)))
    ['<pad>', '<bos>', '<eos>', '<unk>', 'one', 'hundred']
    """
    one_of("build_vocabulary", "kind", kind, ("subwords", *LISTED), advice="Pass one of these.", error=DataError)
    if not is_number(character_coverage) or not 0 < character_coverage <= 1:
        raise DataError(
            f"build_vocabulary: got character_coverage={short(character_coverage)}; expected a number above 0, at most 1. "
            "0.9995 is usual."
        )
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        raise DataError(f"build_vocabulary: got texts={short(texts)}; expected sentences. Pass a list of texts.")
    lines = [line for line in map(normalise, texts) if line]
    if not lines:
        raise DataError("build_vocabulary: got no text; expected one sentence or more. Check the corpus.")
    for name, number, smallest in (("size", size, len(SPECIAL) + 1), ("min_count", min_count, 1)):
        whole_number("build_vocabulary", name, number, low=smallest, advice="Raise it.", error=DataError)
    if kind == "subwords":
        return SubwordVocabulary(train_subwords(lines, int(size), character_coverage))
    counts = Counter(token for line in lines for token in LISTED[kind][0](line))
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    return ListedVocabulary(kind, [token for token in ranked if counts[token] >= min_count][: size - len(SPECIAL)])


def load_vocabulary(path: Union[str, Path]) -> Vocabulary:
    """Return a vocabulary that `Vocabulary.save` wrote.

    Raises
    ------
    DataError
        The file is not a vocabulary, or is damaged.
    MissingExtraError
        It holds subwords, and sentencepiece is not installed.
    OSError
        The file cannot be read.
    """
    return read_vocabulary(path_of("load_vocabulary", "path", path, error=DataError).read_bytes(), path)


def read_vocabulary(content: bytes, path: Union[str, Path]) -> Vocabulary:
    """Return a vocabulary from the bytes of a file; errors name its path. See `load_vocabulary`."""
    try:
        if not is_listed(content):
            return SubwordVocabulary(content)
        first, *tokens = lines_of("load_vocabulary", content, path)
        if tuple(tokens[: len(SPECIAL)]) != SPECIAL:
            raise DataError(f"got {tokens[: len(SPECIAL)]!r:.60} as the first tokens; expected {', '.join(SPECIAL)}.")
        return ListedVocabulary(first[len(FIRST_LINE) :], tokens[len(SPECIAL) :])
    except DataError as error:
        raise DataError(
            f"load_vocabulary: got {path}, which is not a complete vocabulary ({error}); expected a file of Vocabulary.save. "
            "Copy it again."
        ) from error


def is_listed(content: bytes) -> bool:
    """Return whether these are the bytes of a vocabulary of words or characters, not of a sentencepiece model."""
    return content.startswith(FIRST_LINE.encode())

"""Parallel text: sentences and their translations, read from files."""

from __future__ import annotations

import codecs
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator, List, Sequence, Tuple, Union

from ...checks import flag, instance, path_of, texts_of, whole_number
from ...errors import DataError

PathLike = Union[str, Path]
_OTHER_ENCODINGS = {  # by the marks at their beginning
    "UTF-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),
    "UTF-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),
}


@dataclass(frozen=True)
class SentencePairs:
    """Sentences and their translations.

    Attributes
    ----------
    source, target : tuple of str, length N
        `target[i]` is the translation of `source[i]`.

    Raises
    ------
    DataError
        The numbers of source and target sentences differ.

    Examples
    --------
    >>> pairs = SentencePairs(["하나", "둘"], ["one", "two"])
    >>> len(pairs), list(pairs.swapped())
    (2, [('one', '하나'), ('two', '둘')])
    """

    source: Sequence[str]
    target: Sequence[str]

    def __post_init__(self) -> None:
        for name in ("source", "target"):
            object.__setattr__(self, name, texts_of("SentencePairs", name, getattr(self, name), error=DataError))
        if len(self.source) != len(self.target):
            raise DataError(
                f"SentencePairs: got {len(self.source)} source and {len(self.target)} target sentences; expected the same "
                "number. Pass a translation for each sentence."
            )

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self.source)

    def __iter__(self) -> Iterator[Tuple[str, str]]:
        """Iterate over (source, target)."""
        return iter(zip(self.source, self.target))

    def take(self, indices: Sequence[int]) -> SentencePairs:
        """Return some of the pairs, in the order of `indices`."""
        return SentencePairs([self.source[i] for i in indices], [self.target[i] for i in indices])

    def swapped(self) -> SentencePairs:
        """Return the pairs for the other direction of translation."""
        return SentencePairs(self.target, self.source)


def normalise(text: str) -> str:
    """Return text in Unicode's form NFC, with single spaces between words and none around them.

    A Korean syllable may be one character, or two or three (NFD, from a Mac's file system); the result always uses one.

    Examples
    --------
    >>> decomposed = "\\u1112\\u1161\\u11ab"  # ㅎ ㅏ ㄴ
    >>> normalise(f"  {decomposed} \\t 개 "), len(decomposed), len(normalise(decomposed))
    ('한 개', 3, 1)
    """
    instance("normalise", "text", text, str, "a text", advice="Pass a str.", error=DataError)
    return " ".join(unicodedata.normalize("NFC", text).split())


def read_pairs(source_path: PathLike, target_path: PathLike, *, keep_empty: bool = False) -> SentencePairs:
    """Return the pairs of two UTF-8 files, line by line, normalised (see `normalise`).

    Parameters
    ----------
    source_path, target_path : str or pathlib.Path
    keep_empty : bool
        Keep pairs with an empty side, for `filter_pairs` to count and remove, instead of raising.

    Raises
    ------
    DataError
        Different numbers of lines, bytes that are not UTF-8, an empty side, or no pair. The message names file and line.
    OSError
        A file cannot be read.
    """
    source, target = read_lines("read_pairs", source_path), read_lines("read_pairs", target_path)
    if len(source) != len(target):
        raise DataError(
            f"read_pairs: got {len(source)} lines in {source_path} and {len(target)} in {target_path}; expected the same number "
            f"in both. The first line without a partner is line {min(len(source), len(target)) + 1}: check for a missing line "
            "before it."
        )
    return _paired("read_pairs", list(zip(source, target)), (str(source_path), str(target_path)), keep_empty)


def read_tsv(path: PathLike, *, source_column: int = 0, target_column: int = 1, keep_empty: bool = False) -> SentencePairs:
    """Return the pairs of one UTF-8 file, two columns between tabs, normalised (see `normalise`).

    Quotation marks are text. Other columns are left out.

    Parameters
    ----------
    path : str or pathlib.Path
    source_column, target_column : int
        Counted from 0.
    keep_empty : bool
        Keep pairs with an empty side, for `filter_pairs` to count and remove, instead of raising.

    Raises
    ------
    DataError
        A line with too few columns, bytes that are not UTF-8, an empty side, or no pair. The message names file and line.
    OSError
        The file cannot be read.
    """
    columns = (source_column, target_column)
    for name, column in zip(("source_column", "target_column"), columns):
        whole_number("read_tsv", name, column, low=0, advice="The first column is 0.", error=DataError)
    rows = []
    for number, line in enumerate(read_lines("read_tsv", path), 1):
        fields = line.split("\t")
        if len(fields) <= max(columns) and line.strip():
            raise DataError(
                f"read_tsv: got {len(fields)} columns in {path} line {number}; expected {max(columns) + 1} or more, with tabs "
                "between them. Write a source, a tab and its translation in each line."
            )
        rows.append((fields[source_column], fields[target_column]) if len(fields) > max(columns) else ("", ""))
    return _paired("read_tsv", rows, (f"{path} column {source_column}", f"{path} column {target_column}"), keep_empty)


def read_lines(operation: str, path: PathLike) -> List[str]:
    """Return the lines of a UTF-8 file: see `lines_of`."""
    return lines_of(operation, path_of(operation, "path", path, error=DataError).read_bytes(), path)


def lines_of(operation: str, content: bytes, path: PathLike) -> List[str]:
    """Return the lines of a UTF-8 file from its bytes; errors name its path.

    A line feed ends a line; in a file without any, a carriage return does. str.splitlines also splits at characters within text.
    """
    encoding = next((name for name, marks in _OTHER_ENCODINGS.items() if content.startswith(marks)), None)
    if encoding or b"\0" in content[:4]:
        raise DataError(
            f"{operation}: got {path} in {encoding or 'UTF-16, or no text: it has bytes of 0'}; expected UTF-8. Convert it, for "
            f"example with iconv -f {encoding or 'UTF-16LE'} -t UTF-8."
        )
    try:
        text = content.decode("utf-8-sig")  # Windows' editors begin a file with a mark
    except UnicodeDecodeError as error:
        content = error.object  # without the mark, if there was one
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{operation}: got byte 0x{content[error.start]:02x} in {path} line {line}, which is not UTF-8 ({error.reason}); "
            "expected UTF-8. Unpack it if it is an archive; convert Korean text from Windows with iconv -f CP949 -t UTF-8."
        ) from error
    lines = text.split("\n" if "\n" in text else "\r")
    return lines[:-1] if not lines[-1] else lines


def _paired(operation: str, rows: Sequence[Tuple[str, str]], places: Tuple[str, str], keep_empty: bool) -> SentencePairs:
    """Return normalised pairs; an error about an empty side names its file and line."""
    flag(operation, "keep_empty", keep_empty, error=DataError)
    pairs = [(normalise(source), normalise(target)) for source, target in rows]
    for number, sides in enumerate(pairs, 1):
        if not keep_empty and not all(sides):
            raise DataError(
                f"{operation}: got an empty sentence in {places[0] if not sides[0] else places[1]} line {number}; expected "
                "text on both sides. Fill it in, or pass keep_empty=True and call filter_pairs, which leaves such pairs out."
            )
    if not any(map(all, pairs)):
        raise DataError(f"{operation}: got no pair in {' and '.join(places)}; expected one or more. Check the files.")
    return SentencePairs([source for source, _ in pairs], [target for _, target in pairs])

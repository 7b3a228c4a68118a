"""The interface of every vocabulary: numbers of tokens, four of them special."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Dict, List, Mapping, Sequence, Union

from ...checks import instance
from ...errors import DataError

PAD, BOS, EOS, UNK = range(4)  # padding, begin and end of a sentence, unknown
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
UNKNOWN = "\N{REPLACEMENT CHARACTER}"


class Vocabulary(ABC):
    """Text -> numbers, and back. `PAD`, `BOS`, `EOS` and `UNK` are 0, 1, 2 and 3 in each.

    Attributes
    ----------
    kind : str
        "words", "characters" or "subwords".
    """

    kind: str

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of tokens, including the special ones."""

    @abstractmethod
    def encode(self, text: str) -> List[int]:
        """Normalise a text and return the numbers of its tokens, without `BOS` and `EOS`."""

    @abstractmethod
    def decode(self, numbers: Sequence[int]) -> str:
        """Return the text of some numbers, up to the first `EOS`. `PAD` and `BOS` are left out; `UNK` is U+FFFD."""

    @abstractmethod
    def tokens(self, numbers: Sequence[int]) -> List[str]:
        """Return each number's token, for display."""

    @abstractmethod
    def to_bytes(self) -> bytes:
        """Return the bytes that `save` writes."""

    def save(self, path: Union[str, Path]) -> None:
        """Write the vocabulary into a file: plain text, or sentencepiece's own for subwords."""
        Path(path).write_bytes(self.to_bytes())

    def config(self) -> Dict[str, Any]:
        """Return values for a checkpoint that identify this vocabulary: see `check_vocabulary`."""
        return {"kind": self.kind, "size": len(self), "fingerprint": fingerprint(self.to_bytes())}


def fingerprint(content: bytes) -> str:
    """Return a short text that identifies the bytes of a vocabulary."""
    return hashlib.sha256(content).hexdigest()[:16]


def check_vocabulary(vocabulary: Vocabulary, config: Mapping[str, Any], name: str = "vocabulary") -> None:
    """Raise unless this is the vocabulary with which a network was trained.

    Parameters
    ----------
    vocabulary : Vocabulary
    config : mapping
        The vocabulary's `config`, saved with the network.
    name : str
        Its name in errors, such as its file.

    Raises
    ------
    DataError
        It is another vocabulary. Its numbers would stand for other words than those that the network has learnt.

    Examples
    --------
    >>> from gluon_mgpu.data import build_vocabulary
    >>> vocabulary = build_vocabulary(["가나다"], "characters")
    >>> check_vocabulary(vocabulary, {"kind": "characters", "size": 7, "fingerprint": vocabulary.config()["fingerprint"]})
    """
    instance("check_vocabulary", "vocabulary", vocabulary, Vocabulary, "a Vocabulary", advice="Load it.", error=DataError)
    instance("check_vocabulary", "config", config, Mapping, "a mapping", advice="Pass vocabulary.config().", error=DataError)
    found = vocabulary.config()
    differing = [key for key in found if config.get(key) != found[key]]
    if differing:
        raise DataError(
            f"check_vocabulary: got {name} with {', '.join(f'{key} {found[key]}' for key in differing)}; expected "
            f"{', '.join(f'{key} {config.get(key)}' for key in differing)}, as in the checkpoint. Use the vocabulary that was "
            "saved with the checkpoint."
        )


def spoken(numbers: Sequence[int], size: int) -> List[int]:
    """Return the visible tokens of a sentence: the numbers before `EOS`, without `PAD` and `BOS`."""
    valid = checked("decode", numbers, size)
    end = valid.index(EOS) if EOS in valid else len(valid)
    return [number for number in valid[:end] if number not in (PAD, BOS)]


def checked(operation: str, numbers: Sequence[int], size: int) -> List[int]:
    """Return numbers as ints; raise unless each is in a vocabulary of this size."""
    found = [int(number) for number in numbers]
    wrong = [number for number in found if not 0 <= number < size]
    if wrong:
        raise DataError(
            f"{operation}: got {wrong[0]} for a vocabulary of {size}; expected numbers from 0 to {size - 1}. Use the "
            "vocabulary that the network was trained with."
        )
    return found

"""What every vocabulary is: numbers of tokens, four of them special."""

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
        """Return the number of tokens, the special ones among them."""

    @abstractmethod
    def encode(self, text: str) -> List[int]:
        """Return the numbers of the tokens of a text, which is normalised first; neither `BOS` nor `EOS` is added."""

    @abstractmethod
    def decode(self, numbers: Sequence[int]) -> str:
        """Return the text of some numbers, up to the first `EOS`. `PAD` and `BOS` are left out; `UNK` is U+FFFD."""

    @abstractmethod
    def tokens(self, numbers: Sequence[int]) -> List[str]:
        """Return each number's token, for looking at."""

    @abstractmethod
    def to_bytes(self) -> bytes:
        """Return what `save` writes."""

    def save(self, path: Union[str, Path]) -> None:
        """Write the vocabulary into a file: plain text, or sentencepiece's own for subwords."""
        Path(path).write_bytes(self.to_bytes())

    def config(self) -> Dict[str, Any]:
        """Return what a checkpoint should keep to know this vocabulary again: see `check_vocabulary`."""
        return {"kind": self.kind, "size": len(self), "fingerprint": fingerprint(self.to_bytes())}


def fingerprint(content: bytes) -> str:
    """Return a short text that the bytes of another vocabulary do not have."""
    return hashlib.sha256(content).hexdigest()[:16]


def check_vocabulary(vocabulary: Vocabulary, config: Mapping[str, Any], name: str = "vocabulary") -> None:
    """Do nothing if this is the vocabulary that a network was trained with.

    Parameters
    ----------
    vocabulary : Vocabulary
    config : mapping
        What its `config` gave then, kept beside the network.
    name : str
        What errors call it: its file, say.

    Raises
    ------
    DataError
        It is another one. Its numbers would mean other words than those that the network has learnt.

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
            f"{', '.join(f'{key} {config.get(key)}' for key in differing)}, as the checkpoint says. Use the vocabulary that was "
            "saved beside the checkpoint."
        )


def spoken(numbers: Sequence[int], size: int) -> List[int]:
    """Return what is said of a sentence: the numbers before `EOS`, without `PAD` and `BOS`."""
    said = checked("decode", numbers, size)
    end = said.index(EOS) if EOS in said else len(said)
    return [number for number in said[:end] if number not in (PAD, BOS)]


def checked(operation: str, numbers: Sequence[int], size: int) -> List[int]:
    """Return numbers as ints, having checked that each is one of a vocabulary of this size."""
    found = [int(number) for number in numbers]
    wrong = [number for number in found if not 0 <= number < size]
    if wrong:
        raise DataError(
            f"{operation}: got {wrong[0]} for a vocabulary of {size}; expected numbers from 0 to {size - 1}. Use the "
            "vocabulary that the network was trained with."
        )
    return found

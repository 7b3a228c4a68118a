"""Vocabularies of subwords, words or characters: models of sentencepiece, with four special tokens."""

from __future__ import annotations

import hashlib
import io
import re
from collections import Counter
from pathlib import Path
from typing import Any, Dict, Iterable, List, Optional, Sequence, Union

from ...checks import one_of, path_of, real_number, short, whole_number
from ...errors import DataError
from ...runtime.environment import require
from .pairs import normalise

PAD, BOS, EOS, UNK = range(4)  # padding, begin and end of a sentence, unknown
_NAMES = ("pad", "bos", "eos", "unk")  # as sentencepiece calls them
SPECIAL = tuple(f"<{name}>" for name in _NAMES)
UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_KINDS = {"subwords": "unigram", "words": "word", "characters": "char"}
_COVERAGE = 0.9995
_MOST_LETTERS = 500  # more than any alphabet has; the others are noise
_MANY = re.compile("[\uac00-\ud7a3\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")  # Hangul syllables, Chinese characters


class Vocabulary:
    """Text -> numbers, and back. `PAD`, `BOS`, `EOS` and `UNK` are 0, 1, 2 and 3 in each.

    Parameters
    ----------
    model : bytes
        The content of sentencepiece's `.model` file, trained with these numbers: see `build_vocabulary`.

    Raises
    ------
    DataError
        The bytes are not such a model.
    MissingExtraError
        sentencepiece is not installed.
    """

    def __init__(self, model: bytes) -> None:
        self._processor = require("sentencepiece", "seq2seq", "Vocabulary").SentencePieceProcessor()
        self._model = bytes(model)
        try:
            self._processor.load_from_serialized_proto(self._model)
        except RuntimeError as error:
            raise DataError(
                f"Vocabulary: got {len(model)} bytes that sentencepiece cannot read; expected a sentencepiece model. Make it "
                "with build_vocabulary."
            ) from error
        found = [getattr(self._processor, f"{name}_id")() for name in _NAMES]
        if found != [PAD, BOS, EOS, UNK]:
            raise DataError(
                f"Vocabulary: got a model with pad, bos, eos and unk at {', '.join(map(str, found))}; expected 0, 1, 2 and 3. "
                "Train it with build_vocabulary, or with --pad_id=0 --bos_id=1 --eos_id=2 --unk_id=3."
            )

    def __len__(self) -> int:
        """Return the number of tokens, including the special ones."""
        return int(self._processor.get_piece_size())

    def encode(self, text: str) -> List[int]:
        """Normalise a text and return the numbers of its tokens, without `BOS` and `EOS`."""
        return list(self._processor.encode(_without_spaces_sign(normalise(text))))

    def decode(self, numbers: Sequence[int]) -> str:
        """Return the text of some numbers, up to the first `EOS`. `PAD` and `BOS` are left out; `UNK` is U+FFFD."""
        valid = checked("decode", numbers, len(self))
        end = valid.index(EOS) if EOS in valid else len(valid)
        return normalise(self._processor.decode([number for number in valid[:end] if number not in (PAD, BOS)]))

    def tokens(self, numbers: Sequence[int]) -> List[str]:
        """Return each number's token, for display."""
        return [self._processor.id_to_piece(n) for n in checked("tokens", numbers, len(self))]

    def save(self, path: Union[str, Path]) -> None:
        """Write the vocabulary into a file, a model of sentencepiece."""
        Path(path).write_bytes(self._model)

    def config(self) -> Dict[str, Any]:
        """Return values that identify this vocabulary, which a checkpoint keeps."""
        return {"size": len(self), "fingerprint": fingerprint(self._model)}


def build_vocabulary(
    texts: Iterable[str], kind: str = "subwords", *, size: int = 8000, character_coverage: Optional[float] = None
) -> Vocabulary:
    """Return a vocabulary learnt from a corpus by sentencepiece, which the extra `seq2seq` installs.

    Parameters
    ----------
    texts : iterable of str
        Sentences of one language; those of both for a vocabulary that they share.
    kind : "subwords", "words" or "characters"
        Words are divided by spaces only.
    size : int
        The most tokens, including the 4 special ones.
    character_coverage : float, 0.98 to 1, optional
        The share of the text that the characters of a subword vocabulary cover; rarer characters are unknown. 1 covers all. By
        default, it covers all letters, digits and marks (the 500 most frequent ones), and 0.9995 of the text where it has Hangul
        syllables or Chinese characters.

    Raises
    ------
    DataError
        There is no text, a model of this size cannot be learnt from it, or an option is invalid.
    MissingExtraError
        sentencepiece is not installed.

    Examples
    --------
    >>> vocabulary = build_vocabulary(["one hundred", "one hundred one"], "words")
    >>> vocabulary.tokens(range(len(vocabulary)))
    ['<pad>', '<bos>', '<eos>', '<unk>', '▁one', '▁hundred']
    """
    one_of("build_vocabulary", "kind", kind, tuple(_KINDS), advice="Pass one of these.", error=DataError)
    if character_coverage is not None:
        name, advice = "character_coverage", "1 covers all characters."
        real_number("build_vocabulary", name, character_coverage, low=0.98, high=1.0, advice=advice, error=DataError)
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        raise DataError(f"build_vocabulary: got texts={short(texts)}; expected a list of strings. Pass sentences.")
    lines = [_without_spaces_sign(line) for line in map(normalise, texts) if line]
    if not lines:
        raise DataError("build_vocabulary: got no text; expected one sentence or more. Check the corpus.")
    whole_number("build_vocabulary", "size", size, low=len(SPECIAL) + 1, advice="Raise it.", error=DataError)
    is_usual = kind == "subwords" and character_coverage is None
    sentencepiece, model = require("sentencepiece", "seq2seq", "build_vocabulary"), io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type=_KINDS[kind],
            vocab_size=int(size),
            hard_vocab_limit=False,  # a small corpus has fewer
            add_dummy_prefix=kind != "characters",
            character_coverage=_COVERAGE if is_usual else character_coverage or 1.0,
            required_chars=letters_of(lines) if is_usual else "",
            normalization_rule_name="identity",  # this package applies NFC; NFKC would change the text
            max_sentence_length=2**20,  # bytes; longer ones are left out
            **{f"{name}_id": number for number, name in enumerate(_NAMES)},
            **{f"{name}_piece": piece for name, piece in zip(_NAMES, SPECIAL)},
            unk_surface=UNKNOWN,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        cause = str(error).rpartition("] ")[2].strip()  # without the line of sentencepiece's source
        raise DataError(
            f"build_vocabulary: got {len(lines)} sentences for {size} {kind} (sentencepiece: {cause}); expected more tokens than "
            "characters. Raise the size, or lower the coverage of characters."
        ) from error
    return Vocabulary(model.getvalue())


def letters_of(lines: Sequence[str]) -> str:
    """Return the letters, digits and marks of text, up to 500, but no Hangul syllables and no Chinese characters."""
    counts = Counter("".join(lines).replace(" ", ""))
    found = [letter for letter in sorted(counts, key=lambda one: (-counts[one], one)) if not _MANY.match(letter)]
    return "".join(found[:_MOST_LETTERS])


def load_vocabulary(path: Union[str, Path]) -> Vocabulary:
    """Return a vocabulary that `Vocabulary.save` wrote.

    Raises
    ------
    DataError
        The file is not a vocabulary, or is damaged.
    MissingExtraError
        sentencepiece is not installed.
    OSError
        The file cannot be read.
    """
    return Vocabulary(path_of("load_vocabulary", "path", path, error=DataError).read_bytes())


def fingerprint(content: bytes) -> str:
    """Return a short text that identifies the bytes of a vocabulary."""
    return hashlib.sha256(content).hexdigest()[:16]


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


def _without_spaces_sign(text: str) -> str:
    return text.replace("▁", "_")  # sentencepiece's sign for a space

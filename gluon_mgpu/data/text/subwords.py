"""Vocabularies of subwords, by sentencepiece."""

from __future__ import annotations

import io
from typing import List, Sequence

from ...errors import DataError
from ...runtime.environment import require
from .pairs import normalise
from .vocabulary import BOS, EOS, PAD, SPECIAL, UNK, UNKNOWN, Vocabulary, checked, spoken


class SubwordVocabulary(Vocabulary):
    """A vocabulary of subwords, stored as a sentencepiece model.

    Parameters
    ----------
    model : bytes
        The content of sentencepiece's `.model` file, trained with the numbers of `SPECIAL`.

    Raises
    ------
    DataError
        The bytes are not such a model.
    MissingExtraError
        sentencepiece is not installed.
    """

    kind = "subwords"

    def __init__(self, model: bytes) -> None:
        sentencepiece = require("sentencepiece", "seq2seq", "SubwordVocabulary")
        self._model = bytes(model)
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.load_from_serialized_proto(self._model)
        except RuntimeError as error:
            raise DataError(
                f"SubwordVocabulary: got {len(model)} bytes that sentencepiece cannot read; expected a sentencepiece "
                "model. Make it with build_vocabulary."
            ) from error
        named = self._processor
        if (named.pad_id(), named.bos_id(), named.eos_id(), named.unk_id()) != (PAD, BOS, EOS, UNK):
            raise DataError(
                f"SubwordVocabulary: got a model with pad, bos, eos and unk at {named.pad_id()}, {named.bos_id()}, "
                f"{named.eos_id()} and {named.unk_id()}; expected 0, 1, 2 and 3. Train it with build_vocabulary, or with "
                "--pad_id=0 --bos_id=1 --eos_id=2 --unk_id=3."
            )

    def __len__(self) -> int:
        return int(self._processor.get_piece_size())

    def encode(self, text: str) -> List[int]:
        return list(self._processor.encode(_without_spaces_sign(normalise(text))))

    def decode(self, numbers: Sequence[int]) -> str:
        return normalise(self._processor.decode(spoken(numbers, len(self))))

    def tokens(self, numbers: Sequence[int]) -> List[str]:
        return [self._processor.id_to_piece(n) for n in checked("tokens", numbers, len(self))]

    def to_bytes(self) -> bytes:
        return self._model


def train_subwords(lines: List[str], size: int, character_coverage: float) -> bytes:
    """Return a sentencepiece model, learnt from normalised text, with the numbers of `SPECIAL`.

    Raises
    ------
    DataError
        A model of this size cannot be learnt from this text.
    MissingExtraError
        sentencepiece is not installed.
    """
    sentencepiece = require("sentencepiece", "seq2seq", "build_vocabulary")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(map(_without_spaces_sign, lines)),
            model_writer=model,
            vocab_size=size,
            hard_vocab_limit=False,  # a small corpus has fewer
            character_coverage=character_coverage,
            normalization_rule_name="identity",  # this package applies NFC; NFKC would change the text
            max_sentence_length=2**20,  # bytes; longer ones are left out
            pad_id=PAD,
            bos_id=BOS,
            eos_id=EOS,
            unk_id=UNK,
            pad_piece=SPECIAL[PAD],
            bos_piece=SPECIAL[BOS],
            eos_piece=SPECIAL[EOS],
            unk_piece=SPECIAL[UNK],
            unk_surface=UNKNOWN,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        cause = str(error).rpartition("] ")[2].strip()  # without the line of sentencepiece's source
        raise DataError(
            f"build_vocabulary: got {len(lines)} sentences for {size} subwords with character_coverage {character_coverage} "
            f"(sentencepiece: {cause}); expected more subwords than characters. Raise size, lower "
            "character_coverage, or add text."
        ) from error
    return model.getvalue()


def _without_spaces_sign(text: str) -> str:
    return text.replace("▁", "_")  # sentencepiece's sign for a space

"""Translate with the ONNX files of a translator. Needs NumPy, onnxruntime and sentencepiece. No MXNet.

    echo "이십오" | python translate.py
    python translate.py "이십오" "칠월 삼일"

`translate.py` in a folder of exported files is a copy of this module.
"""

from __future__ import annotations

import json
import sys
import unicodedata
from importlib import import_module
from pathlib import Path
from typing import Any, Dict, List, Sequence, Union

import numpy as np

_PAD, _BOS, _EOS, _UNK = range(4)


class OnnxTranslator:
    """Greedy translation of text by an encoder and a decoder in ONNX Runtime.

    Parameters
    ----------
    folder : str or pathlib.Path
        With `encoder.onnx`, `decoder.onnx`, `source.vocab`, `target.vocab` and `translator.json`.
    **options
        Of `onnxruntime.InferenceSession`, such as `providers`.
    """

    def __init__(self, folder: Union[str, Path], **options: Any) -> None:
        onnxruntime = import_module("onnxruntime")
        folder = Path(folder)
        options = {"providers": ["CPUExecutionProvider"], **options}
        self._encoder, self._decoder = (
            onnxruntime.InferenceSession(str(folder / f"{part}.onnx"), **options) for part in ("encoder", "decoder")
        )
        self.source, self.target = (Vocabulary((folder / f"{side}.vocab").read_bytes()) for side in ("source", "target"))
        self._config: Dict[str, Any] = json.loads((folder / "translator.json").read_text(encoding="utf-8"))

    def translate(self, texts: Sequence[str]) -> List[str]:
        """Return the translation of each text; a text of nothing but spaces becomes an empty one."""
        sentences = [self.source.encode(text) for text in ([texts] if isinstance(texts, str) else texts)]
        found = iter(self.translate_tokens([sentence for sentence in sentences if sentence]))
        return [self.target.decode(next(found)) if sentence else "" for sentence in sentences]

    def translate_tokens(self, sentences: Sequence[Sequence[int]]) -> List[List[int]]:
        """Return the translations of sentences of tokens, both without the end of the sentence."""
        if not sentences:
            return []
        lengths = np.array([len(sentence) + 1 for sentence in sentences], "int32")
        source = np.zeros((len(sentences), lengths.max()), "int32")
        for row, sentence in zip(source, sentences):
            row[: len(sentence) + 1] = [*sentence, _EOS]
        *state, keys, values = self._encoder.run(None, {"source": source, "lengths": lengths})
        limits = self._config["length_factor"] * lengths + self._config["extra_tokens"]
        found: List[List[int]] = [[] for _ in sentences]
        is_open = np.ones(len(sentences), bool)
        token = np.full((len(sentences), 1), _BOS, "int32")
        for step in range(1, limits.max() + 1):
            memory = {"keys": keys, "values": values, "lengths": lengths}
            inputs = {"token": token, **memory, **{f"state{i}": one for i, one in enumerate(state)}}
            scores, *state, _ = self._decoder.run(None, inputs)
            scores[:, _UNK] = -np.inf
            for scored, tokens in zip(scores, found):
                scored[_repeating(tokens, self._config["max_repeats"])] = -np.inf
            token = scores.argmax(axis=1).astype("int32").reshape(-1, 1)
            for i in np.flatnonzero(is_open):
                if token[i, 0] != _EOS:
                    found[i].append(int(token[i, 0]))
                is_open[i] = token[i, 0] != _EOS and step < limits[i]
            if not is_open.any():
                break
        return found


def _repeating(tokens: List[int], most: int) -> List[int]:
    """Return the next tokens with which the last tokens would stand more than `most` times in a row."""
    size = len(tokens)
    return [
        tokens[-period]
        for period in range(1, (size + 1) // (most + 1) + 1)
        if all(tokens[i] == tokens[i - period] for i in range(size - period * most + 1, size))
    ]


class Vocabulary:
    """The tokens of a side: a model of sentencepiece."""

    def __init__(self, model: bytes) -> None:
        self._processor = import_module("sentencepiece").SentencePieceProcessor()
        self._processor.load_from_serialized_proto(model)

    def encode(self, text: str) -> List[int]:
        """Return the numbers of a text's tokens."""
        return list(self._processor.encode(normalise(text).replace("\u2581", "_")))  # sentencepiece's sign for a space

    def decode(self, numbers: Sequence[int]) -> str:
        """Return the text of some numbers."""
        return normalise(self._processor.decode([number for number in numbers if number not in (_PAD, _BOS)]))


def normalise(text: str) -> str:
    """Return text in Unicode's form NFC, with single spaces between words and none around them."""
    return " ".join(unicodedata.normalize("NFC", text).split())


if __name__ == "__main__":
    if sys.argv[1:] in (["-h"], ["--help"]):
        print(__doc__)
        sys.exit()
    sys.stdin.reconfigure(encoding="utf-8-sig")  # type: ignore[union-attr]  # Windows' editors begin a file with a mark
    translator = OnnxTranslator(Path(__file__).parent)
    try:
        for line in sys.argv[1:] or sys.stdin:
            print(translator.translate([line])[0], flush=True)
    except UnicodeDecodeError as error:
        sys.exit(f"translate.py: got text that is not UTF-8 ({error}); expected UTF-8. Convert it with iconv.")

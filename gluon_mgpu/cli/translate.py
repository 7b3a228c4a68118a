"""gluon-mgpu translate: text, by a trained translator."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Sequence

import click

from ..checks import short
from ..data.text.pairs import read_lines
from ..data.text.vocabulary import UNK, Vocabulary
from ..devices.select import use_devices
from ..errors import DataError
from ..models.seq2seq.search import MAX_REPEATS, plot_attention
from ..models.seq2seq.translator import BEAM_SIZE, CONFIG_FILE, TranslatedText, load_translator
from ..plots import figure, save
from ._gpus import choosing_gpus
from ._options import best_of

_NOTES = 10  # lines with unknown words that are noted
_AT_ONCE = 1024  # lines of a long input that are translated together
_JOINED = "\uffed"  # marks tokens without a space between them; few fonts have it


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path), required=False)
@click.option(
    "--model",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs/seq2seq/best"),
    show_default=True,
    help="Folder of train seq2seq, whose best is used; or best or last itself.",
)
@click.option("--devices", default="auto", show_default=True, help="As for train.")
@choosing_gpus
@click.option(
    "--beam",
    type=click.IntRange(1),
    help="Hypotheses per sentence; 1 is greedy. By default those of the best validation score in training; if unknown, "
    f"{BEAM_SIZE}.",
)
@click.option("--n-best", type=click.IntRange(1), default=1, show_default=True, help="Translations per sentence, best first.")
@click.option("--scores", is_flag=True, help="Print each translation's score and a tab before it.")
@click.option(
    "--attention",
    "picture",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Figure of the attention of the first sentence's translation (PNG).",
)
@click.option(
    "--max-repeats",
    type=click.IntRange(0),
    default=MAX_REPEATS,
    show_default=True,
    help="How often the same tokens may occur in a row; 0 for no limit.",
)
@click.option(
    "--batch-size", type=click.IntRange(1), default=64, show_default=True, help="Sentences per batch, over all devices."
)
def translate(
    file: Optional[Path],
    model: Path,
    devices: str,
    choice: Dict[str, Any],
    beam: Optional[int],
    n_best: int,
    scores: bool,
    picture: Optional[Path],
    max_repeats: int,
    batch_size: int,
) -> None:
    """Translate the sentences of FILE, one per line; without it those of standard input, or as you type them.

    It prints the translations in the order of the sentences, one per line. With --n-best, lines begin with the sentence's number,
    counted from 1, and a tab.
    """
    if beam is not None and n_best > beam:
        raise click.UsageError(f"got --n-best {n_best} of --beam {beam}; expected as many or fewer. Widen the beam.")
    if picture is not None:
        figure()  # raises now if matplotlib is missing
    with use_devices(devices, **choice) as ctx:
        translator = load_translator(best_of(model, [CONFIG_FILE]), ctx)
        beam = beam or max(n_best, translator.beam_size or BEAM_SIZE)
        number, note = 0, UnknownNotes(translator.source_vocabulary)
        for texts in _texts(file):
            for place, text in enumerate(texts, number + 1):
                note.check(place, text)
            found = translator.translate(
                texts,
                beam_size=beam,
                num_best=n_best,
                max_repeats=max_repeats or None,
                batch_size=batch_size,
                attention=picture is not None,
            )
            for best in found:
                number += 1
                _print(number if n_best > 1 else None, best, scores)
            picture = _draw(found, picture)
        note.end()


class UnknownNotes:
    """Notes on standard error about words that the source vocabulary lacks: of ten lines, then how many more."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._num_lines = 0

    def check(self, number: int, text: str) -> None:
        """Note the unknown words of a line."""
        if UNK not in self._vocabulary.encode(text):
            return
        self._num_lines += 1
        if self._num_lines <= _NOTES:
            words = [word for word in text.split() if UNK in self._vocabulary.encode(word)]
            print(f"line {number}: the model has not seen parts of {short(' '.join(words))}", file=sys.stderr)

    def end(self) -> None:
        """Report how many lines were not noted."""
        if self._num_lines > _NOTES:
            print(f"{self._num_lines - _NOTES} more lines have unknown parts", file=sys.stderr)


def _texts(file: Optional[Path]) -> Iterator[List[str]]:
    """Yield lists of sentences: one at a time from a terminal, else many at once."""
    if file is None and sys.stdin.isatty():
        yield from _typed()
        return
    lines = read_lines("translate", file) if file is not None else _piped()
    for begin in range(0, len(lines), _AT_ONCE):
        yield lines[begin : begin + _AT_ONCE]


def _typed() -> Iterator[List[str]]:
    print("Type a sentence. Ctrl-D ends.", file=sys.stderr)
    while True:
        try:
            yield [input("> ")]
        except EOFError:
            return


def _piped() -> List[str]:
    try:
        text = sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"translate: got byte 0x{error.object[error.start]:02x} on standard input, which is not UTF-8; expected UTF-8. "
            "Convert it with iconv."
        ) from error
    lines = text.split("\n")
    return lines if lines[-1] else lines[:-1]


def _print(number: Optional[int], best: Sequence[TranslatedText], scores: bool) -> None:
    for one in best:
        cells = ([str(number)] if number else []) + ([f"{one.score:.4f}"] if scores else []) + [one.text]
        print("\t".join(cells), flush=True)


def _draw(found: Sequence[Sequence[TranslatedText]], picture: Optional[Path]) -> Optional[Path]:
    """Save the first attention that was found; return the path if there was none yet."""
    first = next((best[0] for best in found if best[0].attention is not None), None)
    if picture is None or first is None or first.attention is None:
        return picture
    picture.parent.mkdir(parents=True, exist_ok=True)
    source, target = ([token.strip(_JOINED) for token in tokens] for tokens in (first.source_tokens, first.target_tokens))
    with warnings.catch_warnings(record=True) as caught:  # matplotlib warns of each letter that no font has, plot_attention once
        warnings.simplefilter("always")
        save(plot_attention(first.attention, source, target), picture)
    for warning in caught[:1]:
        print(warning.message, file=sys.stderr)
    print(f"saved {picture}", file=sys.stderr)
    return None

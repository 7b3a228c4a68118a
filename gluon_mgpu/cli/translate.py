"""gluon-mgpu translate: what a trained translator makes of text."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Sequence

import click

from ..data.text.pairs import read_lines
from ..devices.select import use_devices
from ..errors import DataError
from ..models.seq2seq.search import plot_attention
from ..models.seq2seq.translator import CONFIG_FILE, TranslatedText, load_translator
from ..plots import figure, save
from ._gpus import choosing_gpus
from ._options import best_of

_AT_ONCE = 1024  # lines of a long input that are translated together
_JOINED = "\uffed"  # the sign of words for no space, which few fonts have


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path), required=False)
@click.option(
    "--model",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs/seq2seq/best"),
    show_default=True,
    help="Folder of train seq2seq, of which best is taken, or best or last itself.",
)
@click.option("--devices", default="auto", show_default=True, help="As for train.")
@choosing_gpus
@click.option("--beam", type=click.IntRange(1), default=5, show_default=True, help="Hypotheses a sentence; 1 is greedy.")
@click.option("--n-best", type=click.IntRange(1), default=1, show_default=True, help="Translations a sentence, best first.")
@click.option("--scores", is_flag=True, help="Print each translation's score and a tab before it.")
@click.option(
    "--attention",
    "picture",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Picture of where each token of the first sentence's translation looked (PNG).",
)
@click.option("--batch-size", type=click.IntRange(1), default=64, show_default=True, help="Sentences at once, over all devices.")
def translate(
    file: Optional[Path],
    model: Path,
    devices: str,
    choice: Dict[str, Any],
    beam: int,
    n_best: int,
    scores: bool,
    picture: Optional[Path],
    batch_size: int,
) -> None:
    """Translate the sentences of FILE, a line each; without it those of standard input, or as you type them.

    Prints the translations in the order of the sentences, a line each. With --n-best, lines begin with the sentence's number,
    counted from 1, and a tab.
    """
    if n_best > beam:
        raise click.UsageError(f"got --n-best {n_best} of --beam {beam}; expected as many or fewer. Widen the beam.")
    if picture is not None:
        figure()  # if matplotlib is missing, it is told now
    with use_devices(devices, **choice) as ctx:
        translator = load_translator(best_of(model, [CONFIG_FILE]), ctx)
        number = 0
        for texts in _texts(file):
            options = {"beam_size": beam, "num_best": n_best, "batch_size": batch_size}
            found = translator.translate(texts, attention=picture is not None, **options)
            for best in found:
                number += 1
                _print(number if n_best > 1 else None, best, scores)
            picture = _draw(found, picture)


def _texts(file: Optional[Path]) -> Iterator[List[str]]:
    """Yield lists of sentences: as they are typed at a terminal, else many at once."""
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
    """Draw the first sentence that has one; return the picture that is still to be drawn."""
    first = next((best[0] for best in found if best[0].attention is not None), None)
    if picture is None or first is None or first.attention is None:
        return picture
    picture.parent.mkdir(parents=True, exist_ok=True)
    source, target = ([token.strip(_JOINED) for token in tokens] for tokens in (first.source_tokens, first.target_tokens))
    with warnings.catch_warnings(record=True) as told:  # matplotlib warns of each letter that no font has, plot_attention once
        warnings.simplefilter("always")
        save(plot_attention(first.attention, source, target), picture)
    for warning in told[:1]:
        print(warning.message, file=sys.stderr)
    print(f"saved {picture}", file=sys.stderr)
    return None

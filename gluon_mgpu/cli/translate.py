"""gluon-mgpu translate: text, by a trained translator."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterator, List, Optional, Sequence

import click

from ..checks import short
from ._options import FILE, FOLDER, best_of, count, devices_option

if TYPE_CHECKING:
    from ..data import Vocabulary
    from ..models.seq2seq.translator import TranslatedText

_AT_ONCE = 1024  # lines of a long input that are translated together
_SPACE = "▁"  # sentencepiece's sign


@click.command()
@click.argument("file", type=FILE, required=False)
@click.option(
    "--model",
    type=FOLDER,
    default=Path("runs/seq2seq/best"),
    help="Folder of train seq2seq, whose best is used; or best or last itself.",
)
@devices_option
@count(
    "--beam",
    help="Hypotheses per sentence; 1 is greedy. By default those of the best validation score at the end of training; 1 if the "
    "training has not ended.",
)
@count("--n-best", default=1, help="Translations per sentence, best first.")
@click.option("--scores", is_flag=True, help="Print each translation's score and a tab before it.")
@click.option("--attention", "picture", type=FILE, help="Figure of the attention of the first sentence's translation (PNG).")
@count("--batch-size", default=64, help="Sentences per batch, over all devices.")
def translate(
    file: Optional[Path],
    model: Path,
    beam: Optional[int],
    n_best: int,
    scores: bool,
    picture: Optional[Path],
    batch_size: int,
    **choice: Any,
) -> None:
    """Translate sentences with a trained translator.

    FILE has one per line; without it, or for -, those of standard input are translated. It prints the translations in the order
    of the sentences, one per line. With --n-best, lines begin with the sentence's number, counted from 1, and a tab.
    """
    if beam is not None and n_best > beam:
        raise click.UsageError(f"got --n-best {n_best} of --beam {beam}; expected at most the beam. Widen the beam.")
    if picture is not None:
        from ..plots import figure

        kinds = figure().canvas.get_supported_filetypes()  # raises now if matplotlib is missing
        if Path(picture).suffix[1:].lower() not in kinds:
            raise click.BadParameter(f"got {picture}; expected a name that ends with .png. Pass attention.png.")
    from ..devices.select import use_devices
    from ..models.seq2seq.translator import load_translator

    with use_devices(**choice) as ctx:
        folder = best_of(model)
        translator = load_translator(folder, ctx)
        beam = beam or max(n_best, translator.beam_size or 1)
        told = f"{beam} beams" if beam > 1 else "1 beam (greedy)"
        click.echo(f"translating with {folder}, {told}, on {', '.join(map(str, ctx))}", err=True)
        number = 0
        for texts in _texts(file):
            for place, text in enumerate(texts, number + 1):
                _note_unknown(translator.source_vocabulary, place, text)
            options = {"beam_size": beam, "num_best": n_best, "batch_size": batch_size, "attention": picture is not None}
            found = translator.translate(texts, **options)
            for best in found:
                number += 1
                _print(number if n_best > 1 else None, best, scores)
            picture = _draw(found, picture)
        if picture is not None:
            click.echo(f"got no sentence with words; {picture} was not drawn", err=True)


def _note_unknown(vocabulary: Vocabulary, number: int, text: str) -> None:
    """Note on standard error the words of a line that the source vocabulary lacks."""
    from ..data import UNK

    if UNK in vocabulary.encode(text):
        words = [word for word in text.split() if UNK in vocabulary.encode(word)]
        print(f"line {number}: the model has not seen parts of {short(' '.join(words))}", file=sys.stderr)


def _texts(file: Optional[Path]) -> Iterator[List[str]]:
    """Yield lists of sentences."""
    from ..data.text.pairs import lines_of, read_lines

    if file is not None and str(file) != "-":
        lines = read_lines("translate", file)
    else:
        lines = lines_of("translate", sys.stdin.buffer.read() if sys.stdin else b"", "standard input")
    for begin in range(0, len(lines), _AT_ONCE):
        yield lines[begin : begin + _AT_ONCE]


def _print(number: Optional[int], best: Sequence[TranslatedText], scores: bool) -> None:
    for one in best:
        cells = ([str(number)] if number else []) + ([f"{one.score:.4f}"] if scores else []) + [one.text]
        print("\t".join(cells), flush=True)


def _draw(found: Sequence[Sequence[TranslatedText]], picture: Optional[Path]) -> Optional[Path]:
    """Save the first attention that was found; return the path if there was none yet."""
    first = next((best[0] for best in found if best[0].attention is not None), None)
    if picture is None or first is None or first.attention is None:
        return picture
    from ..models import plot_attention
    from ..plots import save

    picture.parent.mkdir(parents=True, exist_ok=True)
    source, target = ([one.strip(_SPACE) or _SPACE for one in tokens] for tokens in (first.source_tokens, first.target_tokens))
    with warnings.catch_warnings(record=True) as caught:  # matplotlib warns of each letter that no font has, plot_attention once
        warnings.simplefilter("always")
        save(plot_attention(first.attention, source, target), picture)
    for warning in caught[:1]:
        print(warning.message, file=sys.stderr)
    print(f"saved {picture}", file=sys.stderr)
    return None

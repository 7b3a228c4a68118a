"""The texts, rows and tables of the seq2seq benchmark: two sizes of text and network, on one context and on several."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import List, Optional, Sequence, Tuple

import numpy as np
from case import Case
from compare import Row
from gluon_mgpu.data import PairLoader, build_vocabulary, encode_pairs, korean_numbers
from gluon_mgpu.data.text.vocabulary import UNK
from report import Ranges, Spread, Table, measured, ranged, ratio_to_ours, spread
from sentences import Sentences, write_batches
from workloads import rows_with_threads, single_thread_rows

SIZES = ("large", "korean-numbers")
_LARGE = Case("seq2seq", units=300, embed_size=300, source_vocabulary=8000, target_vocabulary=8000, batch_size=60)
_KOREAN_NUMBERS = Case("seq2seq", units=128, embed_size=64, batch_size=60)  # as in `gluon-mgpu train seq2seq`
_BATCH_TOKENS = 1200
_NUM_PAIRS = 1800

Pairs = Tuple[List[List[int]], List[List[int]]]


@dataclass(frozen=True)
class Text:
    """The sentences of one size, and the case that trains on them.

    Attributes
    ----------
    size : str
        `large`: random sentences of the full length, one batch of 60. `korean-numbers`: the generated text of
        `gluon-mgpu train seq2seq`, with its lengths, network and batches.
    case : Case
    """

    size: str
    case: Case


def make_text(size: str, folder: Path, *, quick: bool = False) -> Text:
    """Write the batches of a text into a folder and return the text. `quick`: a text that only shows whether it works."""
    case, pairs, batch_tokens = _large(quick) if size == "large" else _korean_numbers(quick)
    corpus = folder / size
    corpus.mkdir()
    loader = PairLoader(*pairs, batch_tokens, shuffle=True, num_buckets=16)
    write_batches(str(corpus), [Sentences(*X, *y) for X, y in loader])
    return Text(size, replace(case, corpus=str(corpus), num_sentences=len(pairs[0])))


def seq2seq_rows(contenders: Sequence[str], num_devices: Sequence[int], text: Text) -> Tuple[List[Row], List[Row]]:
    """Return the rows of a text, in two parts that are measured one after the other: one context with all cores; several
    contexts that share the cores, with one context of one thread to compare them with.
    """
    alone, several = ([k for k in num_devices if (k > 1) == many] for many in (False, True))
    parts = rows_with_threads(contenders, alone, text.case), rows_with_threads(contenders, several, text.case)
    if several:
        parts[1][:0] = single_thread_rows([name for name in contenders if name in ("ours", "torch")], text.case)
    for row in parts[0] + parts[1]:
        row.group = f"{text.size}, {row.group}"
    return parts


def speed_table(rows: Sequence[Row]) -> Table:
    """Return the table of sentences per second, with each contender's time divided by ours."""
    lines = [
        [row.group, row.contender, ranged(sentences_per_s(row)), ranged(ratio_to_ours(row, rows, "pass_s"))]
        for row in measured(rows)
    ]
    return "training, sentences/s: median (range)", ["on", "contender", "sentences/s", "time / ours"], lines


def bars(rows: Sequence[Row]) -> Ranges:
    """Return the bars for `plot_ranges`: each contender's speed divided by ours, because absolute speeds differ tenfold."""
    drawn: Ranges = {}
    for row in rows:
        time = ratio_to_ours(row, rows, "pass_s")
        if time:
            drawn.setdefault(row.group, {})[row.contender] = (1 / time.median, 1 / time.high, 1 / time.low)
    return drawn


def sentences_per_s(row: Row) -> Optional[Spread]:
    """Return a row's speed; None if it was not measured."""
    return None if row.reason else spread([row.case.num_sentences / found["pass_s"] for found in row.rounds])


def _large(quick: bool) -> Tuple[Case, Pairs, int]:
    case = replace(_LARGE, units=8, embed_size=8, source_vocabulary=20, target_vocabulary=20, batch_size=4) if quick else _LARGE
    tokens = np.random.RandomState(0).randint(UNK, case.source_vocabulary, (2, case.batch_size, case.num_tokens - 1))
    source, target = tokens.tolist()
    return case, (source, target), 2 * case.num_tokens * case.batch_size


def _korean_numbers(quick: bool) -> Tuple[Case, Pairs, int]:
    pairs = korean_numbers(80 if quick else _NUM_PAIRS, 0)
    vocabularies = build_vocabulary(pairs.source, "characters"), build_vocabulary(pairs.target, "words")
    case = replace(_KOREAN_NUMBERS, source_vocabulary=len(vocabularies[0]), target_vocabulary=len(vocabularies[1]))
    return replace(case, units=8, embed_size=8) if quick else case, encode_pairs(pairs, *vocabularies), _BATCH_TOKENS

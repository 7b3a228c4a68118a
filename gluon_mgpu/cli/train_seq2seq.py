"""The program of gluon-mgpu train seq2seq."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from types import SimpleNamespace
from typing import Any, Dict, List, Sequence, Tuple

import click

from ..data import (
    PairLoader,
    SentencePairs,
    Vocabulary,
    build_vocabulary,
    encode_pairs,
    filter_pairs,
    korean_numbers,
    read_pairs,
    read_tsv,
    split_pairs,
)
from ..data.text.vocabulary import SPECIAL
from ..distributed.process import this_process
from ..errors import DataError
from ..loop.callbacks import Callback, EarlyStopping, SaveHistory
from ..loop.history import History
from ..models import SequenceLoss, unigram_log_p
from ..models.seq2seq.training_callbacks import SaveTranslator, TokenProgress, ValidateTranslations
from ..models.seq2seq.translation_scores import has_sacrebleu, score_signatures, translation_scores
from ..models.seq2seq.translator import BEAM_SIZE, Translator, load_translator
from ..runtime.loaded import mxnet as mx
from ..runtime.units import format_column
from ._output import print_once, showing
from ._training import create_trainer, in_processes, num_replicas, prepare_network, prepared_devices, run_fit

Encoded = Tuple[List[List[int]], List[List[int]]]  # source and target sentences

_WARM_UP_STEPS = 100
_MOST_TOKENS = 8000
_MOST_CHARACTERS = 1000  # of a side of a pair
NUM_EXAMPLES = 20000  # of Korean numbers
BATCH_TOKENS, _FEWEST_BATCH_TOKENS, _USUAL_STEPS = 1200, 720, 250  # steps per epoch
_CLIP_NORM = 5.0
_NETWORK: Tuple[Dict[str, Any], Dict[str, Any]] = ({"embed_size": 64, "cell": "gru"}, {"embed_size": 128, "cell": "lstm"})
_LABEL_SMOOTHING = (0.0, 0.1)
_OF_NETWORK = ("hidden_size", "num_layers", "dropout")
_MANY_PAIRS = 3000  # from here on, 256 units and dropout 0.3 had the best validation: scripts/benchmarks/RESULTS.md


@dataclass(frozen=True)
class Corpus:
    """Sentence pairs in three parts that share no sentence."""

    name: str
    train: SentencePairs
    valid: SentencePairs
    test: SentencePairs

    def swapped(self) -> Corpus:
        """Return the corpus for the other direction."""
        return Corpus(self.name, self.train.swapped(), self.valid.swapped(), self.test.swapped())


def train(options: SimpleNamespace) -> None:
    """Train a translator with the options of `train seq2seq`."""
    corpus, vocabularies = _load_corpus(options)
    size, dropout = (256, 0.3) if options.data and len(corpus.train) >= _MANY_PAIRS else (128, 0.2 if options.data else 0.0)
    options.hidden_size = options.hidden_size or size
    options.dropout = dropout if options.dropout is None else options.dropout
    with prepared_devices(options) as ctx:
        names = ", ".join(map(str, ctx))
        sizes = f"{len(corpus.train)} pairs to train on, {len(corpus.valid)} to validate, {len(corpus.test)} to test"
        print_once(f"{corpus.name}: {sizes}")
        network = {**_NETWORK[bool(options.data)], **{name: getattr(options, name) for name in _OF_NETWORK}}
        translator = Translator(*vocabularies, **network)
        print_once(f"vocabularies of {' and '.join(str(len(one)) for one in vocabularies)} tokens, on {names}{in_processes()}")
        print_once(f"{options.hidden_size} units, dropout {options.dropout:g}")
        history = _train(translator, corpus, ctx, options)
        best = load_translator(options.output / "best", ctx)
        with showing("translating the sentences to validate") as show:
            beams = _choose_search(best, corpus, options)
            show("translating the sentences to test")
            scores = translation_scores(best.best(corpus.test.source, beam_size=best.beam_size), corpus.test.target)
    print_once(f"saved curves.png, history.csv, history.json, best and last in {options.output}")
    rates = f"{median(history.column('tokens_per_s')):.0f} tokens/s on {names}"
    print_once(f"test of best, {beams}: {'  '.join(format_column(*score) for score in scores.items())}; {rates}")
    signatures = score_signatures(corpus.test.target)
    if signatures:
        print_once("sacrebleu: " + "  ".join(f"{name} {signature}" for name, signature in signatures.items()))


def _train(translator: Translator, corpus: Corpus, ctx: List[mx.Context], options: SimpleNamespace) -> History:
    """Train on the devices, and return the history."""
    vocabularies = translator.source_vocabulary, translator.target_vocabulary
    encoded = [encode_pairs(one, *vocabularies) for one in (corpus.train, corpus.valid)]
    batch_tokens = options.batch_tokens or _usual_batch_tokens(encoded)
    shards = options.virtual_shards or num_replicas(options, ctx) * this_process().num_processes
    train_iter, valid_iter = (
        PairLoader(*part, batch_tokens, shuffle=part is encoded[0], seed=options.seed, num_shards=shards) for part in encoded
    )
    log_p = unigram_log_p(encoded[0][1], len(translator.target_vocabulary))
    if not has_sacrebleu():
        print_once("BLEU and chrF need sacrebleu, which is not installed (extra seq2seq): exact match only")
    translator.net.begin_at(log_p)
    translator.net.hybridize()
    net = prepare_network(translator.net, ctx, options, train_iter)
    steps = len(train_iter) * options.epochs
    warmup_steps = min(_WARM_UP_STEPS, steps // 10)
    trainer = create_trainer(net, "adam", options, steps=steps, warmup_steps=warmup_steps, clip_norm=_CLIP_NORM)
    callbacks: List[Callback] = [  # those that add columns come before those that read them
        ValidateTranslations(translator, corpus.valid),
        TokenProgress(train_iter),
        SaveTranslator(options.output, translator, monitored(options), every=options.checkpoint_every, background=True),
        SaveHistory(options.output),
        EarlyStopping(monitored(options), options.patience - 1),
    ]
    loss = SequenceLoss(_LABEL_SMOOTHING[bool(options.data)])
    return run_fit(net, loss, trainer, train_iter, valid_iter, metrics=(), callbacks=callbacks, options=options)


def _choose_search(best: Translator, corpus: Corpus, options: SimpleNamespace) -> str:
    """Let the beam and the length ratio of a translator be those of the best validation score, and return them as words.

    They are saved in the folders best and last. A wide beam finds the translations of a good model. Of a model that knows little,
    it prefers translations that are too short, unless it searches for the usual length.
    """
    column = "chrf" if monitored(options) == "valid_chrf" else "exact_match"
    ratio = _length_ratio(best, corpus.train)
    wide = f"{BEAM_SIZE} beams"
    searches = {wide: (BEAM_SIZE, None), f"{wide} of usual length": (BEAM_SIZE, ratio), "1 beam": (1, None)}
    found = {}
    for name, (beam_size, length_ratio) in searches.items():  # the first one if they are equally good
        texts = best.best(corpus.valid.source, beam_size=beam_size, length_ratio=length_ratio)
        found[name] = translation_scores(texts, corpus.valid.target)[column]
    chosen = max(found, key=found.__getitem__)
    best.beam_size, best.length_ratio = searches[chosen]
    if not this_process().rank:
        for folder in (options.output / "best", options.output / "last"):
            if folder.is_dir():
                best.save_config(folder)
    compared = ", ".join(f"{name} {format_column(column, score)}" for name, score in found.items())
    print_once(f"validation of best: {compared}")
    return chosen


def _length_ratio(translator: Translator, pairs: SentencePairs) -> float:
    """Return the target tokens per source token, ends included, of at most 10,000 pairs."""
    part = pairs.take(range(min(len(pairs), 10_000)))
    sides = encode_pairs(part, translator.source_vocabulary, translator.target_vocabulary)
    source, target = (sum(len(sentence) + 1 for sentence in side) for side in sides)
    return target / source


def _usual_batch_tokens(encoded: Sequence[Encoded]) -> int:
    """Return the tokens per batch of text: few enough for many updates, and enough for each training and validation pair."""
    num_tokens = sum(len(sentence) + 1 for side in encoded[0] for sentence in side)
    longest = sum(max(len(sentence) for part in encoded for sentence in part[side]) + 1 for side in (0, 1))
    return max(longest, min(BATCH_TOKENS, max(_FEWEST_BATCH_TOKENS, num_tokens // _USUAL_STEPS)))


def monitored(options: SimpleNamespace) -> str:
    """Return the column of the history by which the best model is chosen."""
    if not options.data:
        return "valid_exact_match"
    return "valid_chrf" if has_sacrebleu() else "valid_loss"


def _load_corpus(options: SimpleNamespace) -> Tuple[Corpus, Tuple[Vocabulary, Vocabulary]]:
    """Return the sentence pairs of the options, and the vocabularies of the training pairs."""
    corpus = _from_files(options) if options.data else _korean_numbers(options.seed)
    usual = ["subwords", "subwords"] if options.data else ["characters", "words"]
    if options.reverse:
        corpus, usual = corpus.swapped(), usual[::-1]
    kinds = [options.vocabulary or kind for kind in usual]
    source, target = (
        build_vocabulary(side, kind, size=options.vocabulary_size or _usual_size(side, kind))
        for side, kind in zip((corpus.train.source, corpus.train.target), kinds)
    )
    return corpus, (source, target)


def _usual_size(sentences: Sequence[str], kind: str) -> int:
    """Return the size of a vocabulary: of subwords, few enough for each to occur often enough to be learned.

    More for long sentences, which larger subwords shorten (scripts/benchmarks/RESULTS.md).

    Source: Sennrich, Zhang, "Revisiting low-resource neural machine translation: a case study", 2019.
    """
    if kind != "subwords":
        return _MOST_TOKENS
    num_characters = len(set("".join(sentences)))
    num_words = max(sum(len(text.split()) for text in sentences), sum(map(len, sentences)) / 6)  # where no spaces divide words
    num_longer = round(1.25 * (num_words / len(sentences)) ** 1.5 * len(sentences) ** 0.5)
    return min(_MOST_TOKENS, num_characters + max(num_longer, len(SPECIAL) + 1))  # and the sign for a space


def _korean_numbers(seed: int) -> Corpus:
    """Return the generated pairs. Short ones repeat in a large training set, but each held-out pair is unique."""
    held_out = SentencePairs(*zip(*dict.fromkeys(korean_numbers(2000, seed, held_out=True))))
    half = len(held_out) // 2
    valid, test = held_out.take(range(half)), held_out.take(range(half, len(held_out)))
    return Corpus("Korean numbers", korean_numbers(NUM_EXAMPLES, seed), valid, test)


def _from_files(options: SimpleNamespace) -> Corpus:
    files, num_held_out = options.data, options.held_out
    if len(files) > 2:
        raise click.UsageError(f"got {len(files)} files of --data; expected one, or two: sources and translations.")
    pairs = read_tsv(*files, keep_empty=True) if len(files) == 1 else read_pairs(*files, keep_empty=True)
    filtered = filter_pairs(pairs, max_length=_MOST_CHARACTERS)
    print_once(f"{' and '.join(map(str, files))}: {filtered}")
    num_train = len(filtered.pairs) - 2 * num_held_out
    if num_train < 1:
        raise DataError(
            f"train seq2seq: got {len(filtered.pairs)} pairs; expected more than twice --held-out {num_held_out}. Hold fewer out."
        )
    parts = split_pairs(filtered.pairs, [num_train, num_held_out, num_held_out], seed=options.seed)
    return Corpus(files[0].name, *parts)

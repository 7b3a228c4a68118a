"""gluon-mgpu train seq2seq: trains a translator."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Callable, Dict, List, Sequence, Tuple

import click
import mxnet as mx
import numpy as np

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
    unigram_entropy,
    unigram_log_p,
)
from ..data_parallel.balancer import Balancer
from ..data_parallel.sharding import split_batch
from ..data_parallel.step import SplitFunction
from ..distributed.process import this_process
from ..errors import DataError
from ..loop.callbacks import Callback, EarlyStopping, SaveHistory
from ..loop.history import History
from ..models import SequenceLoss
from ..models.seq2seq.attention import ATTENTIONS
from ..models.seq2seq.callbacks import Plateau, PlateauSchedule, SaveTranslator, TokenProgress, UnigramCheck, ValidateTranslations
from ..models.seq2seq.loss import LAYOUTS
from ..models.seq2seq.recurrence import NUM_GATES
from ..models.seq2seq.scores import has_sacrebleu, score_signatures, translation_scores
from ..models.seq2seq.translator import BEAM_SIZE, Translator, load_translator
from ..runtime.units import format_column
from ..trainer.trainer import Trainer
from ._command import RecordedCommand
from ._options import FILE, all_of, count, devices_option, output_option, positive, seed_option, share, training_options
from ._output import print_once
from ._pipeline import num_replicas, pipeline_options
from ._training import (
    TrainingOptions,
    create_trainer,
    enable_debugging,
    prepare_network,
    prepared_devices,
    run_fit,
    split_options,
)

Encoded = Tuple[List[List[int]], List[List[int]]]  # source and target sentences

_KINDS = ("subwords", "words", "characters")
_WARM_UP_STEPS = 100
_MOST_TOKENS = 8000
BATCH_TOKENS, _FEWEST_BATCH_TOKENS, _USUAL_STEPS = 1200, 720, 250  # steps per epoch
_DEFAULTS: Dict[str, Tuple[Any, Any]] = {  # for Korean numbers, for text
    "embed_size": (64, 128),
    "cell": ("gru", "lstm"),
    "dropout": (0.0, 0.2),
    "label_smoothing": (0.0, 0.1),
    "epochs": (8, 30),
    "lr": (0.003, 0.004),
    "patience": (5, 30),
    "batch_tokens": (BATCH_TOKENS, None),  # by the corpus
}


class _DefaultsByData(RecordedCommand):
    """A command whose options without a default have those of `_DEFAULTS`."""

    def parse_args(self, ctx: click.Context, args: List[str]) -> List[str]:
        rest = super().parse_args(ctx, args)
        for name, values in _DEFAULTS.items():
            if ctx.params[name] is None:
                ctx.params[name] = values[not _is_embedded(ctx.params)]
        return rest


def _by_data(option: Callable[..., Any], name: str, *, help: str, **more: Any) -> Any:
    numbers, text = _DEFAULTS[name[2:].replace("-", "_")]
    return option(name, default=None, show_default=f"{text}; for Korean numbers, {numbers}", help=help, **more)


@dataclass(frozen=True)
class Corpus:
    """Sentence pairs in three parts that share no sentence."""

    name: str
    train: SentencePairs
    valid: SentencePairs
    test: SentencePairs

    def __str__(self) -> str:
        return f"{len(self.train)} pairs to train on, {len(self.valid)} to validate, {len(self.test)} to test"

    def swapped(self) -> Corpus:
        """Return the corpus for the other direction."""
        return Corpus(self.name, self.train.swapped(), self.valid.swapped(), self.test.swapped())


_data_options = all_of(
    click.option("--source", type=FILE, help="Text file, one sentence per line; --target has its translations."),
    click.option("--target", type=FILE, help="Text file with the translations of --source, line by line."),
    click.option("--tsv", type=FILE, help="One file instead: source, tab, target."),
    count("--num-examples", default=20000, help="Number of generated Korean-English pairs, the default data."),
    click.option("--reverse", is_flag=True, help="Translate from the target to the source: English to Korean numbers."),
    count("--num-validation", default=200, help="Pairs of the files for validation after each epoch."),
    count("--num-test", default=200, help="Pairs of the files for the test at the end."),
    count("--max-length", default=1000, help="Characters per side; longer pairs of the files are left out."),
    click.option("--source-vocabulary", type=click.Choice(_KINDS), help="By default subwords; for Korean numbers, characters."),
    click.option("--target-vocabulary", type=click.Choice(_KINDS), help="By default subwords; for Korean numbers, words."),
    click.option(
        "--vocabulary-size",
        type=click.IntRange(5),
        help="Largest number of tokens per side. By default 8000; of subwords fewer for a small corpus: its characters, and 1.25 "
        "times the square root of its number of pairs times the words per sentence to the power of 1.5.",
    ),
)
_network_options = all_of(
    _by_data(count, "--embed-size", help="Size of the token embeddings."),
    count("--hidden-size", default=128, help="Size of the recurrent layers, per direction."),
    count("--num-layers", default=1, help="Number of recurrent layers of encoder and decoder."),
    _by_data(click.option, "--cell", type=click.Choice(list(NUM_GATES)), help="Cell of the recurrent layers."),
    click.option(
        "--attention", type=click.Choice(ATTENTIONS), default="dot", show_default=True, help="Luong's (dot) or Bahdanau's."
    ),
    click.option("--input-feeding", is_flag=True, help="Feed each step's attention result to the next step. Slower."),
    click.option("--tied", is_flag=True, help="Share target embedding and output layer; requires equal sizes."),
    _by_data(share, "--dropout", help="Dropout of embeddings and between layers."),
    _by_data(share, "--label-smoothing", help="Share of each target that is spread over the vocabulary."),
    click.option("--layout", type=click.Choice(LAYOUTS), default="NTC", show_default=True, help="Batch first, or time first."),
)
_training_options = all_of(
    devices_option,
    _by_data(count, "--epochs", help="Largest number of passes over the training pairs."),
    click.option(
        "--batch-tokens",
        type=click.IntRange(1),
        help=f"Source and target tokens per batch, over all devices together. By default {BATCH_TOKENS}; of a small corpus of "
        f"text a {_USUAL_STEPS}th, but {_FEWEST_BATCH_TOKENS} or more, and the longest pair.",
    ),
    _by_data(positive, "--lr", help="Highest learning rate, reached after a warm-up."),
    click.option(
        "--schedule",
        type=click.Choice(["cosine", "plateau"]),
        default="cosine",
        show_default=True,
        help="How the rate falls: along a cosine, or by half after each epoch whose validation loss did not improve.",
    ),
    _by_data(count, "--patience", help="Stop after this many epochs without a better validation."),
    click.option("--optimizer", default="adam", show_default=True, help="Any optimizer of MXNet: adam, sgd, ..."),
    output_option("runs/seq2seq", "command.json, curves.png, history.csv, history.json, and the models best and last"),
    seed_option("Seed of the weights, of the split of the data, and of the order of the pairs."),
    training_options(hybridize="on", clip_norm=5.0, precise_layers="Dense layers"),
    pipeline_options("hybrid"),
)


@click.command("seq2seq", cls=_DefaultsByData, context_settings={"help_option_names": ["-h", "--help"]})
@_data_options
@_network_options
@_training_options
def train_seq2seq(**options: Any) -> None:
    """Train a translator with attention, on several devices.

    The defaults train on Korean numbers, dates, times and counts written out, with their English. Pass --source and --target, or
    --tsv, to train on your own text. Ctrl-C and SIGTERM stop after the current batch and save; --resume auto resumes.
    """
    shared, _ = split_options(options)
    if shared.debug:
        enable_debugging()
    corpus, vocabularies = _load_corpus(options)
    if shared.parallel == "hybrid" and options["input_feeding"]:
        raise click.UsageError(
            "got --parallel hybrid with --input-feeding; expected one of them: with input feeding, each step of the decoder "
            "waits for the attention of the step before, so that attention cannot be a stage after it. Leave one out."
        )
    with prepared_devices(shared) as ctx:
        names = ", ".join(map(str, ctx))
        print_once(f"{corpus.name}: {corpus}")
        translator = _translator(vocabularies, options)
        source, target = (f"{len(vocabulary)} {vocabulary.kind}" for vocabulary in vocabularies)
        print_once(f"{source} to {target}, on {names}")
        history = _train(translator, corpus, ctx, shared, options)
        best = load_translator(shared.output / "best", ctx)
        beams = _choose_search(best, corpus, shared.output, options)
        scores = translation_scores(best.best(corpus.test.source, beam_size=best.beam_size), corpus.test.target)
    print_once(f"saved curves.png, history.csv, history.json, best and last in {shared.output}")
    rates = f"{median(history.column('tokens_per_s')):.0f} tokens/s on {names}"
    print_once(f"test of best, {beams}: {'  '.join(format_column(*score) for score in scores.items())}; {rates}")
    signatures = score_signatures(corpus.test.target)
    if signatures:
        print_once("sacrebleu: " + "  ".join(f"{name} {signature}" for name, signature in signatures.items()))


def _train(
    translator: Translator, corpus: Corpus, ctx: List[mx.Context], shared: TrainingOptions, options: Dict[str, Any]
) -> History:
    """Train on the devices, and return the history."""
    shards = num_replicas(shared, ctx) * this_process().num_processes if shared.virtual_shards is None else shared.virtual_shards
    encoded = [
        encode_pairs(one, translator.source_vocabulary, translator.target_vocabulary) for one in (corpus.train, corpus.valid)
    ]
    options = {**options, "batch_tokens": options["batch_tokens"] or _usual_batch_tokens(encoded)}
    train_iter = _loader(encoded[0], shards, options, shuffle=True)
    valid_iter = _loader(encoded[1], shards, options, shuffle=False)
    log_p = unigram_log_p(encoded[0][1], len(translator.target_vocabulary))
    entropy = unigram_entropy(log_p, encoded[1][1])
    print_once(f"entropy of the unigrams: {entropy:.4f} nats per token; the validation loss (test loss) should fall below it")
    translator.net.begin_at(log_p)
    net = prepare_network(translator.net, ctx, shared, train_iter, train_iter.split_axes[0])
    schedule = _schedule(options, len(train_iter))
    trainer = create_trainer(net, schedule, shared)
    return run_fit(
        net,
        SequenceLoss(options["label_smoothing"], layout=options["layout"]),
        trainer,
        train_iter,
        valid_iter,
        metrics=(),
        callbacks=_callbacks(translator, corpus, train_iter, entropy, schedule, shared, options),
        split_f=_split_function(shared.weights, trainer, train_iter.split_axes),
        options=shared,
    )


def _choose_search(best: Translator, corpus: Corpus, output: Path, options: Dict[str, Any]) -> str:
    """Let the beam and the length ratio of a translator be those of the best validation score, and return them as words.

    They are saved in the folders best and last. A wide beam finds the translations of a good model. Of a model that knows little,
    it prefers texts that are too short, unless it is to find texts of the usual length.
    """
    column = "chrf" if monitored(options) == "test_chrf" else "exact_match"
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
        for folder in (output / "best", output / "last"):
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


def _loader(encoded: Encoded, num_shards: int, options: Dict[str, Any], *, shuffle: bool) -> PairLoader:
    return PairLoader(
        *encoded,
        options["batch_tokens"],
        shuffle=shuffle,
        seed=options["seed"],
        num_shards=num_shards,
        batch_axis=LAYOUTS.index(options["layout"]),
    )


def _callbacks(
    translator: Translator,
    corpus: Corpus,
    train_iter: PairLoader,
    entropy: float,
    schedule: Any,
    shared: TrainingOptions,
    options: Dict[str, Any],
) -> List[Callback]:
    """Return the callbacks; those that add columns come before those that read them."""
    monitor = monitored(options)
    if not has_sacrebleu():
        print_once("BLEU and chrF need sacrebleu, which is not installed (extra seq2seq): exact match only")
    callbacks: List[Callback] = [ValidateTranslations(translator, corpus.valid), TokenProgress(train_iter), UnigramCheck(entropy)]
    callbacks += [Plateau(schedule)] if isinstance(schedule, PlateauSchedule) else []
    callbacks += [SaveTranslator(shared.output, translator, monitor, **shared.saving), SaveHistory(shared.output)]
    return [*callbacks, EarlyStopping(monitor, options["patience"])]


def monitored(options: Dict[str, Any]) -> str:
    """Return the column of the history by which the best model is chosen."""
    if _is_embedded(options):
        return "test_exact_match"
    return "test_chrf" if has_sacrebleu() else "test_loss"


def _load_corpus(options: Dict[str, Any]) -> Tuple[Corpus, Tuple[Vocabulary, Vocabulary]]:
    """Return the sentence pairs of the options, and the vocabularies of the training pairs."""
    corpus = _korean_numbers(options) if _is_embedded(options) else _from_files(options)
    usual = ["characters", "words"] if _is_embedded(options) else ["subwords", "subwords"]
    if options["reverse"]:
        corpus, usual = corpus.swapped(), usual[::-1]
    kinds = (options["source_vocabulary"] or usual[0], options["target_vocabulary"] or usual[1])
    source, target = (
        build_vocabulary(side, kind, size=options["vocabulary_size"] or _usual_size(side, kind))
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
    counts = sorted(Counter("".join(sentences)).values(), reverse=True)
    num_usual = int(np.searchsorted(np.cumsum(counts), 0.9995 * sum(counts))) + 1
    num_words = max(sum(len(text.split()) for text in sentences), sum(counts) / 6)  # or so, where no spaces divide words
    return min(_MOST_TOKENS, num_usual + round(1.25 * (num_words / len(sentences)) ** 1.5 * len(sentences) ** 0.5))


def _is_embedded(options: Dict[str, Any]) -> bool:
    return not (options["source"] or options["target"] or options["tsv"])


def _korean_numbers(options: Dict[str, Any]) -> Corpus:
    """Return the generated pairs. Short ones repeat in a large training set, but each held-out pair is unique."""
    held_out = SentencePairs(*zip(*dict.fromkeys(korean_numbers(2000, options["seed"], held_out=True))))
    half = len(held_out) // 2
    valid, test = held_out.take(range(half)), held_out.take(range(half, len(held_out)))
    return Corpus("Korean numbers", korean_numbers(options["num_examples"], options["seed"]), valid, test)


def _from_files(options: Dict[str, Any]) -> Corpus:
    source, target, tsv = options["source"], options["target"], options["tsv"]
    if bool(source) != bool(target) or bool(source) == bool(tsv):
        raise click.UsageError("got one file of two, or files and --tsv; expected --source and --target, or --tsv alone.")
    pairs = read_tsv(tsv, skip_empty=True) if tsv else read_pairs(source, target)
    filtered = filter_pairs(pairs, max_length=options["max_length"])
    print_once(f"{tsv or f'{source} and {target}'}: {filtered}")
    num_train = len(filtered.pairs) - options["num_validation"] - options["num_test"]
    if num_train < 1:
        raise DataError(
            f"train seq2seq: got {len(filtered.pairs)} pairs; expected more than --num-validation {options['num_validation']} "
            f"and --num-test {options['num_test']} together. Ask for fewer."
        )
    parts = split_pairs(filtered.pairs, [num_train, options["num_validation"], options["num_test"]], seed=options["seed"])
    return Corpus((tsv or source).name, *parts)


def _translator(vocabularies: Tuple[Vocabulary, Vocabulary], options: Dict[str, Any]) -> Translator:
    names = ("embed_size", "hidden_size", "num_layers", "cell", "attention", "input_feeding", "tied", "dropout", "layout")
    return Translator(*vocabularies, **{name: options[name] for name in names})


def _schedule(options: Dict[str, Any], steps_per_epoch: int) -> Any:
    steps = steps_per_epoch * options["epochs"]
    warm_up = min(_WARM_UP_STEPS, steps // 10)
    if options["schedule"] == "plateau":
        return PlateauSchedule(options["lr"], warm_up)
    begin = {"warmup_steps": warm_up, "warmup_begin_lr": options["lr"] / 10}
    return mx.lr_scheduler.CosineScheduler(max_update=steps, base_lr=options["lr"], final_lr=0.0, **begin)


def _split_function(weights: Any, trainer: Trainer, axes: Any) -> SplitFunction:
    if weights == "auto":
        return Balancer(trainer, batch_axis=axes)
    return partial(split_batch, batch_axis=axes, weights=weights)

"""gluon-mgpu train seq2seq: trains a translator."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Callable, Dict, Iterable, List, Tuple

import click
import mxnet as mx
import numpy as np
from mxnet import init

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
from ..data_parallel.balancer import Balancer
from ..data_parallel.debug import run_serially
from ..data_parallel.sharding import split_batch
from ..data_parallel.step import SplitFunction
from ..devices.select import use_devices
from ..distributed.process import this_process
from ..errors import DataError
from ..loop.callbacks import Callback, EarlyStopping, SaveHistory
from ..loop.fit import fit
from ..loop.stopping import Terminated
from ..models import SequenceLoss
from ..models.seq2seq.attention import ATTENTIONS
from ..models.seq2seq.callbacks import Plateau, PlateauSchedule, SaveTranslator, TokenProgress, ValidateTranslations
from ..models.seq2seq.loss import LAYOUTS
from ..models.seq2seq.recurrence import NUM_GATES
from ..models.seq2seq.scores import has_sacrebleu, translation_scores
from ..models.seq2seq.translator import Translator, load_translator
from ..monitor.leaks import LeakCheck
from ..monitor.watchdog import Watchdog
from ..trainer.local_sgd import LocalSGD
from ..trainer.trainer import Trainer
from ._gpus import choosing_gpus
from ._output import tell
from .train import HYBRIDIZE, check_shares, finite, saving, shares

_FOLDER = click.Path(file_okay=False, path_type=Path)
_FILE = click.Path(dir_okay=False, path_type=Path)
_KINDS = ("subwords", "words", "characters")
_WARM_UP_STEPS = 100


@dataclass(frozen=True)
class Corpus:
    """What is translated, in three parts that share no sentence."""

    name: str
    train: SentencePairs
    valid: SentencePairs
    test: SentencePairs

    def __str__(self) -> str:
        return f"{len(self.train)} pairs to train on, {len(self.valid)} to validate, {len(self.test)} to test"

    def swapped(self) -> Corpus:
        """Return the corpus for the other direction."""
        return Corpus(self.name, self.train.swapped(), self.valid.swapped(), self.test.swapped())


def _options(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a decorator that is all of these, the first one outermost."""

    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


_count = partial(click.option, type=click.IntRange(1), show_default=True)
_positive = partial(click.option, callback=finite, type=click.FloatRange(0, min_open=True))
_share = partial(click.option, callback=finite, type=click.FloatRange(0, 1, max_open=True), show_default=True)

_of_data = _options(
    click.option("--source", type=_FILE, help="Text file, a sentence a line; --target has its translations."),
    click.option("--target", type=_FILE, help="Text file with the translations of --source, line by line."),
    click.option("--tsv", type=_FILE, help="One file instead: source, tab, target."),
    _count("--num-examples", default=20000, help="Pairs of the embedded Korean numbers, which are the default."),
    click.option("--reverse", is_flag=True, help="Translate from the target to the source: English to Korean numbers."),
    _count("--num-validation", default=200, help="Pairs of the files to validate with after each epoch."),
    _count("--num-test", default=200, help="Pairs of the files to test with at the end."),
    _count("--max-length", default=1000, help="Characters of a side; longer pairs of the files are left out."),
    click.option("--source-vocabulary", type=click.Choice(_KINDS), help="By default subwords; of Korean numbers, characters."),
    click.option("--target-vocabulary", type=click.Choice(_KINDS), help="By default subwords; of Korean numbers, words."),
    click.option(
        "--vocabulary-size", type=click.IntRange(5), default=8000, show_default=True, help="Tokens of each side, at most."
    ),
)
_of_network = _options(
    _count("--embed-size", default=64, help="Of the vectors of tokens."),
    _count("--hidden-size", default=128, help="Of the recurrent layers, in each direction."),
    _count("--num-layers", default=1, help="Recurrent layers of encoder and decoder."),
    click.option("--cell", type=click.Choice(list(NUM_GATES)), default="gru", show_default=True, help="Of the recurrent layers."),
    click.option("--attention", type=click.Choice(ATTENTIONS), default="dot", show_default=True, help="Luong's or Bahdanau's."),
    click.option("--input-feeding", is_flag=True, help="Give each step where the last one looked. Slower."),
    click.option("--tied", is_flag=True, help="One array is target embedding and output layer; needs equal sizes."),
    _share("--dropout", default=0.0, help="Of embeddings and between layers."),
    _share("--label-smoothing", default=0.0, help="The share of each target that is spread over the vocabulary."),
    click.option("--layout", type=click.Choice(LAYOUTS), default="NTC", show_default=True, help="Batch first, or time first."),
)
_of_training = _options(
    click.option(
        "--devices",
        default="auto",
        show_default=True,
        help="auto, gpu, gpu:0,2, gpu:4-7, gpu:free (those that nobody uses), gpu:free:2, cpu:2 (two CPU contexts), or a count.",
    ),
    choosing_gpus,
    _count("--epochs", default=8, help="Passes over the training pairs, at most."),
    _count("--batch-tokens", default=1200, help="Source and target tokens of a batch, over all devices together."),
    _positive("--lr", default=0.003, show_default=True, help="Highest learning rate, reached after a warm-up."),
    click.option(
        "--schedule",
        type=click.Choice(["cosine", "plateau"]),
        default="cosine",
        show_default=True,
        help="How the rate falls: along a cosine, or by half after each epoch whose validation loss is no better.",
    ),
    _count("--patience", default=5, help="Epochs without a better validation after which training stops."),
    click.option("--optimizer", default="adam", show_default=True, help="Any optimizer of MXNet's: adam, sgd, ..."),
    click.option(
        "--output",
        type=_FOLDER,
        default=Path("runs/seq2seq"),
        show_default=True,
        help="Folder for curves.png, history.csv, history.json, and the models best and last.",
    ),
    click.option(
        "--seed",
        type=click.IntRange(0, 2**31 - 1),
        default=0,
        show_default=True,
        help="Of the weights, of the parts, and of the order of the pairs.",
    ),
    click.option(
        "--hybridize", type=click.Choice(list(HYBRIDIZE)), default="on", show_default=True, help="Compile the network, or not."
    ),
    _count("--micro-steps", default=1, help="Parts that a batch is done in, one after the other, for less memory."),
    _positive("--clip-norm", default=5.0, show_default=True, help="Largest norm of the gradient."),
    _positive("--clip-value", help="Largest absolute value of an element of the gradient; none by default."),
    click.option(
        "--average-every",
        type=click.IntRange(1),
        help="Train the devices apart, and average their weights after so many steps (local SGD).",
    ),
    click.option(
        "--precision",
        type=click.Choice(["fp32", "bf16", "fp16"]),
        default="fp32",
        show_default=True,
        help="What Dense layers compute in: bf16 on CPUs with AVX-512, fp16 on GPUs.",
    ),
    click.option(
        "--weights",
        callback=shares,
        help="How batches are shared out: auto, as fast as each device is; or numbers, 3,1. By default evenly.",
    ),
    saving,
    click.option("--debug", is_flag=True, help="One operation after another; every layer and index looked at. Slow."),
    _positive("--watchdog", help="Seconds without a step after which every thread is shown."),
    click.option("--leak-check", is_flag=True, help="Say at the end whether memory grows with the steps."),
)


@click.command("seq2seq")
@_of_data
@_of_network
@_of_training
def train_seq2seq(**given: Any) -> None:
    """Train a translator with attention, on several devices.

    The defaults train on Korean numbers, dates, times and counts written out, with their English. Give --source and --target, or
    --tsv, to train on text of your own. Ctrl-C and SIGTERM stop after the batch under way, and save; --resume auto goes on.
    """
    if given["debug"]:
        os.environ["GLUON_MGPU_DEBUG"] = "1"  # fit asks
        run_serially()
    corpus, vocabularies = _load_corpus(given)
    with use_devices(given["devices"], **given["choice"]) as ctx:  # before anything runs on a device: it settles their threads
        check_shares(given["weights"], len(ctx))
        mx.random.seed(given["seed"])
        np.random.seed(given["seed"])
        names = ", ".join(map(str, ctx))
        tell(f"{corpus.name}: {corpus}")
        translator = _translator(vocabularies, given)
        tell(f"{_told(vocabularies[0])} to {_told(vocabularies[1])}, on {names}")
        history = _train(translator, corpus, ctx, given)
        best = load_translator(given["output"] / "best", ctx)
        scores = translation_scores(best.best(corpus.test.source, beam_size=5), corpus.test.target)
    tell(f"saved curves.png, history.csv, history.json, best and last in {given['output']}")
    rates = f"{median(history.column('tokens_per_s')):.0f} tokens/s on {names}"
    tell(f"test of best, 5 beams: {'  '.join(f'{name} {score:.2f}' for name, score in scores.items())}; {rates}")


def _train(translator: Translator, corpus: Corpus, ctx: List[mx.Context], given: Dict[str, Any]) -> Any:
    """Train on the devices, and return the history."""
    options: Dict[str, Any] = {
        "seed": given["seed"],
        "num_shards": len(ctx) * this_process().num_processes,
        "batch_axis": LAYOUTS.index(given["layout"]),
    }
    train_iter, valid_iter = (
        PairLoader(
            *encode_pairs(pairs, translator.source_vocabulary, translator.target_vocabulary),
            given["batch_tokens"],
            shuffle=pairs is corpus.train,
            **options,
        )
        for pairs in (corpus.train, corpus.valid)
    )
    net = translator.net
    net.initialize(init.Xavier(), ctx=ctx)
    how = HYBRIDIZE[given["hybridize"]]
    if how is not None:
        net.hybridize(**how)
    schedule = _schedule(given, len(train_iter))
    params = {"learning_rate": given["lr"], "lr_scheduler": schedule}
    more = {name: given[name] for name in ("clip_norm", "clip_value", "precision")}
    if given["average_every"] is None:
        trainer = Trainer(net, given["optimizer"], params, **more)
    else:
        trainer = LocalSGD(net, given["optimizer"], params, every=given["average_every"], **more)
    callbacks = _callbacks(translator, corpus, train_iter, schedule, given)
    check = LeakCheck() if given["leak_check"] else None
    callbacks += [check] if check else []
    tests: Iterable[Any] = valid_iter
    if given["watchdog"] is not None:
        dog = Watchdog(given["watchdog"])
        callbacks.append(dog)
        tests = dog.watch(valid_iter)
    loss = SequenceLoss(given["label_smoothing"], layout=given["layout"])
    split_f = _split_function(given["weights"], trainer, train_iter.split_axes)
    try:
        history = fit(
            net,
            loss,
            trainer,
            train_iter,
            tests,
            epochs=given["epochs"],
            metrics=(),
            callbacks=callbacks,
            split_f=split_f,
            micro_steps=given["micro_steps"],
            resume=given["resume"],
        )
    except (KeyboardInterrupt, Terminated) as interrupt:
        raise type(interrupt)(f"{interrupt}; --resume auto goes on; what was saved is in {given['output']}") from None
    if history.stopped:
        tell(f"stopped: {history.stopped}")
    if check is not None:
        tell(check.report())
    return history


def _callbacks(
    translator: Translator, corpus: Corpus, train_iter: PairLoader, schedule: Any, given: Dict[str, Any]
) -> List[Callback]:
    """Return the callbacks; those that write columns come before those that read them."""
    monitor = "test_exact_match" if _is_embedded(given) else "test_chrf"
    if not has_sacrebleu():
        monitor = "test_exact_match" if _is_embedded(given) else "test_loss"
        tell("BLEU and chrF need sacrebleu, which is not installed (extra seq2seq): exact match only")
    callbacks: List[Callback] = [ValidateTranslations(translator, corpus.valid), TokenProgress(train_iter)]
    callbacks += [Plateau(schedule)] if isinstance(schedule, PlateauSchedule) else []
    kept = {"every": given["checkpoint_every"], "keep": given["keep"], "background": True}
    callbacks += [SaveTranslator(given["output"], translator, monitor, **kept), SaveHistory(given["output"])]
    return [*callbacks, EarlyStopping(monitor, given["patience"])]


def _load_corpus(given: Dict[str, Any]) -> Tuple[Corpus, Tuple[Vocabulary, Vocabulary]]:
    """Return the sentence pairs that the options ask for, and the vocabularies of those to train on."""
    corpus = _korean_numbers(given) if _is_embedded(given) else _from_files(given)
    usual = ["characters", "words"] if _is_embedded(given) else ["subwords", "subwords"]
    if given["reverse"]:
        corpus, usual = corpus.swapped(), usual[::-1]
    source = build_vocabulary(corpus.train.source, given["source_vocabulary"] or usual[0], size=given["vocabulary_size"])
    target = build_vocabulary(corpus.train.target, given["target_vocabulary"] or usual[1], size=given["vocabulary_size"])
    return corpus, (source, target)


def _is_embedded(given: Dict[str, Any]) -> bool:
    return not (given["source"] or given["target"] or given["tsv"])


def _korean_numbers(given: Dict[str, Any]) -> Corpus:
    """Return the embedded pairs: short ones come again in a long set, but none twice among those held out."""
    held_out = SentencePairs(*zip(*dict.fromkeys(korean_numbers(2000, given["seed"], held_out=True))))
    half = len(held_out) // 2
    valid, test = held_out.take(range(half)), held_out.take(range(half, len(held_out)))
    return Corpus("Korean numbers", korean_numbers(given["num_examples"], given["seed"]), valid, test)


def _from_files(given: Dict[str, Any]) -> Corpus:
    source, target, tsv = given["source"], given["target"], given["tsv"]
    if bool(source) != bool(target) or bool(source) == bool(tsv):
        raise click.UsageError("got one file of two, or files and --tsv; expected --source and --target, or --tsv alone.")
    pairs = read_tsv(tsv, skip_empty=True) if tsv else read_pairs(source, target)
    filtered = filter_pairs(pairs, max_length=given["max_length"])
    tell(f"{tsv or f'{source} and {target}'}: {filtered}")
    num_train = len(filtered.pairs) - given["num_validation"] - given["num_test"]
    if num_train < 1:
        raise DataError(
            f"train seq2seq: got {len(filtered.pairs)} pairs; expected more than --num-validation {given['num_validation']} and "
            f"--num-test {given['num_test']} together. Ask for fewer."
        )
    parts = split_pairs(filtered.pairs, [num_train, given["num_validation"], given["num_test"]], seed=given["seed"])
    return Corpus((tsv or source).name, *parts)


def _translator(vocabularies: Tuple[Vocabulary, Vocabulary], given: Dict[str, Any]) -> Translator:
    names = ("embed_size", "hidden_size", "num_layers", "cell", "attention", "input_feeding", "tied", "dropout", "layout")
    return Translator(*vocabularies, **{name: given[name] for name in names})


def _schedule(given: Dict[str, Any], steps_per_epoch: int) -> Any:
    steps = steps_per_epoch * given["epochs"]
    warm_up = min(_WARM_UP_STEPS, steps // 10)
    if given["schedule"] == "plateau":
        return PlateauSchedule(given["lr"], warm_up)
    begin = {"warmup_steps": warm_up, "warmup_begin_lr": given["lr"] / 10}
    return mx.lr_scheduler.CosineScheduler(max_update=steps, base_lr=given["lr"], final_lr=0.0, **begin)


def _split_function(weights: Any, trainer: Trainer, axes: Any) -> SplitFunction:
    if weights == "auto":
        return Balancer(trainer, batch_axis=axes)
    return partial(split_batch, batch_axis=axes, weights=weights)


def _told(vocabulary: Vocabulary) -> str:
    return f"{len(vocabulary)} {vocabulary.kind}"

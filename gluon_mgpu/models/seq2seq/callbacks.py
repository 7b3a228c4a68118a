"""Callbacks for training a translator: translation scores, tokens/s, a learning rate that falls on a plateau, model folders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Optional, Union

from mxnet import lr_scheduler

from ...checkpoint.snapshot import Snapshot
from ...data import PairLoader, SentencePairs
from ...distributed.process import this_process
from ...errors import TrainerError
from ...loop.callbacks import Best, Callback, Checkpoint, FitState, Progress
from ...loop.epoch import EpochProgress
from ...loop.history import History
from ...trainer.groups import spans_devices
from .scores import translation_scores
from .translator import PARTS, Translator, check_replaceable


class ValidateTranslations(Callback):
    """Translates sentences after each epoch, greedily, and adds `test_exact_match`, `test_bleu` and `test_chrf` to its row.

    With a `Pipeline`, it translates with a copy of the network on the first device, which it drops afterwards.

    Callbacks that read these columns come after it.

    Parameters
    ----------
    translator : Translator
        The translator of the network in training.
    pairs : SentencePairs
        One or more pairs that are not in the training data.
    """

    def __init__(self, translator: Translator, pairs: SentencePairs) -> None:
        if not len(pairs):
            raise TrainerError("ValidateTranslations: got no pairs; expected one or more. Hold some out (split_pairs).")
        self._translator, self._pairs = translator, pairs

    def on_epoch_end(self, state: FitState) -> None:
        translator = self._translator
        if spans_devices(state.net) or state.trainer.virtual_shards:  # several devices: other shapes, which round differently
            translator = translator.on_device(state.trainer.contexts[0])
        scores = translation_scores(translator.best(self._pairs.source), self._pairs.target)
        state.history.rows[-1].update({f"test_{name}": score for name, score in scores.items()})


class UnigramCheck(Callback):
    """Prints advice after each epoch whose `test_loss` is not below the entropy of the unigrams.

    Such a network knows only how frequent each token is: it translates every sentence into the same few words.

    Parameters
    ----------
    entropy : float, nats per token
        `data.unigram_entropy` of the validation pairs.
    """

    def __init__(self, entropy: float) -> None:
        self._entropy = entropy

    def on_epoch_end(self, state: FitState) -> None:
        loss = state.history.rows[-1]["test_loss"]
        if loss < self._entropy or this_process().rank:
            return
        print(
            f"after epoch {state.epoch}, the validation loss {loss:.4f} is not below {self._entropy:.4f}, the entropy of the "
            "unigrams: the network uses neither the source nor the words before. If more epochs do not help, try --lr 3 times "
            "smaller or larger, a smaller --vocabulary-size, or a smaller --batch-tokens for more updates. Check that the lines "
            "of the files match.",
            flush=True,
        )


class TokenProgress(Progress):
    """Progress in tokens/s: source and target with their end tokens, without padding. It adds `tokens_per_s` to each row.

    Parameters
    ----------
    loader : PairLoader
        The training data. Within an epoch, all pairs count with the mean length.
    every_s : float, seconds
        As for `Progress`.
    """

    def __init__(self, loader: PairLoader, *, every_s: float = 5.0) -> None:
        super().__init__("tokens", every_s=every_s)
        self._tokens_per_pair = float(loader.lengths.sum()) / loader.num_examples

    def on_report(self, state: FitState, progress: EpochProgress) -> None:
        super().on_report(state, replace(progress, num_examples=round(progress.num_examples * self._tokens_per_pair)))

    def on_epoch_end(self, state: FitState) -> None:
        row = state.history.rows[-1]
        row["tokens_per_s"] = row["examples_per_s"] * self._tokens_per_pair
        in_tokens = History([{**row, "examples_per_s": row["tokens_per_s"]}])
        super().on_epoch_end(replace(state, history=in_tokens))


class PlateauSchedule(lr_scheduler.LRScheduler):  # type: ignore[misc]
    """A learning rate that warms up to `base_lr` and stays there, times a factor that a `Plateau` lowers.

    Parameters
    ----------
    base_lr : float
    warmup_steps : int
        Steps of a linear warm-up from a tenth of `base_lr`.

    Examples
    --------
    >>> schedule = PlateauSchedule(1.0, warmup_steps=10)
    >>> [round(schedule(step), 2) for step in (0, 5, 10, 1000)]
    [0.1, 0.55, 1.0, 1.0]
    """

    moved = ("factor",)  # everything else is constant: a run with other values cannot resume from its checkpoints

    def __init__(self, base_lr: float, warmup_steps: int = 0) -> None:
        super().__init__(base_lr, warmup_steps=warmup_steps, warmup_begin_lr=base_lr / 10)
        self.factor = 1.0

    def __call__(self, num_update: int) -> float:
        rate = self.get_warmup_lr(num_update) if num_update < self.warmup_steps else self.base_lr
        return float(rate * self.factor)


class Plateau(Callback):
    """Lowers the learning rate after each epoch that has not improved a metric.

    Parameters
    ----------
    schedule : PlateauSchedule
        The schedule of the trainer.
    monitor : str
        A column of the history.
    factor : float, more than 0 and less than 1
        The rate is multiplied by it.
    mode : "min", "max" or None
        As for `EarlyStopping`.
    """

    def __init__(
        self, schedule: PlateauSchedule, monitor: str = "test_loss", factor: float = 0.5, *, mode: Optional[str] = None
    ) -> None:
        if not 0 < factor < 1:
            raise TrainerError(f"Plateau: got factor {factor!r}; expected more than 0 and less than 1. 0.5 is usual.")
        self._schedule, self._best, self._factor = schedule, Best(monitor, mode), factor

    def on_fit_begin(self, state: FitState) -> None:
        self._best.begin(state)

    def on_epoch_end(self, state: FitState) -> None:
        if not self._best.improves(state):
            self._schedule.factor *= self._factor


class SaveTranslator(Checkpoint):
    """Saves the translator and its trainer's states: `best` when a metric improves, `last` after each epoch.

    It saves when Ctrl-C, SIGTERM or SIGUSR1 stops the run, but not after an error.

    Parameters
    ----------
    folder : str or pathlib.Path
        The folder that receives the folders `best` and `last`; see `Translator.save`.
    translator : Translator
        The translator of the network in training.
    monitor : str
        A column of the history.
    **options
        Options of `Checkpoint`: `mode`, `every`, `keep`, `background`.
    """

    _parts = PARTS

    def __init__(self, folder: Union[str, Path], translator: Translator, monitor: str = "test_loss", **options: Any) -> None:
        super().__init__(folder, monitor, **options)
        self._translator = translator

    def _writing(self, snapshot: Snapshot) -> Callable[[Path], None]:
        return lambda folder: self._translator.write(folder, snapshot)

    def _check_replaceable(self, folder: Path) -> None:
        check_replaceable(folder, "SaveTranslator")

"""Callbacks for training a translator: translation scores, tokens/s, model folders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Union

from ...checkpoint.replace_folder import read_files
from ...checkpoint.save_and_load import check_folder
from ...checkpoint.snapshot import Snapshot
from ...data import PairLoader, SentencePairs
from ...data.text.vocabulary import fingerprint
from ...errors import StateError, TrainerError
from ...loop.batch_loop import EpochProgress
from ...loop.callbacks import Callback, FitState, Progress
from ...loop.history import History
from ...loop.save_checkpoints import Checkpoint
from ...runtime.untrusted_files import MOST_JSON
from ...trainer.parameters import spans_devices
from .translation_scores import translation_scores
from .translator import PARTS, SIDES, Translator


class ValidateTranslations(Callback):
    """Translates the validation pairs after each epoch, greedily, and adds the scores to its row.

    The columns are `valid_exact_match`, `valid_bleu` and `valid_chrf`. The results of `fit` on its `test_iter`, which has the
    same pairs, become `valid_loss` and so on.

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
        row = state.history.rows[-1]
        renamed = {f"valid_{name[5:]}" if name.startswith("test_") else name: value for name, value in row.items()}
        row.clear()
        row.update(renamed, **{f"valid_{name}": score for name, score in scores.items()})


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
        self._tokens_per_pair = float(loader.lengths.sum()) / len(loader.lengths)

    def on_report(self, state: FitState, progress: EpochProgress) -> None:
        super().on_report(state, replace(progress, num_examples=round(progress.num_examples * self._tokens_per_pair)))

    def on_epoch_end(self, state: FitState) -> None:
        row = state.history.rows[-1]
        row["tokens_per_s"] = row["examples_per_s"] * self._tokens_per_pair
        in_tokens = History([{**row, "examples_per_s": row["tokens_per_s"]}])
        super().on_epoch_end(replace(state, history=in_tokens))


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

    def __init__(self, folder: Union[str, Path], translator: Translator, monitor: str = "valid_loss", **options: Any) -> None:
        super().__init__(folder, monitor, **options)
        self._translator = translator

    def check_resumable(self, folder: Path) -> None:
        """Raise `StateError` if the run has learnt other vocabularies of the same size."""
        now = self._translator.source_vocabulary, self._translator.target_vocabulary
        saved = read_files(folder.parent, {f"{side}.vocab": MOST_JSON for side in SIDES}, "SaveTranslator").contents
        for side, vocabulary in zip(SIDES, now):
            name = f"{side}.vocab"
            if name in saved and fingerprint(saved[name]) != vocabulary.config()["fingerprint"]:
                raise StateError(
                    f"SaveTranslator: got another vocabulary than {folder.parent / name}; expected that of the run to resume. "
                    "Pass its text, direction, seed and number of held-out pairs."
                )

    def _writing(self, snapshot: Snapshot) -> Callable[[Path], None]:
        return lambda folder: self._translator.write(folder, snapshot)

    def _check_replaceable(self, folder: Path) -> None:
        check_folder(folder, PARTS, "SaveTranslator", "translator")

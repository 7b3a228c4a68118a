"""Callbacks of a run that trains a translator."""

import gluon_mgpu as mgpu
import mxnet as mx
import pytest
from gluon_mgpu.data import PairLoader, SentencePairs, encode_pairs
from gluon_mgpu.errors import StateError, TrainerError
from gluon_mgpu.loop.batch_loop import EpochProgress
from gluon_mgpu.loop.callbacks import FitState
from gluon_mgpu.loop.history import History
from gluon_mgpu.models.seq2seq.training_callbacks import SaveTranslator, TokenProgress, ValidateTranslations
from gluon_mgpu.models.seq2seq.translator import load_translator

from .test_translator import PAIRS, made


def state_of(translator, rows, **more):
    trainer = mgpu.Trainer(translator.net, "sgd", {"learning_rate": 0.1})
    return FitState(translator.net, trainer, 9, 4, epoch=len(rows), history=History(rows), tests=True, **more)


def test_validation_adds_what_share_is_right(without_sacrebleu):
    translator = made()
    said = translator.best(PAIRS.source)
    pairs = SentencePairs(PAIRS.source, [*said[:3], said[3] + " more"])
    state = state_of(translator, [{"epoch": 1, "train_loss": 2.0, "test_loss": 3.0, "seconds": 1.0}])
    ValidateTranslations(translator, pairs).on_epoch_end(state)
    assert state.history.rows == [{"epoch": 1, "train_loss": 2.0, "valid_loss": 3.0, "seconds": 1.0, "valid_exact_match": 75.0}]


def test_progress_is_in_tokens(capsys):
    translator = made()
    loader = PairLoader(*encode_pairs(PAIRS, translator.source_vocabulary, translator.target_vocabulary), 40)
    # Words 2 3 3 1, and as many again, and an end to each of the eight.
    tokens_per_pair = (9 + 9 + 8) / 4
    progress = TokenProgress(loader, every_s=0)
    state = state_of(translator, [])
    progress.on_fit_begin(state)
    state.epoch = 1
    progress.on_report(state, EpochProgress({"loss": 1.0}, 1, 100, 2.0))
    row = {"epoch": 1, "train_loss": 1.0, "examples_per_s": 50.0, "seconds": 4.0}
    state.history.rows.append(dict(row))
    progress.on_epoch_end(state)
    report, epoch = capsys.readouterr().out.splitlines()
    assert f"{100 / 2 * tokens_per_pair:.0f} tokens/s" in report
    assert f"{50 * tokens_per_pair:.0f} tokens/s" in epoch
    assert state.history.rows == [{**row, "tokens_per_s": 50 * tokens_per_pair}]


def test_best_and_last_are_translators(tmp_path):
    translator = made()
    saves = SaveTranslator(tmp_path / "run", translator, "valid_chrf")
    state = state_of(translator, [])
    saves.on_fit_begin(state)
    said = {}
    for state.epoch, chrf in enumerate([10.0, 30.0, 20.0], 1):
        translator.net.initialize(mx.init.Normal(0.5), force_reinit=True, ctx=mx.cpu(0))
        state.trainer = mgpu.Trainer(translator.net, "sgd")
        said[state.epoch] = translator.best(PAIRS.source)
        state.history.rows.append({"epoch": state.epoch, "valid_chrf": chrf})
        saves.on_epoch_end(state)
    assert said[2] != said[3]
    assert load_translator(tmp_path / "run" / "best").best(PAIRS.source) == said[2]
    assert load_translator(tmp_path / "run" / "last").best(PAIRS.source) == said[3]


def test_a_run_with_other_vocabularies_is_not_resumed(tmp_path):
    """Vocabularies of one size are told apart: the translator would go on with the numbers of other words."""
    translator, other = made(), made()
    translator.save(tmp_path / "run" / "last")
    SaveTranslator(tmp_path / "again", translator).check_resumable(tmp_path / "run" / "last" / "checkpoint")
    other.source_vocabulary, other.target_vocabulary = other.target_vocabulary, other.source_vocabulary
    with pytest.raises(StateError, match="source.vocab"):
        SaveTranslator(tmp_path / "again", other).check_resumable(tmp_path / "run" / "last" / "checkpoint")


@pytest.mark.parametrize("interrupted", [True, False])
def test_what_ctrl_c_ends_is_saved_and_what_an_error_ends_is_not(tmp_path, interrupted):
    translator = made()
    saves = SaveTranslator(tmp_path, translator)
    state = state_of(translator, [], interrupted=interrupted)
    saves.on_fit_begin(state)
    saves.on_fit_end(state)
    assert [path.name for path in tmp_path.iterdir()] == (["last"] if interrupted else [])


def test_a_monitor_without_a_test_set_is_refused(tmp_path):
    translator = made()
    state = state_of(translator, [])
    state.tests = False
    with pytest.raises(TrainerError, match="valid_loss"):
        SaveTranslator(tmp_path / "run", translator).on_fit_begin(state)
    assert not (tmp_path / "run").exists()

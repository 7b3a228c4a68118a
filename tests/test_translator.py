"""A translator: text in, text out, and the folder that it is saved in."""

import shutil

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.data import EOS, SentencePairs, build_vocabulary
from gluon_mgpu.errors import StateError, TrainerError
from gluon_mgpu.models.seq2seq.beam_search import translate
from gluon_mgpu.models.seq2seq.translator import Translator, load_translator
from gluon_mgpu.mxnet_internals.parameters import structural_params

from .conftest import mostly_two

PAIRS = SentencePairs(["하나 둘", "둘 셋 넷", "넷 하나 셋", "셋"], ["one two", "two three four", "four one three", "three"])
SIZES = {"embed_size": 6, "hidden_size": 8}


def made(devices=None, **options):
    vocabularies = [build_vocabulary(side, "words") for side in (PAIRS.source, PAIRS.target)]
    translator = Translator(*vocabularies, **{**SIZES, **options})
    translator.net.initialize(mx.init.Normal(0.5), ctx=devices or mx.cpu(0))
    return translator


def trained(translator):
    """The trainer of one step."""
    numbers = mgpu.data.encode_pairs(PAIRS, translator.source_vocabulary, translator.target_vocabulary)
    loader = mgpu.data.PairLoader(*numbers, 40)
    trainer = mgpu.Trainer(translator.net, "adam", {"learning_rate": 0.01})
    mgpu.train_batch(translator.net, mgpu.models.SequenceLoss(), trainer, *next(iter(loader)))
    return trainer


def weights(translator):
    params = structural_params(translator.net)
    return {name: param.list_data()[0].asnumpy() for name, param in params.items()}


@mostly_two
def test_texts_become_what_the_network_makes_of_their_tokens(devices, arrays):
    translator = made(devices)
    texts = ["둘 셋", "하나", "넷 넷 하나"]
    numbers = translate(translator.net, [translator.source_vocabulary.encode(text) for text in texts], beam_size=3, num_best=2)
    found = translator.translate(texts, beam_size=3, num_best=2)
    assert [[one.text for one in best] for best in found] == [
        [translator.target_vocabulary.decode(one.tokens) for one in best] for best in numbers
    ]
    assert [[one.score for one in best] for best in found] == [[one.score for one in best] for best in numbers]
    assert translator.best(iter(texts), beam_size=3) == [best[0].text for best in found]


def test_a_text_without_words_stays_empty_in_its_place():
    translator = made()
    words, *rest = translator.translate(["하나", "", "  "], beam_size=2, num_best=2)
    assert len(words) == 2
    assert [[(one.text, one.score) for one in best] for best in rest] == [[("", 0.0)], [("", 0.0)]]
    assert translator.translate(["", "하나"])[1] == translator.translate(["하나"])[0]
    assert translator.translate([]) == []


def test_attention_is_counted_in_tokens():
    translator = made()
    ((one,),) = translator.translate(["둘 셋"], attention=True, max_length=5)
    assert one.source_tokens == ["▁둘", "▁셋", "<eos>"]
    assert one.attention.shape == (len(one.target_tokens), 3)
    assert np.allclose(one.attention.sum(axis=1), 1)
    ended = one.target_tokens[-1] == "<eos>"
    assert len(one.target_tokens) == 5 or ended
    assert translator.target_vocabulary.tokens([EOS]) == ["<eos>"]


@pytest.mark.parametrize("texts", ["하나", [1], [["하나"]], [None]])
def test_what_is_no_list_of_texts_is_refused(texts):
    with pytest.raises(TrainerError):
        made().translate(texts)


# The folder


@mostly_two
def test_what_is_saved_is_loaded_on_any_devices(devices, arrays, tmp_path):
    translator = made([mx.cpu(0), mx.cpu(1)], cell="lstm", num_layers=2, attention="additive")
    translator.save(tmp_path / "new" / "model", trained(translator), progress={"epoch": 3})
    loaded = load_translator(tmp_path / "new" / "model", devices)
    assert loaded.net.encoder.embedding.weight.list_ctx() == devices
    for (name, ours), (again, read) in zip(weights(translator).items(), weights(loaded).items()):
        assert name == again and np.array_equal(ours, read)
    assert loaded.options == translator.options
    assert loaded.best(PAIRS.source) == translator.best(PAIRS.source)
    checkpoint = tmp_path / "new" / "model" / "checkpoint"
    assert mgpu.load_checkpoint(loaded.net, checkpoint, mgpu.Trainer(loaded.net, "adam")) == {"epoch": 3}


def test_a_folder_is_replaced_as_a_whole(tmp_path):
    folder = tmp_path / "model"
    translator = made()
    translator.save(folder, trained(translator))
    before = weights(translator)
    made(num_layers=2).save(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint", "model.json", "source.vocab", "target.vocab"]
    assert not (folder / "checkpoint" / "trainer.states").exists()
    assert load_translator(folder).options["num_layers"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert before.keys() != weights(load_translator(folder)).keys()


@pytest.mark.parametrize("name", ["model.json", "source.vocab", "target.vocab", "checkpoint"])
def test_a_missing_part_is_named(tmp_path, name):
    folder = tmp_path / "model"
    made().save(folder)
    shutil.rmtree(folder / name) if name == "checkpoint" else (folder / name).unlink()
    with pytest.raises(StateError, match=f"without {name}"):
        load_translator(folder)

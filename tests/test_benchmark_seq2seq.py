"""The seq2seq benchmark: all contenders train on the same sentences, and each computes what its description says."""

import json
from dataclasses import replace

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
import seq2seq
import seq2seq_with_mxnet
import seq2seq_with_torch
import workloads
from case import Case
from click.testing import CliRunner
from commands import main
from gluon_mgpu.data import korean_numbers
from measure import run_round
from sentences import Sentences, read_batches, write_batches

ON_MXNET = [name for name in workloads.SEQ2SEQ_CONTENDERS if name != "torch"]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """The comparison run once, in its quick form: the printed output, the JSON, and the folder."""
    folder = tmp_path_factory.mktemp("seq2seq")
    options = ["--quick", "--contenders", ",".join(ON_MXNET), "--num-devices", "2", "--size", "korean-numbers"]
    result = CliRunner().invoke(main, ["seq2seq", *options, "--output", str(folder)])
    assert result.exit_code == 0, result.output
    return result.output, json.loads((folder / "seq2seq.json").read_text()), folder


@pytest.mark.exhaustive
def test_every_contender_has_every_round(outcome):
    output, found, folder = outcome
    groups = {}
    for row in found["rows"]:
        assert row["reason"] == "" and len(row["rounds"]) == found["rounds"] == 2
        assert all(set(one) == {"pass_s"} and one["pass_s"] > 0 for one in row["rounds"])
        assert ("gluon_mgpu" in row["versions"]) == row["contender"].startswith("ours")
        groups.setdefault(row["group"], []).append(row["contender"])
    *alone, (several, there) = groups.items()
    assert several.startswith("korean-numbers, 2 contexts") and there == ON_MXNET
    assert [names for _, names in alone] in ([["ours"]], [])  # with one thread, if there is another core
    titles = [table["title"].split(",")[0] for table in found["tables"]]
    assert titles == ["contenders", "training", "ours: batches of similar lengths", "scaling: one thread per context"]
    assert (folder / "seq2seq.png").stat().st_size > 10_000
    assert "sentences/s" in output


def test_the_post_is_run_as_published_and_the_cells_with_our_settings():
    text = seq2seq.Text("x", Case("seq2seq"), 1, {})
    rows = {row.contender: row.environment for row in seq2seq.seq2seq_rows(ON_MXNET, [2], text)[1]}
    assert rows["korean-post"] == {}
    assert rows["gluon-cells"]["MXNET_CPU_TEMP_COPY"] == rows["ours"]["MXNET_CPU_TEMP_COPY"] == "128"


@pytest.fixture(scope="module", params=seq2seq.SIZES)
def text(request, tmp_path_factory):
    return seq2seq.make_text(request.param, tmp_path_factory.mktemp("text"), quick=True)


def sentences(text, way):
    """The sentences of one way of padding, without it: source, decoder's input and output."""
    found = []
    for batch in read_batches(text.case.corpus, way):
        for source, s, before, after, t in zip(*batch):
            assert not source[s:].any() and not before[t:].any() and not after[t:].any()
            found.append((tuple(source[:s]), tuple(before[:t]), tuple(after[:t])))
    return found


def test_all_contenders_read_the_same_sentences(text):
    there = [sorted(sentences(text, way)) for way in seq2seq.WAYS]
    assert there[0] == there[1] == there[2]
    assert len(there[0]) == text.case.num_sentences
    for source, before, after in there[0]:
        assert source[-1] == after[-1] == 2 and before == (1, *after[:-1])  # <eos>, <bos>
        assert max(source) < text.case.source_vocabulary and max(after) < text.case.target_vocabulary
    assert text.num_tokens == sum(len(source) + len(after) for source, _, after in there[0])


def test_padding_is_counted(text):
    for way, share in text.padding.items():
        sizes = [(batch.source != 0, batch.target_output != 0) for batch in read_batches(text.case.corpus, way)]
        true, total = (sum(count(side) for pair in sizes for side in pair) for count in (np.sum, np.size))
        assert share == pytest.approx(1 - true / total)
    assert text.padding["bucketed"] <= text.padding["padded"] <= text.padding["fixed"]
    assert all(batch.source.shape[1] == text.case.num_tokens == 30 for batch in read_batches(text.case.corpus, "fixed"))


def test_the_text_is_that_of_train_seq2seq(tmp_path):
    text = seq2seq.make_text("korean-numbers", tmp_path, quick=True)
    lengths = sorted(len(source) for source, _, _ in sentences(text, "bucketed"))
    assert lengths == sorted(len(one) + 1 for one in korean_numbers(text.case.num_sentences, 0).source)


@pytest.mark.exhaustive
@pytest.mark.parametrize("contender", [seq2seq_with_mxnet.Cells, seq2seq_with_mxnet.Post])
def test_the_hand_written_loops_learn(text, contender):
    mgpu.resolve_devices("cpu:2")  # one thread each: OpenBLAS hangs when two contexts have several
    trains = contender(replace(text.case, num_devices=2))
    first = np.mean(trains.train())
    for _ in range(8):
        last = np.mean(trains.train())
    assert last < first - 0.005


def test_ours_learns(text):
    trains = seq2seq_with_mxnet.Ours(replace(text.case, num_devices=2))
    X, y = trains.batches[0]

    def loss():
        shards = mgpu.split_batch(X, y, trains.trainer.contexts)
        return sum(float(trains.loss(trains.net(x), t).sum().asscalar()) for x, t in zip(*shards)) / y[1].sum()

    first = loss()
    for _ in range(8):
        run_round(trains, text.case)
    assert loss() < first - 0.005


def test_the_mean_is_over_tokens_without_padding():
    scores = mx.nd.array(np.random.RandomState(0).normal(size=(2, 3, 4)))
    tokens, lengths = np.array([[1, 2, 0], [3, 0, 0]]), np.array([2, 1])
    log_p = scores.asnumpy() - np.log(np.exp(scores.asnumpy()).sum(axis=2, keepdims=True))
    expected = [-(log_p[0, 0, 1] + log_p[0, 1, 2]) / 2, -log_p[1, 0, 3]]
    found = seq2seq_with_mxnet.LengthMean()(scores, mx.nd.array(tokens), mx.nd.array(lengths))
    np.testing.assert_allclose(found.asnumpy(), expected, rtol=1e-5)


def test_the_post_s_network_is_as_large_as_published(text):
    """Its layer between attention and decoder has one row per word, and one column per unit and position."""
    case = replace(text.case, units=5, embed_size=3, source_vocabulary=11, target_vocabulary=13)
    net = seq2seq_with_mxnet.PostSeq2Seq(case)
    assert net.combine.weight.shape == (13, 3 + 30 * 5)
    assert net.decoder.i2h_weight.shape == (15, 13)


def test_batches_are_read_as_written(tmp_path):
    arrays = [np.arange(6, dtype="int32").reshape(2, 3) + i for i in range(3)]
    batches = [Sentences(one, one[:, 0], one, one, one[:, 1]) for one in arrays]
    write_batches(str(tmp_path), "bucketed", batches)
    for left, right in zip(batches, read_batches(str(tmp_path), "bucketed")):
        assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(left, right))


def test_pytorch_computes_what_ours_does(tmp_path):
    """The same weights give the same scores, with packed sequences or not. Padding is not compared."""
    torch = pytest.importorskip("torch")
    text = seq2seq.make_text("korean-numbers", tmp_path, quick=True)
    ours = seq2seq_with_mxnet.Ours(text.case)
    theirs = seq2seq_with_torch.Eager(text.case)
    encoder, decoder = ours.net.encoder, ours.net.decoder
    pairs = {
        "source.weight": encoder.embedding.weight,
        "target.weight": ours.net.target_embedding.weight,
        "key.weight": encoder.keys.weight,
        "bridge.weight": encoder.bridge.weight,
        "bridge.bias": encoder.bridge.bias,
        "vector.weight": decoder.attention.join.weight,
        "output.weight": ours.net.output.weight,
        "output.bias": ours.net.output.bias,
    }
    for name, layer, suffix in (("encoder", encoder.forwards[0], ""), ("encoder", encoder.backwards[0], "_reverse")):
        for kind in ("weight", "bias"):
            pairs[f"{name}.{kind}_ih_l0{suffix}"] = getattr(layer, f"i2h_{kind}")
            pairs[f"{name}.{kind}_hh_l0{suffix}"] = getattr(layer, f"h2h_{kind}")
    for kind in ("weight", "bias"):
        pairs[f"decoder.{kind}_ih_l0"] = getattr(decoder.layers[0], f"i2h_{kind}")
        pairs[f"decoder.{kind}_hh_l0"] = getattr(decoder.layers[0], f"h2h_{kind}")
    assert set(pairs) == set(theirs.parts.state_dict())
    theirs.parts.load_state_dict({name: torch.tensor(param.data().asnumpy()) for name, param in pairs.items()})
    for batch in read_batches(text.case.corpus, "bucketed"):
        found = theirs.scores(*(torch.tensor(array) for array in batch[:3])).detach().numpy()
        expected = ours.net(*(mx.nd.array(array, dtype="int32") for array in batch[:3])).asnumpy()
        true = np.arange(found.shape[1]) < batch.target_length[:, None]
        np.testing.assert_allclose(found[true], expected[true], atol=1e-4)

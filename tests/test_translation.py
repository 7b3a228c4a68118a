import itertools
import os
from functools import lru_cache

import gluon_mgpu as mgpu
import matplotlib
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu import plots
from gluon_mgpu.errors import TrainerError
from gluon_mgpu.models.seq2seq.loss import SequenceLoss
from gluon_mgpu.models.seq2seq.network import Seq2Seq
from gluon_mgpu.models.seq2seq.search import _letters, plot_attention, translate
from matplotlib import font_manager
from matplotlib.ft2font import FT2Font
from mxnet import autograd

from .conftest import assert_house_style

VOCAB = 4  # bos 1, eos 2, and two words: 0 and 3
SENTENCES = [[3, 1], [5], [4, 3, 5, 1], [6, 6, 6], [3, 4, 5, 6, 7]]


def random_model(ctx=None, vocab=VOCAB, scale=2.0, **options):
    mx.random.seed(3)
    net = Seq2Seq(8, vocab, embed_size=4, hidden_size=4, **options)
    net.initialize(mx.init.Uniform(scale), ctx=ctx or mx.cpu())
    return net


def array(values):
    make = mx.np.array if mx.util.is_np_array() else mx.nd.array
    return make(np.array(values), dtype="int32")


def log_p(net, sentence, tokens):
    """Of each next token after these, from the whole network with teacher forcing: shape (tokens + 1, vocabulary)."""
    given = [1, *tokens]
    X = array([[*sentence, 2]]), array([len(sentence) + 1]), array([given])
    scores = (
        (net(X) if net.layout == "NTC" else net((X[0].T, X[1], X[2].T))).asnumpy().reshape((len(given), -1)).astype("float64")
    )
    return scores - np.log(np.exp(scores - scores.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True)) - scores.max(1)[:, None]


WORDS = [token for token in range(VOCAB) if token != 2]


@lru_cache(maxsize=None)
def every_table(feeding, sentence, length):
    """The log-probabilities after each sequence of this length, made once for each network."""
    net = random_model(input_feeding=feeding)
    return {tokens: log_p(net, sentence, tokens) for tokens in itertools.product(WORDS, repeat=length)}


def every_translation(feeding, sentence, max_length, score):
    """(score, log-probability, tokens) of each sequence that ends within this length, or reaches it, best first."""
    tables = every_table(feeding, tuple(sentence), max_length - 1)
    found = []
    for length in range(max_length + 1):
        for tokens in itertools.product(WORDS, repeat=length):
            table = tables[(tokens + (0,) * max_length)[: max_length - 1]]  # of any sequence that begins so
            total = sum(table[i, token] for i, token in enumerate(tokens))
            if length < max_length:
                total += table[length, 2]
            num = min(length + 1, max_length)
            found.append((score(total, num, len(sentence) + 1), total, list(tokens)))
    return sorted(found, key=lambda one: -one[0])


def most_repeats(tokens):
    """How often the same tokens stand in a row, at most: 3 in a b a b a b."""
    found = [1] if tokens else [0]
    for first, last in itertools.combinations(range(len(tokens) + 1), 2):
        piece = tokens[first:last]
        found += [n for n in range(1, len(piece) + 1) if len(piece) % n == 0 and piece == piece[: len(piece) // n] * n]
    return max(found)


@pytest.mark.parametrize(
    "options, score",
    [
        ({"alpha": 0.0, "penalty": "wu"}, lambda total, n, _: total),
        ({"alpha": 1.0, "penalty": "wu"}, lambda total, n, _: total / ((5 + n) / 6)),
        ({"alpha": 0.6, "penalty": "plain"}, lambda total, n, _: total / n**0.6),
        ({"alpha": 2.0, "penalty": "plain"}, lambda total, n, _: total / n**2),
        ({"length_ratio": 0.5}, lambda total, n, m: total / n - abs(np.log(n / (0.5 * m)))),
        ({"length_ratio": 3.0, "alpha": 0.5}, lambda total, n, m: total / n**0.5 - abs(np.log(n / (3 * m)))),
    ],
    ids=["sum", "wu", "plain", "alpha", "short", "long"],
)
@pytest.mark.parametrize("feeding, max_repeats", [(False, None), (True, 2), (False, 1)])
def test_a_wide_beam_finds_what_trying_everything_finds(feeding, max_repeats, options, score):
    net = random_model(input_feeding=feeding)
    found = translate(net, SENTENCES[:3], beam_size=200, num_best=5, max_length=4, max_repeats=max_repeats, **options)
    for sentence, best in zip(SENTENCES, found):
        every = every_translation(feeding, sentence, 4, score)
        expected = [one for one in every if max_repeats is None or most_repeats(one[2]) <= max_repeats][:5]
        assert [one.tokens for one in best] == [tokens for _, _, tokens in expected]
        np.testing.assert_allclose([one.score for one in best], [score for score, _, _ in expected], atol=1e-5)
        np.testing.assert_allclose([one.log_probability for one in best], [total for _, total, _ in expected], atol=1e-5)
        assert [one.finished for one in best] == [len(one.tokens) < 4 for one in best]


@pytest.mark.pairwise
@pytest.mark.parametrize("layout", ["NTC", "TNC"])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_a_beam_of_one_takes_the_likeliest_token_each_time(arrays, cell, layout):
    net = random_model(vocab=9, cell=cell, layout=layout)
    lengths = set()
    for sentence, (one,) in zip(SENTENCES, translate(net, SENTENCES, max_repeats=None)):
        tokens = []
        while len(tokens) < 2 * (len(sentence) + 1) + 10:
            tokens.append(int(log_p(net, sentence, tokens)[-1].argmax()))
            if tokens[-1] == 2:
                break
        assert one.finished == (tokens[-1] == 2)
        assert one.tokens == (tokens[:-1] if one.finished else tokens)
        lengths.add(len(one.tokens))
    assert len(lengths) > 1  # some end by themselves, so that the rule is seen


@pytest.mark.parametrize("beam_size", [1, 3])
def test_neither_batch_nor_devices_show(arrays, beam_size):
    alone = translate(random_model(vocab=9), SENTENCES, beam_size=beam_size, num_best=beam_size, batch_size=1, attention=True)
    for num, batch_size in ((2, 3), (3, 64)):
        net = random_model([mx.cpu(i) for i in range(num)], vocab=9)
        together = translate(net, SENTENCES, beam_size=beam_size, num_best=beam_size, batch_size=batch_size, attention=True)
        for one, other in zip(itertools.chain(*alone), itertools.chain(*together)):
            assert one.tokens == other.tokens
            np.testing.assert_allclose(one.score, other.score, atol=1e-5)
            np.testing.assert_allclose(one.attention, other.attention, atol=1e-5)


def test_n_best_are_different_and_in_order():
    for best in translate(random_model(vocab=9), SENTENCES, beam_size=5, num_best=5):
        assert len({tuple(one.tokens) for one in best}) == len(best) == 5
        assert [one.score for one in best] == sorted((one.score for one in best), reverse=True)


def test_attention_is_that_of_the_whole_network():
    """Rows of the hypothesis that won, also where its beginning stood elsewhere in the beam."""
    net = random_model(vocab=9)
    for sentence, (one,) in zip(SENTENCES, translate(net, SENTENCES, beam_size=4, attention=True)):
        state, memory = net.encode(array([[*sentence, 2]]), array([len(sentence) + 1]))
        num_rows = len(one.tokens) + one.finished
        weights = net.decode(array([[1, *one.tokens][:num_rows]]), state, memory)[2].asnumpy()[0].T
        assert one.attention.shape == (num_rows, len(sentence) + 1)
        np.testing.assert_allclose(one.attention, weights, atol=1e-5)


class Stuck(Seq2Seq):
    """A network that finds the same tokens likeliest, time after time: `tokens[step % their number]`, then the end."""

    def __init__(self, tokens, **options):
        super().__init__(8, 9, embed_size=4, hidden_size=4, **options)
        self.tokens = tokens
        self.initialize()

    def encode(self, source, lengths):
        state, memory = super().encode(source, lengths)
        return (*state, mx.nd.zeros((len(lengths), 1))), memory

    def decode(self, target, state, memory):
        _, after, weights = super().decode(target, state[:-1], memory)
        likely = mx.nd.one_hot(mx.nd.array(self.tokens)[state[-1][:, 0] % len(self.tokens)], 9) * 8
        scores = likely + mx.nd.one_hot(mx.nd.array([2]), 9) * 4
        return mx.nd.expand_dims(scores, axis=1), (*after, state[-1] + 1), weights


@pytest.mark.parametrize("beam_size, tokens", [(1, [5]), (4, [5, 6]), (1, [3, 4, 5, 6, 7]), (4, [3, 4, 5, 6, 7])])
def test_a_network_that_is_stuck_ends(beam_size, tokens):
    net = Stuck(tokens)
    unguarded = translate(net, SENTENCES, beam_size=beam_size, max_length=40, max_repeats=None)
    assert all(most_repeats(best[0].tokens[:20]) >= 4 and not best[0].finished for best in unguarded)
    for max_repeats in (1, 3):
        for (best,) in translate(net, SENTENCES, beam_size=beam_size, max_length=40, max_repeats=max_repeats):
            assert best.tokens == (tokens * max_repeats + tokens)[: len(tokens) * (max_repeats + 1) - 1]
            assert best.finished and most_repeats(best.tokens) == max_repeats


def test_two_repeats_are_the_default():
    net = Stuck([5, 6])
    for (best,), (usual,) in zip(
        translate(net, SENTENCES, max_length=20), translate(net, SENTENCES, max_length=20, max_repeats=2)
    ):
        assert best == usual and most_repeats(best.tokens) == 2


def test_nothing_to_translate():
    assert translate(random_model(), []) == []


def test_the_network_is_left_as_it_was():
    """Called inside of a recording, with dropout: it predicts, and records nothing."""
    net = random_model(vocab=9, dropout=0.5)
    expected = translate(net, SENTENCES)
    with autograd.record():
        assert translate(net, SENTENCES) == expected


def reversed_digits(rng, num):
    return [rng.randint(4, 10, rng.randint(2, 6)).tolist() for _ in range(num)]


@pytest.mark.exhaustive
def test_it_learns_to_write_numbers_backwards(devices):
    net, loss = Seq2Seq(10, 10, embed_size=24, hidden_size=32), SequenceLoss()
    net.initialize(mx.init.Xavier(), ctx=devices)
    net.hybridize()
    trainer = mgpu.Trainer(net, "adam", {"learning_rate": 0.01}, clip_norm=1.0)
    rng = np.random.RandomState(0)
    for i in range(150):
        trainer.set_learning_rate(0.01 if i < 100 else 0.002)
        sentences = reversed_digits(rng, 48)
        loader = mgpu.data.PairLoader(sentences, [one[::-1] for one in sentences], 10000, num_buckets=1)
        for X, y in loader:
            Xs, ys = mgpu.split_batch(X, y, trainer.contexts)
            with autograd.record():
                losses = [loss(net(features), label) for features, label in zip(Xs, ys)]
            mgpu.backward(losses)
            trainer.step(loss.num_units(y))
    new = reversed_digits(np.random.RandomState(1), 100)
    for beam_size in (1, 4):
        found = translate(net, new, beam_size=beam_size)
        assert np.mean([best[0].tokens == sentence[::-1] for sentence, best in zip(new, found)]) > 0.95


# ---- the picture


def test_a_picture_of_attention(tmp_path):
    weights = np.array([[0.9, 0.1, 0.0], [0.0, 0.2, 0.8]])
    figure = plot_attention(weights, ["ein", "Haus", "</s>"], ["house", "</s>"])
    axes, scale = figure.axes
    np.testing.assert_array_equal(axes.images[0].get_array(), weights)
    assert scale.get_ylabel() == "weight"
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["ein", "Haus", "</s>"]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["house", "</s>"]
    plots.save(figure, tmp_path / "attention.png")
    assert (tmp_path / "attention.png").stat().st_size > 1000


def test_fonts_that_have_the_characters_are_taken(monkeypatch):
    """Only two fonts are installed here: the usual one has Latin letters, and the other one a private character."""
    private = "\ue000"
    usual = font_manager.findfont(font_manager.FontProperties())
    other = os.path.join(matplotlib.get_data_path(), "fonts", "ttf", "STIXNonUni.ttf")
    assert ord(private) not in FT2Font(usual).get_charmap()
    assert ord(private) in FT2Font(other).get_charmap()
    fonts = [
        font_manager.FontEntry(
            fname=path, name=name, style="normal", variant="normal", weight=400, stretch="normal", size="scalable"
        )
        for name, path in (("DejaVu Sans", usual), ("STIXNonUnicode", other))
    ]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", fonts)
    for text, also in (("a", False), (private, True)):
        axes = plot_attention(np.ones((1, 1)), [text], ["b"]).axes[0]
        families = axes.get_xticklabels()[0].get_fontfamily()
        assert ("STIXNonUnicode" in families) == also


def test_where_no_font_has_the_characters_the_axis_shows_positions(tmp_path):
    """It drew boxes, and matplotlib warned of each."""
    wanted = r"got '.*', which no installed font has; expected one\. The axis shows positions instead\. Install fonts-nanum"
    with pytest.warns(UserWarning, match=wanted) as caught:
        figure = plot_attention(np.ones((2, 3)), ["a", "\U0010fffd", "c"], ["b", "end"])  # a code point that is nobody's
        plots.save(figure, tmp_path / "attention.png")
    assert len(caught) == 1
    axes = figure.axes[0]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "2", "3"]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["b", "end"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("source: position of the token", "target")


def test_characters_stand_upright_and_words_lean():
    axes = plot_attention(np.ones((1, 3)), ["a", "bc", "</s>"], ["b"]).axes[0]
    assert [label.get_rotation() for label in axes.get_xticklabels()] == [0, 0, 60]


# ---- wrong arguments


@pytest.mark.parametrize(
    "options, told",
    [
        ({"beam_size": 0}, "beam_size=0"),
        ({"batch_size": 1.5}, "batch_size=1.5"),
        ({"max_length": 0}, "max_length=0"),
        ({"max_repeats": 0}, "max_repeats=0"),
        ({"num_best": 2}, "num_best=2 of beam_size=1"),
        ({"alpha": -1}, "alpha=-1"),
        ({"alpha": float("nan")}, "alpha=nan"),
        ({"penalty": "none"}, "penalty='none'"),
        ({"length_ratio": 0}, "length_ratio=0"),
        ({"eos": VOCAB}, f"eos={VOCAB}"),
        ({"bos": -1}, "bos=-1"),
        ({"source_eos": 8}, "source_eos=8"),
        ({"sentences": "three"}, "got str as sentences"),
        ({"sentences": [[3], []]}, "as sentence 1"),
        ({"sentences": [[3], [3, 8]]}, "a token of sentence 1: 8;"),
        ({"sentences": [[3.5]]}, "3.5"),
        ({"net": mx.gluon.nn.Dense(1)}, "got Dense"),
        ({"net": Seq2Seq(8, VOCAB)}, "without initialised parameters"),
    ],
)
def test_a_wrong_argument(options, told):
    with pytest.raises(TrainerError, match=told) as caught:
        translate(**{"net": random_model(), "sentences": SENTENCES, **options})
    assert_house_style(caught.value)


def test_a_picture_of_other_words():
    with pytest.raises(TrainerError, match="1 target and 2 source tokens") as caught:
        plot_attention(np.ones((2, 2)), ["a", "b"], ["c"])
    assert_house_style(caught.value)


@pytest.mark.parametrize(
    "weights, source, told",
    [
        (np.ones((1, 2)), "ab", "source='ab'; expected a list of texts"),
        (np.ones((1, 2)), ["a", 5], "source="),
        ("weights", ["a", "b"], "weights='weights'; expected a NumPy array"),
        ([["x", "y"]], ["a", "b"], "weights="),
    ],
)
def test_a_picture_of_something_else(weights, source, told):
    with pytest.raises(TrainerError, match=f"^plot_attention: got {told}") as caught:
        plot_attention(weights, source, ["c"])
    assert_house_style(caught.value)


def test_a_font_that_is_gone_has_no_letters(tmp_path):
    """matplotlib lists fonts that were installed when it made its list."""
    (tmp_path / "not a font.ttf").write_bytes(b"text")
    assert _letters(str(tmp_path / "gone.ttf")) == _letters(str(tmp_path / "not a font.ttf")) == set()

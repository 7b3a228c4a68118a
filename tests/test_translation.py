import itertools
from functools import lru_cache

import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu import plots
from gluon_mgpu.errors import TrainerError
from gluon_mgpu.models.seq2seq.beam_search import plot_attention, translate
from gluon_mgpu.models.seq2seq.network import Seq2Seq

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
    scores = net(X).asnumpy().reshape((len(given), -1)).astype("float64")
    return scores - np.log(np.exp(scores - scores.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True)) - scores.max(1)[:, None]


WORDS = [token for token in range(VOCAB) if token != 2]


@lru_cache(maxsize=None)
def every_table(sentence, length):
    """The log-probabilities after each sequence of this length, made once for each network."""
    net = random_model()
    return {tokens: log_p(net, sentence, tokens) for tokens in itertools.product(WORDS, repeat=length)}


def every_translation(sentence, max_length, score):
    """(score, log-probability, tokens) of each sequence that ends within this length, or reaches it, best first."""
    tables = every_table(tuple(sentence), max_length - 1)
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


@pytest.mark.each_value
@pytest.mark.parametrize(
    "options, score",
    [
        ({"alpha": 0.0}, lambda total, n, _: total),
        ({"alpha": 0.6}, lambda total, n, _: total / n**0.6),
        ({"alpha": 2.0}, lambda total, n, _: total / n**2),
        ({"length_ratio": 0.5}, lambda total, n, m: total / n - abs(np.log(n / (0.5 * m)))),
        ({"length_ratio": 3.0, "alpha": 0.5}, lambda total, n, m: total / n**0.5 - abs(np.log(n / (3 * m)))),
    ],
    ids=["sum", "plain", "alpha", "short", "long"],
)
@pytest.mark.parametrize("max_repeats", [None, 2, 1])
def test_a_wide_beam_finds_what_trying_everything_finds(max_repeats, options, score):
    net = random_model()
    found = translate(net, SENTENCES[:3], beam_size=200, num_best=5, max_length=4, max_repeats=max_repeats, unk=None, **options)
    for sentence, best in zip(SENTENCES, found):
        every = every_translation(sentence, 4, score)
        expected = [one for one in every if max_repeats is None or most_repeats(one[2]) <= max_repeats][:5]
        assert [one.tokens for one in best] == [tokens for _, _, tokens in expected]
        np.testing.assert_allclose([one.score for one in best], [score for score, _, _ in expected], atol=1e-5)
        np.testing.assert_allclose([one.log_probability for one in best], [total for _, total, _ in expected], atol=1e-5)
        assert [one.finished for one in best] == [len(one.tokens) < 4 for one in best]


@pytest.mark.parametrize("beam_size", [pytest.param(1, marks=pytest.mark.exhaustive), 3])
def test_neither_batch_nor_devices_show(arrays, beam_size):
    alone = translate(random_model(vocab=9), SENTENCES, beam_size=beam_size, num_best=beam_size, batch_size=1, attention=True)
    for num, batch_size in ((2, 3), (3, 64)):
        net = random_model([mx.cpu(i) for i in range(num)], vocab=9)
        together = translate(net, SENTENCES, beam_size=beam_size, num_best=beam_size, batch_size=batch_size, attention=True)
        for one, other in zip(itertools.chain(*alone), itertools.chain(*together)):
            assert one.tokens == other.tokens
            np.testing.assert_allclose(one.score, other.score, atol=1e-5)
            np.testing.assert_allclose(one.attention, other.attention, atol=1e-5)


@pytest.mark.parametrize("beam_size", [1, 4])
def test_no_translation_has_the_unknown_token(beam_size):
    """Also if it is the likeliest one in almost every step."""
    net = random_model(vocab=9)
    net.begin_at(np.log([0.01, 0.01, 0.1, 0.8, *[0.016] * 5]))
    net.initialize(force_reinit=True)
    found = translate(net, SENTENCES, beam_size=beam_size, num_best=beam_size)
    assert all(len(best) == beam_size and 3 not in one.tokens for best in found for one in best)
    assert any(3 in best[0].tokens for best in translate(net, SENTENCES, beam_size=beam_size, unk=None))


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


@pytest.mark.parametrize("beam_size, tokens", [(1, [5]), (4, [3, 4, 5, 6, 7])])
def test_a_network_that_is_stuck_ends(beam_size, tokens):
    net = Stuck(tokens)
    unguarded = translate(net, SENTENCES, beam_size=beam_size, unk=None, max_length=40, max_repeats=None)
    assert all(most_repeats(best[0].tokens[:20]) >= 4 and not best[0].finished for best in unguarded)
    for max_repeats in (1, 3):
        for (best,) in translate(net, SENTENCES, beam_size=beam_size, max_length=40, max_repeats=max_repeats, unk=None):
            assert best.tokens == (tokens * max_repeats + tokens)[: len(tokens) * (max_repeats + 1) - 1]
            assert best.finished and most_repeats(best.tokens) == max_repeats


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


# ---- wrong arguments


@pytest.mark.parametrize(
    "options, told",
    [
        ({"beam_size": 0}, "beam_size=0"),
        ({"num_best": 2}, "num_best=2 of beam_size=1"),
        ({"length_ratio": 0}, "length_ratio=0"),
        ({"eos": VOCAB}, f"eos={VOCAB}"),
        ({"sentences": "three"}, "got str as sentences"),
        ({"sentences": [[3], [3, 8]]}, "a token of sentence 1: 8;"),
        ({"net": Seq2Seq(8, VOCAB)}, "not initialised"),
    ],
)
def test_a_wrong_argument(options, told):
    with pytest.raises(TrainerError, match=told):
        translate(**{"net": random_model(), "sentences": SENTENCES, **options})

"""PairLoader: what its batches hold, in which order, for how many devices; and that networks train on them."""

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.data import (
    PairLoader,
    unigram_log_p,
)
from gluon_mgpu.errors import DataError
from mxnet.gluon import nn

from .conftest import SEED, largest_difference, weights_of


def make_pairs(num_examples, seed=0):
    """Token numbers, each sentence beginning with the pair's index + 4, so that it is known again in a batch."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, 12, (num_examples, 2))
    source, target = [[[i + 4, *rng.integers(4, 50, sizes[i, side]).tolist()] for i in range(num_examples)] for side in (0, 1)]
    return source, target


def make_loader(num_examples=60, batch_tokens=120, **options):
    return PairLoader(*make_pairs(num_examples), batch_tokens, **options)


def read(loader):
    """The indices of each batch of one epoch; every array must be what the sentences say."""
    sides = make_pairs(loader.num_examples)
    batches = []
    for (source, source_length, target_input), (target_output, target_length) in loader:
        arrays = source, target_input, target_output
        assert {array.dtype for array in (*arrays, source_length, target_length)} == {np.dtype(np.int32)}
        examples = (arrays[0][:, 0] - 4).tolist()
        for row, i in enumerate(examples):
            for array, expected in zip(arrays, ([*sides[0][i], 2], [1, *sides[1][i]], [*sides[1][i], 2])):
                assert array[row, : len(expected)].tolist() == expected
                assert not array[row, len(expected) :].any()
            assert (source_length[row], target_length[row]) == (len(sides[0][i]) + 1, len(sides[1][i]) + 1)
        batches.append(examples)
    return batches


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"shuffle": True, "num_shards": 3}, {"num_buckets": 1}])
def test_every_pair_comes_once_an_epoch(options):
    loader = make_loader(**options)
    for _ in range(3):
        batches = read(loader)
        assert sorted(sum(batches, [])) == list(range(60))
        assert len(batches) == len(loader) > 3
    assert loader.epoch == 3


def test_batches_hold_the_tokens_they_may_and_little_padding():
    loader = make_loader(200, 150)
    cells = tokens = 0
    for (source, source_length, target_input), (_, target_length) in loader:
        assert source.size + target_input.size <= 150
        cells += source.size + target_input.size
        tokens += source_length.sum() + target_length.sum()
    assert loader.padding_share == pytest.approx(1 - tokens / cells)
    assert loader.padding_share < make_loader(200, 150, num_buckets=1).padding_share / 2
    assert len({X[0].shape + X[2].shape for X, _ in loader}) <= 2 * len(loader.buckets)


def test_the_order_depends_on_seed_and_epoch_alone():
    loader, again, other = (make_loader(shuffle=True, seed=seed) for seed in (3, 3, 4))
    epochs = [read(loader) for _ in range(3)]
    np.random.seed(7)
    assert [read(again) for _ in range(3)] == epochs
    assert read(other) != epochs[0] != epochs[1] != epochs[2]
    again.epoch = 1
    assert read(again) == epochs[1]
    assert [batch.tolist() for batch in loader.order(2)] == epochs[2]
    assert loader.epoch == 3


def test_shards_hold_about_equal_tokens(arrays):
    contexts = [mx.cpu(0), mx.cpu(1)]
    loader = make_loader(200, 400, num_shards=2, shuffle=True)
    for X, y in loader:
        Xs, ys = mgpu.split_batch(X, y, contexts)
        tokens = [int((x[1].asnumpy() + t[1].asnumpy()).sum()) for x, t in zip(Xs, ys)]
        longest = int((X[1] + y[1]).max())
        assert sum(tokens) == (X[1] + y[1]).sum() and abs(tokens[0] - tokens[1]) <= longest
        if len(X[1]) % 2 == 0:
            assert abs(tokens[0] - tokens[1]) <= longest - int((X[1] + y[1]).min())
        whole = mgpu.gather([(x, t) for x, t in zip(Xs, ys)])
        for mine, theirs in zip((*whole[0], *whole[1]), (*X, *y)):
            np.testing.assert_array_equal(mine.asnumpy(), theirs)
            assert mine.dtype == np.int32


class Tagger(nn.Block):
    """Guesses each output token from the input token and the mean of the source: small, but it needs every array."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.source, self.target = nn.Embedding(80, 6), nn.Embedding(80, 6)
            self.out = nn.Dense(80, flatten=False, in_units=6)

    def forward(self, X):
        source, length, target = X
        total = (self.source(source) * mask(length, source.shape[1])).sum(axis=1)
        mean = total / length.astype("float32").reshape((-1, 1))
        return self.out(self.target(target) + mean.reshape((len(length), 1, -1)))


def mask(length, size):
    """Ones where a sentence has tokens, shape (B, size, 1)."""
    array = mx.np if mx.util.is_np_array() else mx.nd
    below = array.arange(size, ctx=length.context).reshape((1, -1)) < length.astype("float32").reshape((-1, 1))
    return below.astype("float32").reshape((-1, size, 1))


def token_loss(output, label):
    """The sum over each sentence's own tokens."""
    tokens, length = label
    return mx.gluon.loss.SoftmaxCELoss()(output, tokens, mask(length, tokens.shape[1])) * tokens.shape[1]


def make_net(contexts):
    net = Tagger()
    mx.random.seed(SEED)
    net.initialize(mx.init.Xavier(), ctx=contexts)
    return net


def train_one_by_one(batches, sides, rate):
    """Gradient descent by hand on one device, sentence by sentence without padding: it knows of no batch, mask or shard."""
    array = mx.np.array if mx.util.is_np_array() else mx.nd.array
    net = make_net([mx.cpu(0)])
    for batch in batches:
        total = None
        for i in batch:
            source, target_input, target_output = ([*sides[0][i], 2], [1, *sides[1][i]], [*sides[1][i], 2])
            arrays = [array([tokens], dtype="int32") for tokens in (source, target_input, target_output)]
            with mx.autograd.record():
                output = net((arrays[0], array([len(source)], dtype="int32"), arrays[1]))
                loss = mx.gluon.loss.SoftmaxCELoss()(output, arrays[2]) * len(target_output)
            loss.backward()
            grads = [param.grad().asnumpy() for param in net.collect_params().values()]
            total = grads if total is None else [a + b for a, b in zip(total, grads)]
        for param, grad in zip(net.collect_params().values(), total):
            param.set_data(array(param.data().asnumpy() - rate / len(batch) * grad))
    return weights_of(net)


@pytest.mark.pairwise
@pytest.mark.parametrize("micro_steps", [1, 2])
def test_devices_and_padding_do_not_show_in_the_weights(devices, arrays, micro_steps):
    loader = make_loader(40, 250, shuffle=True, num_shards=len(devices), num_buckets=3)
    net = make_net(devices)
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.5})
    for X, y in loader:
        mgpu.train_batch(net, token_loss, trainer, X, y, micro_steps=micro_steps)
    expected = train_one_by_one(loader.order(0), make_pairs(40), 0.5)
    assert largest_difference(weights_of(net), weights_of(make_net([mx.cpu(0)]))) > 0.01
    for context in devices:
        assert largest_difference(weights_of(net, context), expected) < 1e-5


@pytest.mark.parametrize(
    "source, target, options, told",
    [
        ([], [], {}, "0 source and 0 target"),
        ([[4]], [[4], [5]], {}, "1 source and 2 target"),
        ([[4], [2]], [[4], [5]], {}, r"source sentence 1 \[2\]"),
        ([[4], [4]], [[4], [0, 5]], {}, r"target sentence 1 \[0, 5\]"),
        (["text"], [[4]], {}, "source sentence 0 'text'"),
        ([[4]], [[[4], [5, 6]]], {}, r"target sentence 0 \[\[4\], \[5, 6\]\]"),
        ([[4]], [[4]], {"seed": -1}, "seed=-1"),
        ([[4]], [[4]], {"batch_tokens": 3}, "up to 2 and 2 tokens for batches of 3"),
    ],
)
def test_bad_arguments_are_told(source, target, options, told):
    with pytest.raises(DataError, match=f"got .*{told}"):
        PairLoader(source, target, **{"batch_tokens": 100, **options})


# ---- unigrams


def test_unigrams_are_counted_with_one_end_a_sentence():
    log_p = unigram_log_p([[4, 5, 4], [], [5]], 7)
    np.testing.assert_allclose(np.exp(log_p), np.array([1, 1, 4, 1, 3, 3, 1]) / 14)

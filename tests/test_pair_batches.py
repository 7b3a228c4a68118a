"""PairLoader: what its batches hold, in which order, for how many devices; and that networks train on them."""

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.data import PairLoader
from gluon_mgpu.errors import DataError
from gluon_mgpu.models import unigram_log_p


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
    sides = make_pairs(len(loader.lengths))
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


@pytest.mark.parametrize(
    "source, target, options, told",
    [
        ([], [], {}, "0 source and 0 target"),
        ([[4]], [[4], [5]], {}, "1 source and 2 target"),
        ([[4], [2]], [[4], [5]], {}, r"source sentence 1 \[2\]"),
        ([[4], [4]], [[4], [0, 5]], {}, r"target sentence 1 \[0, 5\]"),
        ([[4]], [[4]], {"seed": -1}, "seed=-1"),
        ([[4]], [[4]], {"batch_tokens": 3}, "up to 2 and 2 tokens for batches of 3"),
    ],
)
def test_bad_arguments_are_reported(source, target, options, told):
    with pytest.raises(DataError, match=f"got .*{told}"):
        PairLoader(source, target, **{"batch_tokens": 100, **options})


# ---- unigrams


def test_unigrams_are_counted_with_one_end_a_sentence():
    log_p = unigram_log_p([[4, 5, 4], [], [5]], 7)
    np.testing.assert_allclose(np.exp(log_p), np.array([1, 1, 4, 1, 3, 3, 1]) / 14)

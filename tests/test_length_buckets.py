"""Length buckets and balanced shards: literal lists, brute force, and properties of any lengths."""

import itertools

import numpy as np
import pytest
from gluon_mgpu import plan_shards
from gluon_mgpu.data import balance_shards, padding_share, plan_buckets
from gluon_mgpu.errors import DataError
from hypothesis import given
from hypothesis import strategies as st

from .conftest import assert_house_style

LENGTHS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=80)


def many_lengths(num_examples=3000):
    """Lengths as sentences have them: source and target go together, a few are long."""
    rng = np.random.default_rng(0)
    source = rng.geometric(0.1, num_examples)
    return np.stack([source, np.maximum(1, source + rng.integers(-2, 6, num_examples))], axis=1)


def test_two_kinds_of_examples_give_two_buckets():
    buckets = plan_buckets([[3, 2], [8, 9]] * 5, batch_tokens=20, num_buckets=2)
    assert [bucket.examples.tolist() for bucket in buckets] == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]
    assert [bucket.padded for bucket in buckets] == [(3, 2), (8, 9)]
    assert [bucket.batch_sizes for bucket in buckets] == [[3, 2], [1] * 5]


def test_the_side_that_saves_more_is_cut():
    lengths = [[5, 1], [6, 1], [5, 9], [6, 9]] * 3
    buckets = plan_buckets(lengths, batch_tokens=20, num_buckets=2)
    assert [bucket.padded for bucket in buckets] == [(6, 1), (6, 9)]


def test_the_first_cut_is_the_best_there_is():
    """Against every cut there could be, counted by hand."""
    lengths = many_lengths(60)
    found = plan_buckets(lengths, batch_tokens=int(lengths.max(axis=0).sum()), num_buckets=2)

    def padded(part):
        return len(part) * part.max(axis=0).sum()

    cuts = []
    for side, length in itertools.product((0, 1), range(1, lengths.max())):
        short = lengths[:, side] <= length
        if short.any() and not short.all():
            parts = padded(lengths[short]), padded(lengths[~short])
            cuts += [sum(parts)] if 2 * min(parts) >= lengths.max(axis=0).sum() else []
    assert sum(padded(lengths[bucket.examples]) for bucket in found) == min(cuts)


@given(LENGTHS, st.integers(0, 300), st.integers(1, 8))
def test_every_example_is_in_one_bucket_and_fits(lengths, room, num_buckets):
    sizes = np.array(lengths)
    batch_tokens = int(sizes.max(axis=0).sum()) + room
    buckets = plan_buckets(sizes, batch_tokens, num_buckets)
    assert sorted(i for bucket in buckets for i in bucket.examples) == list(range(len(sizes)))
    assert len(buckets) <= num_buckets
    for bucket in buckets:
        assert bucket.padded == tuple(sizes[bucket.examples].max(axis=0))
        assert sum(bucket.batch_sizes) == len(bucket.examples)
        assert max(bucket.batch_sizes) - min(bucket.batch_sizes) <= 1
        assert max(bucket.batch_sizes) * sum(bucket.padded) <= batch_tokens
        assert len(bucket.batch_sizes) == -(-len(bucket.examples) // (batch_tokens // sum(bucket.padded)))


def test_more_buckets_pad_less():
    lengths = many_lengths()
    shares = [padding_share(lengths, plan_buckets(lengths, 600, num_buckets)) for num_buckets in (1, 2, 4, 8, 16)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.8 and shares[-1] < 0.2
    assert min(sum(bucket.padded) * bucket.batch_sizes[0] for bucket in plan_buckets(lengths, 600, 64)) > 200


def test_the_padding_share_is_that_of_the_arrays():
    lengths = many_lengths(200)
    buckets = plan_buckets(lengths, 300, 4)
    real = np.concatenate([lengths[bucket.examples] for bucket in buckets])
    padded = np.concatenate([np.tile(bucket.padded, (len(bucket.examples), 1)) for bucket in buckets])
    assert padding_share(lengths, buckets) == pytest.approx((padded - real).sum() / padded.sum())
    assert padding_share([[2, 3]] * 4, plan_buckets([[2, 3]] * 4, 10)) == 0


@pytest.mark.parametrize(
    "lengths, options, told",
    [
        ([], {}, r"shape \(0,\)"),
        ([1, 2], {}, r"shape \(2,\)"),
        ([[1, 0]], {}, "lengths"),
        ([[1.0, 2.0]], {}, "float64"),
        ([[1, 9], [9, 1]], {"batch_tokens": 17}, "up to 9 and 9 tokens for batches of 17"),
        ([[1, 2]], {"batch_tokens": 0}, "batch_tokens=0"),
        ([[1, 2]], {"batch_tokens": 2.5}, "batch_tokens=2.5"),
        ([[1, 2]], {"num_buckets": 0}, "num_buckets=0"),
        ([[1, 2]], {"num_buckets": True}, "num_buckets=True"),
    ],
)
def test_bad_arguments_are_told(lengths, options, told):
    with pytest.raises(DataError, match=f"^plan_buckets: got .*{told}") as caught:
        plan_buckets(lengths, **{"batch_tokens": 100, **options})
    assert_house_style(caught.value)


@pytest.mark.parametrize(
    "call, told",
    [
        (lambda: padding_share([[1, 1]], "x"), "^padding_share: got buckets="),
        (lambda: padding_share([[1, 1]], []), "^padding_share: got buckets=\\[\\];"),
        (
            lambda: padding_share([[9, 9]], plan_buckets([[1, 1]], 2)),
            "^padding_share: got lengths=.*those of these buckets",
        ),
        (lambda: padding_share([[1, 1]] * 2, plan_buckets([[9, 9]], 18)), "^padding_share: got lengths=.*these buckets"),
        (lambda: balance_shards([[1, 2]], 2), r"^balance_shards: got lengths=ndarray of shape \(1, 2\)"),
        (lambda: balance_shards([[1], [1, 2]], 2), r"^balance_shards: got lengths=\[\[1\], \[1, 2\]\]; expected an array"),
        (lambda: balance_shards({1: 2}, 2), "^balance_shards: got lengths={1: 2}; expected an array"),
        (lambda: balance_shards([1, 2], 0), "^balance_shards: got num_shards=0"),
    ],
)
def test_lengths_of_something_else_are_reported(call, told):
    with pytest.raises(DataError, match=told) as caught:
        call()
    assert_house_style(caught.value)


def tokens_of_shards(lengths, num_shards):
    """The tokens of each slice that a split makes, after balancing."""
    order = balance_shards(lengths, num_shards)
    assert sorted(order) == list(range(len(lengths)))
    ends = np.cumsum(plan_shards(len(lengths), num_shards))
    return [int(np.asarray(lengths)[part].sum()) for part in np.split(order, ends[:-1])]


@pytest.mark.parametrize(
    "lengths, num_shards, tokens",
    [
        ([4, 3, 2, 1], 2, [5, 5]),
        ([9, 8, 1, 1], 2, [10, 9]),
        ([5, 5, 5], 2, [10, 5]),
        ([1, 1, 8], 2, [8, 2]),
        ([7], 3, [7, 0, 0]),
        ([3, 2, 1], 1, [6]),
    ],
)
def test_shards_hold_about_equal_tokens(lengths, num_shards, tokens):
    assert sorted(tokens_of_shards(np.array(lengths), num_shards), reverse=True) == tokens


@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(1, 8))
def test_equal_shards_differ_by_less_than_two_examples_do(lengths, num_shards):
    lengths = lengths * num_shards
    tokens = tokens_of_shards(lengths, num_shards)
    assert max(tokens) - min(tokens) <= max(lengths) - min(lengths)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(1, 8))
def test_any_shards_differ_by_at_most_the_longest_example(lengths, num_shards):
    tokens = tokens_of_shards(lengths, num_shards)
    assert max(tokens) - min(tokens) <= max(lengths)


def test_balancing_beats_the_order_that_came():
    lengths = np.random.default_rng(0).integers(5, 30, 64)
    as_it_came = [int(part.sum()) for part in np.split(lengths, 4)]
    balanced = tokens_of_shards(lengths, 4)
    assert max(balanced) - min(balanced) <= 2 < max(as_it_came) - min(as_it_came)

"""Length buckets and balanced shards: literal lists, brute force, and properties of any lengths."""

import itertools

import numpy as np
from gluon_mgpu.data.text.length_buckets import balance_shards, plan_buckets
from gluon_mgpu.data_parallel import plan_shards
from hypothesis import given
from hypothesis import strategies as st

LENGTHS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=80)


def many_lengths(num_examples=3000):
    """Lengths as sentences have them: source and target go together, a few are long."""
    rng = np.random.default_rng(0)
    source = rng.geometric(0.1, num_examples)
    return np.stack([source, np.maximum(1, source + rng.integers(-2, 6, num_examples))], axis=1)


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


def tokens_of_shards(lengths, num_shards):
    """The tokens of each slice that a split makes, after balancing."""
    order = balance_shards(np.array(lengths), num_shards)
    assert sorted(order) == list(range(len(lengths)))
    ends = np.cumsum(plan_shards(len(lengths), num_shards))
    return [int(np.asarray(lengths)[part].sum()) for part in np.split(order, ends[:-1])]


@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(1, 8))
def test_any_shards_differ_by_at_most_the_longest_example(lengths, num_shards):
    tokens = tokens_of_shards(lengths, num_shards)
    assert max(tokens) - min(tokens) <= max(lengths)

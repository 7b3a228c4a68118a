"""Which pairs are kept, and how they are split: counts, and parts that share no sentence."""

import itertools

import pytest
from gluon_mgpu.data import SentencePairs, filter_pairs, split_pairs
from gluon_mgpu.errors import DataError
from hypothesis import given
from hypothesis import strategies as st


def test_a_filter_keeps_what_fits_and_counts_the_rest():
    pairs = SentencePairs(["", "aa", "aaaa", "aaaaaaaaa", "aa", "a"], ["b", "bb", "bb", "b", "bbbbb", "bbbb"])
    filtered = filter_pairs(pairs, max_length=5, max_ratio=2)
    assert list(filtered.pairs) == [("aa", "bb"), ("aaaa", "bb")]
    assert (filtered.num_empty, filtered.num_too_long, filtered.num_out_of_ratio) == (1, 1, 2)
    assert str(filtered) == "2 of 6 pairs kept; 1 with an empty side, 1 too long, 2 with too different lengths"
    assert list(filter_pairs(pairs).pairs) == list(pairs)[1:]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=40), st.integers(0, 5))
def test_parts_never_share_a_sentence(numbers, seed):
    pairs = SentencePairs([f"s{s}" for s, _ in numbers], [f"t{t}" for _, t in numbers])
    sizes = [max(1, len(pairs) // 2), 1, 1]
    try:
        parts = split_pairs(pairs, sizes, seed=seed)
    except DataError:
        return
    assert [len(part) for part in parts] == sizes
    for one, other in itertools.combinations(parts, 2):
        assert not set(one.source) & set(other.source) and not set(one.target) & set(other.target)


def test_pairs_that_share_a_sentence_through_others_stay_together():
    chain = SentencePairs(["a", "a", "b", "c"], ["1", "2", "2", "3"])
    for seed in range(8):
        large, small = split_pairs(chain, (3, 1), seed=seed)
        assert (set(large.source), small.source) == ({"a", "b"}, ("c",))


@pytest.mark.parametrize(
    "sizes, seed, found",
    [((3, 2), 0, "sizes"), ((0, 2), 0, "sizes"), ((1.5,), 0, "sizes"), ((2, 1), 0, "share"), ((1,), -1, "seed")],
)
def test_parts_that_cannot_be_are_reported(sizes, seed, found):
    pairs = SentencePairs(["a", "a", "a", "b"], ["1", "2", "3", "4"])
    with pytest.raises(DataError, match=f"^split_pairs: got .*{found}"):
        split_pairs(pairs, sizes, seed=seed)
    with pytest.raises(DataError, match="sizes=3"):
        split_pairs(pairs, 3)

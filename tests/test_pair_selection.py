"""Which pairs are kept, and how they are split: counts, and parts that share no sentence."""

import itertools

import pytest
from gluon_mgpu.data import SentencePairs, filter_pairs, split_pairs
from gluon_mgpu.errors import DataError
from hypothesis import given
from hypothesis import strategies as st

from .conftest import assert_house_style


def test_a_filter_keeps_what_fits_and_counts_the_rest():
    pairs = SentencePairs(["", "aa", "aaaa", "aaaaaaaaa", "aa", "a"], ["b", "bb", "bb", "b", "bbbbb", "bbbb"])
    filtered = filter_pairs(pairs, min_length=1, max_length=5, max_ratio=2)
    assert list(filtered.pairs) == [("aa", "bb"), ("aaaa", "bb")]
    assert (filtered.num_too_short, filtered.num_too_long, filtered.num_out_of_ratio) == (1, 1, 2)
    assert str(filtered) == "2 of 6 pairs kept; 1 too short, 1 too long, 2 with too different lengths"
    assert list(filter_pairs(pairs, min_length=0).pairs) == list(pairs)


def test_a_filter_measures_each_side_its_own_way():
    pairs = SentencePairs(["가나다", "가나다라마"], ["a b c", "a b"])
    filtered = filter_pairs(pairs, max_ratio=1, length=(len, lambda text: len(text.split())))
    assert list(filtered.pairs) == [("가나다", "a b c")]


@pytest.mark.parametrize(
    "limits", [{"min_length": 5, "max_length": 4}, {"max_ratio": 0.5}, {"min_length": -1}, {"max_ratio": float("nan")}]
)
def test_limits_that_keep_nothing_are_told(limits):
    with pytest.raises(DataError, match="^filter_pairs: got") as caught:
        filter_pairs(SentencePairs([], []), **limits)
    assert_house_style(caught.value)


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


def test_a_split_without_shared_sentences_takes_every_pair_once():
    pairs = SentencePairs(list(map(str, range(20))), list(map(str, range(20))))
    parts = split_pairs(pairs, (14, 4, 2))
    assert [len(part) for part in parts] == [14, 4, 2]
    assert sorted(pair for part in parts for pair in part) == sorted(pairs)
    assert [list(part) for part in split_pairs(pairs, (14, 4, 2))] == [list(part) for part in parts]
    assert list(split_pairs(pairs, (14, 4, 2), seed=1)[1]) != list(parts[1])


def test_pairs_that_share_a_sentence_through_others_stay_together():
    chain = SentencePairs(["a", "a", "b", "c"], ["1", "2", "2", "3"])
    for seed in range(8):
        large, small = split_pairs(chain, (3, 1), seed=seed)
        assert (set(large.source), small.source) == ({"a", "b"}, ("c",))


def test_every_part_draws_from_everywhere():
    pairs = SentencePairs(list(map(str, range(100))), list(map(str, range(100))))
    drawn = [int(text) for seed in range(50) for text in split_pairs(pairs, (50, 5), seed=seed)[1].source]
    assert 40 < sum(drawn) / len(drawn) < 60 and len(set(drawn)) > 80


@pytest.mark.parametrize(
    "sizes, seed, found",
    [((3, 2), 0, "sizes"), ((0, 2), 0, "sizes"), ((1.5,), 0, "sizes"), ((2, 1), 0, "share"), ((1,), -1, "seed")],
)
def test_parts_that_cannot_be_are_told(sizes, seed, found):
    pairs = SentencePairs(["a", "a", "a", "b"], ["1", "2", "3", "4"])
    with pytest.raises(DataError, match=f"^split_pairs: got .*{found}") as caught:
        split_pairs(pairs, sizes, seed=seed)
    assert_house_style(caught.value)
    with pytest.raises(DataError, match="^split_pairs: got sizes=3; expected a list"):
        split_pairs(pairs, 3)


@pytest.mark.parametrize(
    "length, told", [((len,), "length=.*a pair of them"), (str.upper, r"length\(text\)='A'; expected a number")]
)
def test_a_length_that_measures_nothing_is_reported(length, told):
    with pytest.raises(DataError, match=f"^filter_pairs: got {told}") as caught:
        filter_pairs(SentencePairs(["a"], ["1"]), length=length)
    assert_house_style(caught.value)

"""The default run covers every pair of options with few of their combinations; `--exhaustive` runs all of them."""

from itertools import combinations, product
from types import SimpleNamespace

import pytest

from .conftest import beyond_pairs
from .pairwise import all_pairs

SIZES = [(5,), (3, 2), (2, 3, 3, 8), (5, 2, 3, 3), (4, 4, 4), (2,) * 7]


def pairs(rows):
    """The pairs of places and values, listed another way than by the code under test."""
    places = combinations(range(len(rows[0])), 2)
    return {(i, j, row[i], row[j]) for i, j in places for row in rows}


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_value_and_every_pair_is_covered(sizes):
    rows = list(product(*map(range, sizes)))
    chosen = [rows[i] for i in all_pairs(rows)]
    assert [set(values) for values in zip(*chosen)] == [set(range(size)) for size in sizes]
    assert pairs(chosen) == pairs(rows)
    least, largest = 1, sorted(sizes)[-2:]
    for size in largest:
        least *= size
    assert least <= len(chosen) <= 1.5 * least + 4  # not much more than any choice must hold


def test_pairs_that_never_occur_are_not_asked_for():
    rows = [row for row in product(range(3), repeat=3) if row[0] != row[1]]
    chosen = [rows[i] for i in all_pairs(rows)]
    assert pairs(chosen) == pairs(rows)
    assert len(chosen) < len(rows)


def test_the_choice_is_always_the_same():
    rows = list(product("ab", "cd", "ef"))
    assert all_pairs(rows) == all_pairs(list(rows)) == [0, 3, 5, 6]
    assert all_pairs([]) == []


class Item(SimpleNamespace):
    __hash__ = object.__hash__


def item(function, marks=(), **params):
    return Item(function=function, keywords=marks, callspec=SimpleNamespace(params=params))


def test_only_marked_functions_lose_combinations():
    marked = [item(1, ["pairwise"], a=a, b=b, c=c) for a, b, c in product([1, 2], "cd", [None, {}])]
    other = [item(2, ["pairwise"], a=a, b=b) for a, b in product([1, 2], "cd")]
    unmarked = [item(3, [], a=a, b=b, c=c) for a, b, c in product([1, 2], "cd", [None, {}])]
    doctest = Item(keywords=())  # has no parameters
    left_out = beyond_pairs([*unmarked, *marked, doctest, *other])
    assert [one in left_out for one in marked] == [False, True, True, False, True, False, False, True]
    assert len(left_out) == 4

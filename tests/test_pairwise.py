"""The default run covers every pair of options with few of their combinations; `--exhaustive` runs all of them."""

from itertools import combinations, product

import pytest

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

"""All-pairs selection: a few of many combinations of options, in which every two values still occur together."""

from itertools import combinations


def pairs_of(row):
    """Every two options with their values; a single option counts by itself."""
    return set(combinations(enumerate(row), min(2, len(row))))


def all_pairs(rows):
    """Choose combinations greedily until they hold every pair of values that any combination holds.

    Parameters
    ----------
    rows : list of tuple
        Combinations of equally many values, one per option.

    Returns
    -------
    list of int
        Indices of the chosen rows, ascending. Ties go to the first row, so that equal rows give an equal choice.
    """
    held = [pairs_of(row) for row in rows]
    missing, chosen = set().union(*held), []
    while missing:
        best = max(range(len(rows)), key=lambda i: len(held[i] & missing))
        chosen.append(best)
        missing -= held[best]
    return sorted(chosen)

"""A few of many combinations of options, in which every value still occurs, or every two values together."""

from itertools import combinations


def chosen_of(rows, size):
    """Choose combinations greedily until they hold every `size` values that any combination holds together.

    Parameters
    ----------
    rows : list of tuple
        Combinations of equally many values, one per option.

    Returns
    -------
    list of int
        Indices of the chosen rows, ascending. Ties go to the first row, so that equal rows give an equal choice.
    """
    held = [set(combinations(enumerate(row), min(size, len(row)))) for row in rows]
    missing, chosen = set().union(*held), []
    while missing:
        best = max(range(len(rows)), key=lambda i: len(held[i] & missing))
        chosen.append(best)
        missing -= held[best]
    return sorted(chosen)

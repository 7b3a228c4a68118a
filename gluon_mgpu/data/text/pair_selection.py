"""Selects sentence pairs: filters by length, splits into parts that share no sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Sequence, Tuple

import numpy as np

from ...checks import MOST_SEED, instance, is_number, is_whole, short, whole_number
from ...errors import DataError
from .pairs import SentencePairs


@dataclass(frozen=True)
class FilteredPairs:
    """The pairs that passed a filter, and the numbers of removed pairs.

    Attributes
    ----------
    pairs : SentencePairs
    num_empty, num_too_long, num_out_of_ratio : int
        Removed pairs, each counted once, for the first of these reasons that applies.
    """

    pairs: SentencePairs
    num_empty: int
    num_too_long: int
    num_out_of_ratio: int

    def __str__(self) -> str:
        removed = self.num_empty + self.num_too_long + self.num_out_of_ratio
        return (
            f"{len(self.pairs)} of {len(self.pairs) + removed} pairs kept; {self.num_empty} with an empty side, "
            f"{self.num_too_long} too long, {self.num_out_of_ratio} with too different lengths"
        )


def filter_pairs(
    pairs: SentencePairs, *, max_length: float = float("inf"), max_ratio: float = float("inf"), length: Callable[[str], int] = len
) -> FilteredPairs:
    """Return the pairs whose lengths are within limits, and the numbers of the others.

    Parameters
    ----------
    pairs : SentencePairs
    max_length : number
        Of each side. Empty sides are always removed.
    max_ratio : float, 1 or more
        The ratio of the longer side's length to the shorter one's. Korean uses about half the characters of English.
    length : callable (str) -> int
        Characters by default; `lambda text: len(text.split())` counts words.

    Raises
    ------
    DataError
        No pair can satisfy the limits.

    Examples
    --------
    >>> pairs = SentencePairs(["가 나 다", "가", ""], ["a b c d", "a b c d", "a b"])
    >>> filtered = filter_pairs(pairs, max_ratio=2, length=lambda text: len(text.split()))
    >>> print(filtered)
    1 of 3 pairs kept; 1 with an empty side, 0 too long, 1 with too different lengths
    """
    _check_pairs("filter_pairs", pairs)
    if not is_number(max_length) or not is_number(max_ratio) or not max_length >= 1 or not max_ratio >= 1:
        raise DataError(
            f"filter_pairs: got max_length={short(max_length)} and max_ratio={short(max_ratio)}; expected 1 or more each. Other "
            "limits keep nothing."
        )
    kept: List[int] = []
    num_empty = num_too_long = 0
    for i, (source, target) in enumerate(pairs):
        shorter, longer = sorted((length(source), length(target)))
        if not source or not target:
            num_empty += 1
        elif longer > max_length:
            num_too_long += 1
        elif longer <= max_ratio * max(shorter, 1):
            kept.append(i)
    return FilteredPairs(pairs.take(kept), num_empty, num_too_long, len(pairs) - len(kept) - num_empty - num_too_long)


def split_pairs(pairs: SentencePairs, sizes: Sequence[int], *, seed: int = 0) -> List[SentencePairs]:
    """Return random parts of the pairs, such that no sentence of one part is in another.

    ```
    "Run!" ─ "뛰어!"     pairs that share a sentence, directly or through others, stay together:
    "Run!" ─ "달려!"     a test on a trained sentence shows nothing
    "Go!"  ─ "달려!"
    ```

    Parameters
    ----------
    pairs : SentencePairs
    sizes : sequence of int
        Of each part: (3400, 200, 198) to train, validate and test. The remaining pairs are not used.
    seed : int

    Raises
    ------
    DataError
        There are too few pairs, or connected pairs do not fit into the parts.
    """
    _check_pairs("split_pairs", pairs)
    wanted: List[Any] = list(sizes) if isinstance(sizes, (list, tuple)) else [None]
    if not all(is_whole(n) and n >= 1 for n in wanted) or sum(wanted) > len(pairs):
        raise DataError(
            f"split_pairs: got sizes={short(sizes)} for {len(pairs)} pairs; expected whole numbers of 1 or more, together at "
            f"most {len(pairs)}. Pass for example (300, 20)."
        )
    whole_number("split_pairs", "seed", seed, low=0, high=MOST_SEED, advice="Pass for example 0.", error=DataError)
    rng = np.random.default_rng(seed)
    groups = _connected(pairs)
    groups = sorted((groups[i] for i in rng.permutation(len(groups))), key=len, reverse=True)
    free = [*wanted, len(pairs) - sum(wanted)]  # the last part holds the unused pairs
    parts: List[List[int]] = [[] for _ in free]
    for group, draw in zip(groups, rng.random(len(groups))):  # large groups first; single pairs fill the rest
        room = [n if n >= len(group) else 0 for n in free]
        if any(room):
            part = int(np.searchsorted(np.cumsum(room), draw * sum(room), side="right"))
            parts[part] += group
            free[part] -= len(group)
    if any(free[:-1]):
        raise DataError(
            f"split_pairs: got pairs that share sentences, which leave {free[:-1]} of the sizes {wanted} unfilled; expected "
            "parts that share none. Request smaller parts, or drop repeated sentences."
        )
    return [pairs.take(sorted(part)) for part in parts[:-1]]


def _check_pairs(operation: str, pairs: Any) -> None:
    instance(operation, "pairs", pairs, SentencePairs, "SentencePairs", advice="Pass what read_pairs returns.", error=DataError)


def _connected(pairs: SentencePairs) -> List[List[int]]:
    """Return the indices of pairs in groups that share no sentence with one another (union-find over the sentences)."""
    above: Dict[Tuple[int, str], Tuple[int, str]] = {}

    def root(sentence: Tuple[int, str]) -> Tuple[int, str]:
        while above.setdefault(sentence, sentence) != sentence:
            above[sentence] = above[above[sentence]]  # shortens later searches
            sentence = above[sentence]
        return sentence

    for source, target in pairs:
        above[root((0, source))] = root((1, target))
    groups: Dict[Tuple[int, str], List[int]] = {}
    for i, source in enumerate(pairs.source):
        groups.setdefault(root((0, source)), []).append(i)
    return list(groups.values())

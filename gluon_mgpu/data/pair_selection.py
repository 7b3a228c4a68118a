"""Which sentence pairs are used, and for what: filtered by length, split into parts that share no sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Dict, List, Sequence, Tuple, Union

import numpy as np

from ..errors import DataError
from .pairs import SentencePairs

Length = Callable[[str], int]


@dataclass(frozen=True)
class FilteredPairs:
    """What a filter let through, and how much it took out.

    Attributes
    ----------
    pairs : SentencePairs
    num_too_short, num_too_long, num_out_of_ratio : int
        Pairs taken out, each counted once, for the first of these reasons that it gives.
    """

    pairs: SentencePairs
    num_too_short: int
    num_too_long: int
    num_out_of_ratio: int

    def __str__(self) -> str:
        removed = self.num_too_short + self.num_too_long + self.num_out_of_ratio
        return (
            f"{len(self.pairs)} of {len(self.pairs) + removed} pairs kept; {self.num_too_short} too short, "
            f"{self.num_too_long} too long, {self.num_out_of_ratio} of unlike lengths"
        )


def filter_pairs(
    pairs: SentencePairs,
    *,
    min_length: int = 1,
    max_length: float = float("inf"),
    max_ratio: float = float("inf"),
    length: Union[Length, Tuple[Length, Length]] = len,
) -> FilteredPairs:
    """Return the pairs whose sides have fitting lengths, and count the others.

    Parameters
    ----------
    pairs : SentencePairs
    min_length, max_length : number
        Of each side.
    max_ratio : float, 1 or more
        Of the longer side's length to the shorter one's. Korean takes about half the characters of English.
    length : callable (str) -> int, or a pair of them (for the source, for the target)
        Characters by default; `lambda text: len(vocabulary.encode(text))` counts tokens.

    Raises
    ------
    DataError
        Limits that no pair can meet.

    Examples
    --------
    >>> pairs = SentencePairs(["가 나 다", "가", "가 나"], ["a b c d", "a b c d", "a b"])
    >>> filtered = filter_pairs(pairs, max_ratio=2, length=lambda text: len(text.split()))
    >>> print(filtered)
    2 of 3 pairs kept; 0 too short, 0 too long, 1 of unlike lengths
    """
    if not 0 <= min_length <= max_length or not max_ratio >= 1:
        raise DataError(
            f"filter_pairs: got min_length {min_length}, max_length {max_length} and max_ratio {max_ratio}; need 0 <= min_length "
            "<= max_length and max_ratio >= 1. Other limits keep nothing."
        )
    of_source, of_target = length if isinstance(length, tuple) else (length, length)
    kept: List[int] = []
    num_too_short = num_too_long = 0
    for i, (source, target) in enumerate(pairs):
        shorter, longer = sorted((of_source(source), of_target(target)))
        if shorter < min_length:
            num_too_short += 1
        elif longer > max_length:
            num_too_long += 1
        elif longer <= max_ratio * max(shorter, 1):
            kept.append(i)
    return FilteredPairs(pairs.take(kept), num_too_short, num_too_long, len(pairs) - len(kept) - num_too_short - num_too_long)


def split_pairs(pairs: SentencePairs, sizes: Sequence[int], *, seed: int = 0) -> List[SentencePairs]:
    """Return parts of the pairs, drawn at random, such that no sentence of one part is in another.

    ```
    "Run!" ─ "뛰어!"     pairs that share a sentence, be it through others, stay together:
    "Run!" ─ "달려!"     a sentence that was trained on tests nothing
    "Go!"  ─ "달려!"
    ```

    Parameters
    ----------
    pairs : SentencePairs
    sizes : sequence of int
        Of each part: (3400, 200, 198) to train, validate and test. What they leave is left out.
    seed : int

    Raises
    ------
    DataError
        There are not so many pairs, or those that belong together do not fit.
    """
    wanted = list(sizes)
    if any(isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 1 for n in wanted) or sum(wanted) > len(pairs):
        raise DataError(
            f"split_pairs: got sizes {wanted} for {len(pairs)} pairs; need whole numbers of 1 or more, together at most "
            f"{len(pairs)}. Ask for fewer."
        )
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
        raise DataError(f"split_pairs: got seed {seed!r}; need 0 or more. Pass a whole number.")
    rng = np.random.default_rng(seed)
    groups = _connected(pairs)
    groups = sorted((groups[i] for i in rng.permutation(len(groups))), key=len, reverse=True)
    free = [*wanted, len(pairs) - sum(wanted)]  # the last part is what is left out
    parts: List[List[int]] = [[] for _ in free]
    for group, draw in zip(groups, rng.random(len(groups))):  # large ones while there is room; single pairs fill what is left
        room = [n if n >= len(group) else 0 for n in free]
        if any(room):
            part = int(np.searchsorted(np.cumsum(room), draw * sum(room), side="right"))
            parts[part] += group
            free[part] -= len(group)
    if any(free[:-1]):
        raise DataError(
            f"split_pairs: got pairs that share sentences, which leave {free[:-1]} of the sizes {wanted} unfilled; need parts "
            "that share none. Ask for smaller parts."
        )
    return [pairs.take(sorted(part)) for part in parts[:-1]]


def _connected(pairs: SentencePairs) -> List[List[int]]:
    """Return the indices of pairs in groups that share no sentence with one another (union-find over the sentences)."""
    above: Dict[Tuple[int, str], Tuple[int, str]] = {}

    def root(sentence: Tuple[int, str]) -> Tuple[int, str]:
        while above.setdefault(sentence, sentence) != sentence:
            above[sentence] = above[above[sentence]]  # shortens the way for those who come later
            sentence = above[sentence]
        return sentence

    for source, target in pairs:
        above[root((0, source))] = root((1, target))
    groups: Dict[Tuple[int, str], List[int]] = {}
    for i, source in enumerate(pairs.source):
        groups.setdefault(root((0, source)), []).append(i)
    return list(groups.values())

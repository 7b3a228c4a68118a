"""Length buckets: examples of similar lengths are padded together, so that little is computed on padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, List, Optional, Tuple

import numpy as np

from ...checks import whole_number
from ...data_parallel.sharding import plan_shards
from ...errors import DataError


@dataclass(frozen=True)
class LengthBucket:
    """Examples that are padded to the same lengths.

    Attributes
    ----------
    examples : numpy.ndarray of int64, shape (n,)
        Their indices, ascending.
    padded : tuple of int
        The padded length of each side: its longest in the bucket.
    batch_sizes : list of int
        As even as possible, so that no small batch remains.
    """

    examples: np.ndarray
    padded: Tuple[int, ...]
    batch_sizes: List[int]


def plan_buckets(lengths: Any, batch_tokens: int, num_buckets: int = 16) -> List[LengthBucket]:
    """Return the examples in buckets with little padding, divided into batches with about the same number of tokens.

    ```
    target │    ┌───────┐      All examples begin in one bucket. Repeatedly, one bucket is cut in two, at the side and length
           │┌──┐│       │      that save the most padding. A part that would not fill half a batch
           ││  │└───────┘      is not cut off.
           │└──┘┌──────┐
           └────┴──────┴─ source
    ```

    Parameters
    ----------
    lengths : array of int, shape (N, sides)
        1 or more each; (N, 2) for source and target.
    batch_tokens : int
        The most tokens of a batch: all sides together, including padding.
    num_buckets : int
        The most buckets. Each has batches of one shape, or of two shapes that differ by one example.

    Raises
    ------
    DataError
        An example is longer than a batch.

    Examples
    --------
    >>> lengths = [[2, 2], [9, 9], [2, 1], [8, 9], [1, 2], [2, 2], [1, 1]]
    >>> for bucket in plan_buckets(lengths, batch_tokens=20, num_buckets=2):
    ...     print(bucket.examples.tolist(), bucket.padded, bucket.batch_sizes)
    [0, 2, 4, 5, 6] (2, 2) [5]
    [1, 3] (9, 9) [1, 1]
    """
    sizes = _checked_lengths(lengths, batch_tokens, num_buckets)
    buckets = [np.arange(len(sizes))]
    cuts = [_best_cut(sizes, buckets[0], batch_tokens)]
    while len(buckets) < num_buckets:
        best = max(range(len(buckets)), key=lambda i: cuts[i][0] if cuts[i] else 0)  # type: ignore[index]
        cut = cuts[best]
        if cut is None:
            break
        _, side, length = cut
        short = sizes[buckets[best], side] <= length
        buckets[best : best + 1] = [buckets[best][short], buckets[best][~short]]
        cuts[best : best + 1] = [_best_cut(sizes, part, batch_tokens) for part in buckets[best : best + 2]]
    return [_bucket(sizes, examples, batch_tokens) for examples in buckets]


def balance_shards(lengths: Any, num_shards: int) -> np.ndarray:
    """Return an order of a batch's examples in which the shards of `plan_shards`, which are slices, hold about equal tokens.

    Examples are assigned in rounds of one per shard, the longest to the shard with the fewest tokens. After a round, two shards
    differ by no more than before, or than the examples of the round do. So with equally many examples per shard, their tokens
    differ by at most the difference of the longest and the shortest example. Shards with one example more get the shortest ones.

    Parameters
    ----------
    lengths : numpy.ndarray of int, shape (B,)
    num_shards : int

    Returns
    -------
    numpy.ndarray of int64, shape (B,)

    Examples
    --------
    >>> lengths = np.array([9, 1, 8, 2, 7])
    >>> order = balance_shards(lengths, 2)
    >>> order.tolist(), [int(lengths[part].sum()) for part in np.split(order, [3])]
    ([1, 3, 0, 4, 2], [12, 15])
    """
    sizes = plan_shards(len(lengths), num_shards)
    longest_first = np.argsort(-lengths, kind="stable")
    num_rounds, num_extra = divmod(len(lengths), num_shards)
    rounds = longest_first[: num_rounds * num_shards].reshape(num_rounds, num_shards)
    shards = [[int(i)] for i in longest_first[len(lengths) - num_extra :]] + [[] for _ in range(num_shards - num_extra)]
    tokens = np.array([lengths[shard].sum() if shard else 0 for shard in shards])
    spread = lengths[rounds[:, 0]] - lengths[rounds[:, -1]] if num_rounds else np.zeros(0)
    for one in rounds[np.argsort(-spread, kind="stable")]:  # rounds with small differences come last, to even out the rest
        for shard, i in zip(np.argsort(tokens, kind="stable"), one):
            shards[shard].append(int(i))
            tokens[shard] += lengths[i]
    assert [len(shard) for shard in shards] == sizes
    return np.array([i for shard in shards for i in shard], np.int64)


def _best_cut(sizes: np.ndarray, examples: np.ndarray, batch_tokens: int) -> Optional[Tuple[int, int, int]]:
    """Return (padding saved, side, largest length of the first part) of a bucket's best cut; None if no cut saves padding."""
    best: Optional[Tuple[int, int, int]] = None
    uncut = len(examples) * sizes[examples].max(axis=0).sum()
    for side in range(sizes.shape[1]):
        ordered = sizes[examples[np.argsort(sizes[examples, side], kind="stable")]]
        count = np.arange(1, len(ordered))
        first = count * np.maximum.accumulate(ordered)[:-1].sum(axis=1)  # padded tokens, if cut after so many
        second = count[::-1] * np.maximum.accumulate(ordered[::-1])[::-1][1:].sum(axis=1)
        allowed = (ordered[:-1, side] < ordered[1:, side]) & (2 * np.minimum(first, second) >= batch_tokens)
        saved = np.where(allowed, uncut - first - second, 0)
        if len(saved) and saved.max() > (best[0] if best else 0):
            best = (int(saved.max()), side, int(ordered[saved.argmax(), side]))
    return best


def _bucket(sizes: np.ndarray, examples: np.ndarray, batch_tokens: int) -> LengthBucket:
    padded = tuple(int(length) for length in sizes[examples].max(axis=0))
    batch_size = batch_tokens // sum(padded)
    return LengthBucket(examples, padded, plan_shards(len(examples), -(-len(examples) // batch_size)))


def _checked_lengths(lengths: Any, batch_tokens: Any, num_buckets: Any) -> np.ndarray:
    for name, number in (("batch_tokens", batch_tokens), ("num_buckets", num_buckets)):
        whole_number("PairLoader", name, number, advice="Pass an int.", error=DataError)
    sizes = np.asarray(lengths)
    longest = sizes.max(axis=0)
    if longest.sum() > batch_tokens:
        raise DataError(
            f"PairLoader: got examples of up to {' and '.join(map(str, longest))} tokens for batches of {batch_tokens}; "
            f"expected batches that hold the longest. Pass batch_tokens={longest.sum()} or more, or remove long examples "
            "(filter_pairs)."
        )
    return sizes

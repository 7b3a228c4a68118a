"""Batches of arrays in memory, by slicing: faster than a DataLoader with or without workers."""

from __future__ import annotations

import zlib
from typing import Any, Iterator, Tuple

import numpy as np

from ..checks import MOST_SEED, flag, one_of, short, whole_number
from ..errors import DataError
from ..nested import host_array, is_device_array


class ArrayLoader:
    """Iterates over batches (X, y) of host arrays.

    Each pass is an epoch. Shuffling depends only on the seed and the epoch's number, not on NumPy's global state.

    Parameters
    ----------
    X, y : array or sequence, shapes (N, ...)
        Kept on the host, as NumPy arrays.
    batch_size : int
        Over all devices.
    shuffle : bool
    seed : int
    last_batch : "keep" or "discard"
        Whether a last batch with fewer examples is used.

    Attributes
    ----------
    epoch : int
        The number of passes begun. Set it to resume another run.
    fingerprint : str
        Of the labels, their number and the seed: `fit` resumes only with the same.

    Raises
    ------
    DataError
        The arrays are empty or of different lengths, or an option is invalid.

    Examples
    --------
    >>> loader = ArrayLoader(np.arange(5), np.arange(5), batch_size=2)
    >>> [x.tolist() for x, _ in loader], len(loader)
    ([[0, 1], [2, 3], [4]], 3)
    """

    def __init__(
        self, X: Any, y: Any, batch_size: int, *, shuffle: bool = False, seed: int = 0, last_batch: str = "keep"
    ) -> None:
        X, y = _on_host("X", X), _on_host("y", y)
        flag("ArrayLoader", "shuffle", shuffle, error=DataError)
        if not X.shape or not y.shape or len(X) != len(y) or not len(X):
            raise DataError(
                f"ArrayLoader: got arrays of shapes {X.shape} and {y.shape}; expected one label per example, 1 "
                "or more. Compare len(X) and len(y)."
            )
        advice = "Pass the examples of a batch over all devices."
        whole_number("ArrayLoader", "batch_size", batch_size, advice=advice, error=DataError)
        whole_number("ArrayLoader", "seed", seed, low=0, high=MOST_SEED, advice="Pass for example 0.", error=DataError)
        one_of("ArrayLoader", "last_batch", last_batch, ("keep", "discard"), advice="'keep' uses every example.", error=DataError)
        self.X, self.y = X, y
        self.batch_size, self.shuffle, self.seed, self.epoch = int(batch_size), shuffle, seed, 0
        self._keep = last_batch == "keep"
        self.fingerprint = f"{zlib.crc32(self.y.tobytes()):x}-{len(y)}-{seed if shuffle else None}"

    def __len__(self) -> int:
        """Return the number of batches of one pass."""
        return (len(self.X) + (self.batch_size - 1 if self._keep else 0)) // self.batch_size

    def __iter__(self) -> Iterator[Tuple[np.ndarray, np.ndarray]]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.X)) if self.shuffle else None
        for i in range(len(self)):
            part = slice(i * self.batch_size, (i + 1) * self.batch_size)
            chosen = part if order is None else order[part]
            yield self.X[chosen], self.y[chosen]


def _on_host(name: str, array: Any) -> np.ndarray:
    try:
        return array.asnumpy() if is_device_array(array) else host_array(array)
    except (TypeError, ValueError):
        raise DataError(f"ArrayLoader: got {name}={short(array)}; expected an array. Pad rows of unequal length.") from None

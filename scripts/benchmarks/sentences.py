"""The batches of the seq2seq benchmark: the same sentences for all contenders, padded in several ways."""

from __future__ import annotations

from pathlib import Path
from typing import Iterable, List, NamedTuple

import numpy as np


class Sentences(NamedTuple):
    """One batch of numbered tokens.

    Attributes
    ----------
    source, target_input, target_output : numpy.ndarray of int32, shape (B, T)
    source_length, target_length : numpy.ndarray of int32, shape (B,)
    """

    source: np.ndarray
    source_length: np.ndarray
    target_input: np.ndarray
    target_output: np.ndarray
    target_length: np.ndarray


def write_batches(folder: str, way: str, batches: Iterable[Sentences]) -> None:
    """Write the batches of one way of padding to a file in the folder."""
    arrays = {f"{i} {name}": array for i, batch in enumerate(batches) for name, array in batch._asdict().items()}
    np.savez(Path(folder) / f"{way}.npz", **arrays)


def read_batches(folder: str, way: str) -> List[Sentences]:
    """Return the batches that `write_batches` wrote."""
    with np.load(Path(folder) / f"{way}.npz") as file:
        num_batches = len(file.files) // len(Sentences._fields)
        return [Sentences(*(file[f"{i} {name}"] for name in Sentences._fields)) for i in range(num_batches)]

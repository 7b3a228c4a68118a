"""The batches of the seq2seq benchmark: the same sentences, padded alike, for all contenders."""

from __future__ import annotations

from pathlib import Path
from typing import Iterable, List, NamedTuple

import numpy as np

_FILE = "batches.npz"


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


def write_batches(folder: str, batches: Iterable[Sentences]) -> None:
    """Write the batches to a file in the folder."""
    arrays = {f"{i} {name}": array for i, batch in enumerate(batches) for name, array in batch._asdict().items()}
    np.savez(Path(folder) / _FILE, **arrays)


def read_batches(folder: str) -> List[Sentences]:
    """Return the batches that `write_batches` wrote."""
    with np.load(Path(folder) / _FILE) as file:
        num_batches = len(file.files) // len(Sentences._fields)
        return [Sentences(*(file[f"{i} {name}"] for name in Sentences._fields)) for i in range(num_batches)]

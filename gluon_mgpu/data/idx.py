"""Files in idx format, the format of MNIST and Fashion-MNIST."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import Optional, Tuple, Union

import numpy as np

from ..checks import MOST_SEED, path_of, whole_number
from ..errors import DataError
from .images import ImageData, from_pixels

_IMAGES, _LABELS = 3, 1  # dimensions of their arrays
_UNSIGNED_BYTE = 0x08

Pair = Tuple[np.ndarray, np.ndarray]  # images, labels


def read_idx(path: Path, num_dimensions: int) -> np.ndarray:
    """Return the array of an idx file of unsigned bytes, gzipped or not.

    ```
    00 00 08 nn   dtype (08: unsigned byte), number of dimensions
    ss ss ss ss   size of each dimension, big-endian
    ...           values, the last dimension fastest
    ```

    Parameters
    ----------
    path : pathlib.Path
    num_dimensions : int
        3 for images (N, height, width), 1 for labels (N,).

    Returns
    -------
    numpy.ndarray of uint8

    Raises
    ------
    DataError
        The file is damaged, truncated, longer than its header says, or has another format.
    OSError
        The file cannot be read.

    Source: LeCun, Cortes, Burges, "The MNIST database", section "File formats".
    """
    content = _read(path)
    begin = 4 + 4 * num_dimensions
    if len(content) < begin:
        raise DataError(f"read_idx: got {len(content)} bytes in {path}; expected a header of {begin}. Fetch the file again.")
    if content[:4] != bytes([0, 0, _UNSIGNED_BYTE, num_dimensions]):
        raise DataError(
            f"read_idx: got magic number {content[:4].hex()} in {path}; expected 000008{num_dimensions:02x}, an idx file of "
            f"bytes with {num_dimensions} dimensions. Fetch it again, or exchange the files of images and labels."
        )
    shape = struct.unpack(f">{num_dimensions}I", content[4:begin])
    if len(content) - begin != math.prod(shape) or len(content) == begin:
        raise DataError(
            f"read_idx: got {len(content) - begin} values in {path}; expected {math.prod(shape)} for shape {shape}, and at least "
            "one. The file is damaged: fetch it again."
        )
    return np.frombuffer(content, np.uint8, offset=begin).reshape(shape)


def load_idx_folder(folder: Union[str, Path], *, seed: int = 0) -> ImageData:
    """Return the images of a folder with MNIST's or Fashion-MNIST's files.

    ```
    train-images-idx3-ubyte[.gz]    train-labels-idx1-ubyte[.gz]
    t10k-images-idx3-ubyte[.gz]     t10k-labels-idx1-ubyte[.gz]
    ```

    If only one of the two pairs exists, it is shuffled by `seed` and split; the last fifth becomes the test set.

    Parameters
    ----------
    folder : str or pathlib.Path
    seed : int

    Raises
    ------
    DataError
        Both pairs are missing, a file is damaged, or the numbers of images and labels differ.
    """
    folder = path_of("load_idx_folder", "folder", folder, error=DataError)
    whole_number("load_idx_folder", "seed", seed, low=0, high=MOST_SEED, advice="Pass for example 0.", error=DataError)
    pairs = [pair for pair in (_read_pair(folder, part) for part in ("train", "t10k")) if pair is not None]
    if not pairs:
        raise DataError(
            f"load_idx_folder: got {folder}, which is not a folder with train-images-idx3-ubyte or t10k-images-idx3-ubyte; "
            "expected one of them, plain or .gz, with its labels. Check --data-dir."
        )
    train, test = pairs if len(pairs) == 2 else _split(pairs[0], seed)
    if train[0].shape[1:] != test[0].shape[1:]:
        raise DataError(
            f"load_idx_folder: got images of {train[0].shape[1:]} and {test[0].shape[1:]} in {folder}; expected one size. "
            "Do not mix the files of two data sets."
        )
    return from_pixels(folder.name, train, test)


def _read(path: Path) -> bytes:
    content = path.read_bytes()
    if content[:2] != b"\x1f\x8b":
        return content
    try:
        return gzip.decompress(content)
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(f"read_idx: got a damaged gzip file {path} ({error}); expected a whole one. Fetch it again.") from error


def _read_pair(folder: Path, part: str) -> Optional[Pair]:
    paths = [_find(folder, part, "images", _IMAGES), _find(folder, part, "labels", _LABELS)]
    if not any(paths):
        return None
    images, labels = (read_idx(path, dimensions) if path else () for path, dimensions in zip(paths, (_IMAGES, _LABELS)))
    if len(images) != len(labels):
        raise DataError(
            f"load_idx_folder: got {len(images)} {part}-images and {len(labels)} {part}-labels in {folder}; expected the same "
            "number. Fetch both files of one data set."
        )
    return images, labels  # type: ignore[return-value]


def _find(folder: Path, part: str, what: str, num_dimensions: int) -> Optional[Path]:
    names = [f"{part}-{what}{dot}idx{num_dimensions}-ubyte{ending}" for ending in ("", ".gz") for dot in "-."]
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _split(pair: Pair, seed: int) -> Tuple[Pair, Pair]:
    images, labels = pair
    order = np.random.default_rng(seed).permutation(len(images))
    num_train = len(images) - round(len(images) / 5)
    if num_train == len(images):
        raise DataError(f"load_idx_folder: got {len(images)} images to split; expected 3 or more. Add images.")
    train, test = order[:num_train], order[num_train:]
    return (images[train], labels[train]), (images[test], labels[test])

"""Files in idx format, the format of MNIST and Fashion-MNIST."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import Any, Optional, Tuple, Union

import numpy as np

from ..checks import MOST_SEED, path_of, real_number, whole_number
from ..errors import DataError
from .images import ImageData, from_pixels

_IMAGES, _LABELS = 3, 1  # dimensions of their arrays
_UNSIGNED_BYTE = 0x08

Pair = Tuple[np.ndarray, np.ndarray]  # images, labels


def read_idx(path: Union[str, Path], num_dimensions: int) -> np.ndarray:
    """Return the array of an idx file of unsigned bytes, gzipped or not.

    ```
    00 00 08 nn   dtype (08: unsigned byte), number of dimensions
    ss ss ss ss   size of each dimension, big-endian
    ...           values, the last dimension fastest
    ```

    Parameters
    ----------
    path : str or pathlib.Path
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
    path = path_of("read_idx", "path", path, error=DataError)
    advice = "Pass 3 for images, 1 for labels."
    num_dimensions = whole_number("read_idx", "num_dimensions", num_dimensions, high=255, advice=advice, error=DataError)
    content = _read(path)
    if len(content) < 4:
        raise DataError(
            f"read_idx: got {len(content)} bytes in {path}; expected an idx file. The file is truncated: fetch it again."
        )
    if content[:4] != bytes([0, 0, _UNSIGNED_BYTE, num_dimensions]):
        raise DataError(
            f"read_idx: got magic number {content[:4].hex()} in {path}; expected 000008{num_dimensions:02x}, an idx "
            "file of bytes with "
            f"{num_dimensions} dimensions. Check that images and labels are not exchanged."
        )
    begin = 4 + 4 * num_dimensions
    if len(content) < begin:
        raise DataError(
            f"read_idx: got {len(content)} bytes in {path}; expected a header of {begin}. The file is truncated: fetch it again."
        )
    shape = struct.unpack(f">{num_dimensions}I", content[4:begin])
    size = math.prod(shape)
    if len(content) - begin != size:
        what = "truncated" if len(content) - begin < size else "longer than its header says"
        raise DataError(
            f"read_idx: got {len(content) - begin} values in {path}; expected {size} for shape {shape}. The file is "
            f"{what}: fetch it again."
        )
    if size == 0:
        raise DataError(f"read_idx: got shape {shape} in {path}; expected at least one value. Fetch it again.")
    return np.frombuffer(content, np.uint8, offset=begin).reshape(shape)


def load_idx_folder(folder: Union[str, Path], *, seed: int = 0, test_fraction: float = 0.2) -> ImageData:
    """Return the images of a folder with MNIST's or Fashion-MNIST's files.

    ```
    train-images-idx3-ubyte[.gz]    train-labels-idx1-ubyte[.gz]
    t10k-images-idx3-ubyte[.gz]     t10k-labels-idx1-ubyte[.gz]
    ```

    If only one of the two pairs exists, it is shuffled by `seed` and split; the last part becomes the test set.

    Parameters
    ----------
    folder : str or pathlib.Path
    seed : int
    test_fraction : float, 0 to 1
        The size of the test set if only one pair exists.

    Raises
    ------
    DataError
        Both pairs are missing, a file is damaged, or the numbers of images and labels differ.
    """
    folder = path_of("load_idx_folder", "folder", folder, error=DataError)
    whole_number("load_idx_folder", "seed", seed, low=0, high=MOST_SEED, advice="Pass for example 0.", error=DataError)
    advice = "0.2 is usual."
    real_number("load_idx_folder", "test_fraction", test_fraction, low=-1e9, high=1e9, advice=advice, error=DataError)
    if not folder.is_dir():
        raise DataError(f"load_idx_folder: got {folder}, which is not a folder; expected one with idx files. Check --data-dir.")
    train, test = _read_pair(folder, "train"), _read_pair(folder, "t10k")
    if train is None and test is None:
        raise DataError(
            f"load_idx_folder: got {folder} without train-images-idx3-ubyte or t10k-images-idx3-ubyte; expected one "
            "of them, plain or .gz, "
            "with its labels. Check --data-dir."
        )
    if train is None or test is None:
        train, test = _split(train or test, seed, test_fraction)
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
        raise DataError(
            f"read_idx: got a damaged gzip file {path} ({error}); expected a complete one. Fetch it again."
        ) from error


def _read_pair(folder: Path, part: str) -> Optional[Pair]:
    images_path = _find(folder, part, "images", _IMAGES)
    labels_path = _find(folder, part, "labels", _LABELS)
    if images_path is None and labels_path is None:
        return None
    if images_path is None or labels_path is None:
        found, missing = (images_path, "labels") if images_path else (labels_path, "images")
        raise DataError(
            f"load_idx_folder: got {found} without its {missing}; expected both. Put {part}-{missing}-idx*-ubyte next to it."
        )
    images, labels = read_idx(images_path, _IMAGES), read_idx(labels_path, _LABELS)
    if len(images) != len(labels):
        raise DataError(
            f"load_idx_folder: got {len(images)} images in {images_path.name} and {len(labels)} labels in {labels_path.name}; "
            "expected as many of each. Do not mix the files of two data sets."
        )
    return images, labels


def _find(folder: Path, part: str, what: str, num_dimensions: int) -> Optional[Path]:
    names = [f"{part}-{what}{dot}idx{num_dimensions}-ubyte{ending}" for ending in ("", ".gz") for dot in "-."]
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _split(pair: Any, seed: int, test_fraction: float) -> Tuple[Pair, Pair]:
    images, labels = pair
    order = np.random.default_rng(seed).permutation(len(images))
    num_test = round(len(images) * test_fraction)
    if not 0 < num_test < len(images):
        raise DataError(
            f"load_idx_folder: got {len(images)} images to split with test_fraction {test_fraction}; expected 1 or "
            "more in each part. "
            "Add images."
        )
    train, test = order[:-num_test], order[-num_test:]
    return (images[train], labels[train]), (images[test], labels[test])

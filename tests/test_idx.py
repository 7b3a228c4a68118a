"""Files in idx format: read as they are, refused when they are damaged, and folders of them."""

import gzip
import shutil
import struct

import gluon_mgpu as mgpu
import numpy as np
import pytest
from gluon_mgpu.data.idx import read_idx
from gluon_mgpu.errors import DataError

IMAGES = (np.arange(2 * 3 * 4) * 10 % 256).astype("uint8").reshape(2, 3, 4)


def idx_bytes(array, magic=None):
    """What an idx file of unsigned bytes holds, written from its description and not from the reader."""
    header = struct.pack(f">{array.ndim}I", *array.shape)
    return (bytes([0, 0, 8, array.ndim]) if magic is None else magic) + header + array.astype("uint8").tobytes()


def write_idx(path, array):
    """Write an idx file, gzipped if its name says so."""
    content = idx_bytes(np.asarray(array))
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_pair(folder, part, num_images, *, size=(3, 4), ending="", first=0):
    """Write images and labels: image i is filled with the pixel `first` + i, and its label is that modulo 10."""
    numbers = first + np.arange(num_images)
    write_idx(folder / f"{part}-images-idx3-ubyte{ending}", np.broadcast_to(numbers[:, None, None], (num_images, *size)))
    write_idx(folder / f"{part}-labels-idx1-ubyte{ending}", numbers % 10)


def pixels(images):
    """The number that each image of `write_pair` is filled with."""
    assert (images == images[:, :1, :1, :1]).all()
    return np.rint(images[:, 0, 0, 0] * 255).astype(int).tolist()


@pytest.mark.parametrize("name", ["images", "images.gz", "gzipped without saying so"])
@pytest.mark.parametrize("array", [IMAGES, np.array([7, 0, 255])], ids=["images", "labels"])
def test_a_file_is_read_as_it_was_written(tmp_path, name, array):
    content = idx_bytes(array)
    (tmp_path / name).write_bytes(content if name == "images" else gzip.compress(content))
    found = read_idx(tmp_path / name, array.ndim)
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, array)


WHOLE = idx_bytes(IMAGES)
DAMAGED = {
    "empty": (b"", r"got 0 bytes"),
    "half a header": (WHOLE[:9], r"got 9 bytes .* expected a header of 16"),
    "a value short": (WHOLE[:-1], r"got 23 values .* expected 24 for shape \(2, 3, 4\)"),
    "a value too many": (WHOLE + b"\0", r"got 25 values .* expected 24"),
    "labels": (idx_bytes(np.arange(20)), r"magic number 00000801 .* expected 00000803.* exchange"),
    "floats": (idx_bytes(IMAGES, magic=b"\0\0\x0d\x03"), r"magic number 00000d03 .* expected 00000803"),
    "no idx file": (b"\x89PNG\r\n\x1a\n" + WHOLE, r"magic number 89504e47"),
    "a cut gzip file": (gzip.compress(WHOLE)[:-9], r"damaged gzip file"),
    "a bit of a gzip file is wrong": (gzip.compress(WHOLE)[:-8] + b"\xff" * 8, r"damaged gzip file"),
    "a truncated file, gzipped": (gzip.compress(WHOLE[:-1]), r"got 23 values"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_refused(tmp_path, damage):
    content, match = DAMAGED[damage]
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(DataError, match=match) as caught:
        read_idx(path, 3)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_a_folder_gives_scaled_images_with_their_labels(tmp_path, ending):
    write_pair(tmp_path, "train", 7, ending=ending, first=249)
    write_pair(tmp_path, "t10k", 3, ending=ending, first=100)
    data = mgpu.data.load_idx_folder(str(tmp_path))
    assert data.name == tmp_path.name
    assert data.train_images.shape == (7, 1, 3, 4)
    assert data.test_images.shape == (3, 1, 3, 4)
    assert {data.train_images.dtype, data.test_images.dtype} == {np.dtype("float32")}
    assert {data.train_labels.dtype, data.test_labels.dtype} == {np.dtype("int32")}
    assert pixels(data.train_images) == [249, 250, 251, 252, 253, 254, 255]
    assert data.train_images.max() == 1.0
    assert data.train_labels.tolist() == [9, 0, 1, 2, 3, 4, 5]
    assert pixels(data.test_images) == [100, 101, 102]
    assert data.test_labels.tolist() == [0, 1, 2]
    assert data.num_classes == 10


@pytest.mark.parametrize("part", ["train", "t10k"])
def test_one_pair_alone_is_split_four_to_one(tmp_path, part):
    write_pair(tmp_path, part, 50)
    data = mgpu.data.load_idx_folder(tmp_path, seed=3)
    assert (len(data.train_images), len(data.test_images)) == (40, 10)
    train, test = pixels(data.train_images), pixels(data.test_images)
    assert sorted(train + test) == list(range(50))
    assert train + test != list(range(50))
    assert data.train_labels.tolist() == [number % 10 for number in train]
    assert data.test_labels.tolist() == [number % 10 for number in test]


def without(name):
    return lambda folder: (folder / name).unlink()


FOLDERS = {
    "nothing": (lambda folder: shutil.rmtree(folder), "which is not a folder with"),
    "no idx file": (lambda folder: [path.unlink() for path in folder.iterdir()], "not a folder with train-images-idx3-ubyte"),
    "no labels": (without("train-labels-idx1-ubyte"), "0 train-labels"),
    "no test images": (without("t10k-images-idx3-ubyte"), "0 t10k-images"),
    "more labels": (
        lambda folder: write_idx(folder / "train-labels-idx1-ubyte", np.arange(5)),
        "4 train-images and 5 train-labels",
    ),
    "two sizes": (lambda folder: write_pair(folder, "t10k", 4, size=(4, 4)), r"images of \(3, 4\) and \(4, 4\)"),
    "exchanged": (lambda folder: write_idx(folder / "train-images-idx3-ubyte", np.arange(20)), "exchange"),
}


@pytest.mark.parametrize("wrong", FOLDERS)
def test_a_wrong_folder_is_refused(tmp_path, wrong):
    alter, words = FOLDERS[wrong]
    folder = tmp_path / "data"
    folder.mkdir()
    write_pair(folder, "train", 4)
    write_pair(folder, "t10k", 4)
    alter(folder)
    with pytest.raises(DataError, match=words):
        mgpu.data.load_idx_folder(folder)

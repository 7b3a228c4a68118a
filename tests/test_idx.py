"""Files in idx format: read as they are, refused when they are damaged, and folders of them."""

import gzip
import os
import struct

import gluon_mgpu as mgpu
import numpy as np
import pytest
from gluon_mgpu.errors import DataError

from .conftest import assert_house_style

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


def told(error, call, *arguments, **kwargs):
    """The message of the error that a call raises, checked for its form."""
    with pytest.raises(error) as caught:
        call(*arguments, **kwargs)
    assert_house_style(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["images", "images.gz", "gzipped without saying so"])
@pytest.mark.parametrize("array", [IMAGES, np.array([7, 0, 255])], ids=["images", "labels"])
def test_a_file_is_read_as_it_was_written(tmp_path, name, array):
    content = idx_bytes(array)
    (tmp_path / name).write_bytes(content if name == "images" else gzip.compress(content))
    for path in (tmp_path / name, str(tmp_path / name)):
        found = mgpu.data.read_idx(path, array.ndim)
        assert found.dtype == np.uint8
        np.testing.assert_array_equal(found, array)


WHOLE = idx_bytes(IMAGES)
DAMAGED = {
    "empty": (b"", r"got 0 bytes .* truncated"),
    "half a magic number": (WHOLE[:3], r"got 3 bytes .* truncated"),
    "half a header": (WHOLE[:9], r"got 9 bytes .* expected a header of 16.* truncated"),
    "a value short": (WHOLE[:-1], r"got 23 values .* expected 24 for shape \(2, 3, 4\).* truncated"),
    "no values": (WHOLE[:16], r"got 0 values .* truncated"),
    "a value too many": (WHOLE + b"\0", r"got 25 values .* longer than its header says"),
    "labels": (idx_bytes(np.arange(3)), r"magic number 00000801 .* expected 00000803.* exchanged"),
    "floats": (idx_bytes(IMAGES, magic=b"\0\0\x0d\x03"), r"magic number 00000d03 .* expected 00000803"),
    "no idx file": (b"\x89PNG\r\n\x1a\n" + WHOLE, r"magic number 89504e47"),
    "nothing in it": (idx_bytes(np.zeros((0, 3, 4))), r"got shape \(0, 3, 4\)"),
    "a cut gzip file": (gzip.compress(WHOLE)[:-9], r"damaged gzip file"),
    "only a gzip header": (gzip.compress(WHOLE)[:2], r"damaged gzip file"),
    "a bit of a gzip file is wrong": (gzip.compress(WHOLE)[:-8] + b"\xff" * 8, r"damaged gzip file"),
    "gzip, then garbage": (gzip.compress(WHOLE) + b"garbage", r"damaged gzip file"),
    "a truncated file, gzipped": (gzip.compress(WHOLE[:-1]), r"got 23 values .* truncated"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_refused(tmp_path, damage):
    content, match = DAMAGED[damage]
    path = tmp_path / "file"
    path.write_bytes(content)
    message = told(DataError, mgpu.data.read_idx, path, 3)
    assert message.startswith("read_idx: got ")
    assert str(path) in message
    pytest.raises(DataError, mgpu.data.read_idx, path, 3).match(match)


def test_a_file_that_is_not_there_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        mgpu.data.read_idx(tmp_path / "no file", 3)


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


def test_a_class_that_only_the_test_set_holds_counts(tmp_path):
    write_pair(tmp_path, "train", 3)
    write_pair(tmp_path, "t10k", 2, first=7)
    assert mgpu.data.load_idx_folder(tmp_path).num_classes == 9


def test_names_with_a_dot_and_mixed_endings_are_found(tmp_path):
    """Some unpacking programs write train-images.idx3-ubyte."""
    write_pair(tmp_path, "train", 3, ending=".gz")
    write_pair(tmp_path, "t10k", 2)
    (tmp_path / "t10k-images-idx3-ubyte").rename(tmp_path / "t10k-images.idx3-ubyte")
    data = mgpu.data.load_idx_folder(tmp_path)
    assert (len(data.train_images), len(data.test_images)) == (3, 2)


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


def test_the_split_depends_on_the_seed_alone(tmp_path):
    write_pair(tmp_path, "train", 50)

    def test_part(seed, **kwargs):
        return pixels(mgpu.data.load_idx_folder(tmp_path, seed=seed, **kwargs).test_images)

    first = test_part(0)
    np.random.seed(99)
    assert test_part(0) == first
    assert set(test_part(1)) != set(first)
    assert len(test_part(0, test_fraction=0.5)) == 25


def test_two_pairs_are_not_split(tmp_path):
    write_pair(tmp_path, "train", 5)
    write_pair(tmp_path, "t10k", 5, first=50)
    data = mgpu.data.load_idx_folder(tmp_path, seed=4, test_fraction=0.4)
    assert (pixels(data.train_images), pixels(data.test_images)) == ([0, 1, 2, 3, 4], [50, 51, 52, 53, 54])


@pytest.mark.parametrize("test_fraction", [0, 0.01, 1, 2, -0.5])
def test_a_split_that_leaves_a_part_empty_is_refused(tmp_path, test_fraction):
    write_pair(tmp_path, "train", 5)
    message = told(DataError, mgpu.data.load_idx_folder, tmp_path, test_fraction=test_fraction)
    assert f"got 5 images to split with test_fraction {test_fraction}" in message


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.write_text("")], ids=["nothing", "a file"])
def test_what_is_no_folder_is_refused(tmp_path, make):
    make(tmp_path / "data")
    assert "which is not a folder" in told(DataError, mgpu.data.load_idx_folder, tmp_path / "data")


def test_a_folder_without_idx_files_is_refused(tmp_path):
    (tmp_path / "cat.png").write_bytes(b"\x89PNG")
    message = told(DataError, mgpu.data.load_idx_folder, tmp_path)
    assert "without train-images-idx3-ubyte or t10k-images-idx3-ubyte" in message


@pytest.mark.parametrize("missing, name", [("labels", "idx1"), ("images", "idx3")])
@pytest.mark.parametrize("part", ["train", "t10k"])
def test_a_file_without_its_partner_is_refused(tmp_path, part, missing, name):
    write_pair(tmp_path, "train", 4)
    write_pair(tmp_path, "t10k", 4)
    (tmp_path / f"{part}-{missing}-{name}-ubyte").unlink()
    message = told(DataError, mgpu.data.load_idx_folder, tmp_path)
    assert f"without its {missing}" in message
    assert f"{part}-{missing}-" in message


def test_more_images_than_labels_are_refused(tmp_path):
    write_pair(tmp_path, "train", 4)
    write_idx(tmp_path / "train-labels-idx1-ubyte", np.arange(5))
    message = told(DataError, mgpu.data.load_idx_folder, tmp_path)
    assert "4 images in train-images-idx3-ubyte and 5 labels in train-labels-idx1-ubyte" in message


def test_two_sizes_of_images_are_refused(tmp_path):
    write_pair(tmp_path, "train", 4, size=(3, 4))
    write_pair(tmp_path, "t10k", 4, size=(4, 4))
    assert "images of (3, 4) and (4, 4)" in told(DataError, mgpu.data.load_idx_folder, tmp_path)


def test_exchanged_images_and_labels_are_refused(tmp_path):
    write_idx(tmp_path / "train-images-idx3-ubyte", np.arange(4))
    write_idx(tmp_path / "train-labels-idx1-ubyte", IMAGES)
    assert "exchanged" in told(DataError, mgpu.data.load_idx_folder, tmp_path)


def test_the_real_files_of_mnist():
    """The test set of MNIST alone, from the folder that GLUON_MGPU_DATA names."""
    folder = os.environ.get("GLUON_MGPU_DATA")
    if not folder:
        pytest.skip("GLUON_MGPU_DATA names no folder with t10k-images-idx3-ubyte.gz and t10k-labels-idx1-ubyte.gz")
    data = mgpu.data.load_idx_folder(folder)
    assert data.train_images.shape == (8000, 1, 28, 28)
    assert data.test_images.shape == (2000, 1, 28, 28)
    labels = np.concatenate([data.train_labels, data.test_labels])
    assert np.bincount(labels).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]  # as published
    assert 0.1 < data.train_images.mean() < 0.15

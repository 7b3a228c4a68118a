"""The embedded digits, and MNIST and Fashion-MNIST through Gluon's own classes, offline."""

from types import SimpleNamespace

import gluon_mgpu as mgpu
import numpy as np
import pytest
from gluon_mgpu.errors import DataError

from .test_idx import write_pair

DOWNLOADED = pytest.mark.parametrize(
    "load, name, train_images_sha1",
    [
        (mgpu.data.load_mnist, "mnist", "6c95f4b05d2bf285e1bfb0e7960c31bd3b3f8a7d"),
        (mgpu.data.load_fashion_mnist, "fashion-mnist", "0cf37b0d40ed5169c6b3aba31069a9770ac9043d"),
    ],
    ids=["mnist", "fashion"],
)


@pytest.fixture
def offline(monkeypatch):
    """No network: how often Gluon asked for it."""
    asked = []

    def get(url, **kwargs):
        asked.append(url)
        raise ConnectionError("no network in the tests")

    monkeypatch.setattr("mxnet.gluon.utils.requests", SimpleNamespace(get=get))
    return asked


@pytest.fixture
def hashes(monkeypatch):
    """Let Gluon take any file for the right one: which sha1 it wanted for which."""
    wanted = {}

    def check_sha1(filename, sha1_hash):
        wanted[filename.rsplit("/", 1)[-1]] = sha1_hash
        return True

    monkeypatch.setattr("mxnet.gluon.utils.check_sha1", check_sha1)
    return wanted


def test_digits_are_all_there_between_0_and_1():
    data = mgpu.data.load_digits()
    assert data.train_images.shape == (1438, 1, 8, 8)
    assert data.test_images.shape == (359, 1, 8, 8)
    for images, labels in ((data.train_images, data.train_labels), (data.test_images, data.test_labels)):
        assert (images.dtype, labels.dtype) == (np.float32, np.int32)
        assert (images.min(), images.max()) == (0, 1)
        assert len(images) == len(labels)
        assert np.unique(labels).tolist() == list(range(10))
    assert (data.name, data.num_classes) == ("digits", 10)


def test_every_digit_is_in_one_part_the_same_each_time():
    source = pytest.importorskip("sklearn.datasets").load_digits()
    data, again = mgpu.data.load_digits(), mgpu.data.load_digits()
    for name in ("train_images", "train_labels", "test_images", "test_labels"):
        np.testing.assert_array_equal(getattr(data, name), getattr(again, name))
    train = [i for i in range(1797) if i % 5 != 4]
    test = [i for i in range(1797) if i % 5 == 4]
    np.testing.assert_array_equal(data.train_images[:, 0] * 16, source.images[train])
    np.testing.assert_array_equal(data.test_images[:, 0] * 16, source.images[test])
    np.testing.assert_array_equal(data.train_labels, source.target[train])
    np.testing.assert_array_equal(data.test_labels, source.target[test])


@DOWNLOADED
def test_gluon_reads_the_files_that_are_there(tmp_path, arrays, offline, hashes, load, name, train_images_sha1):
    write_pair(tmp_path, "train", 6, size=(28, 28), ending=".gz", first=250)
    write_pair(tmp_path, "t10k", 4, size=(28, 28), ending=".gz", first=95)
    data = load(str(tmp_path))
    assert data.name == name
    for images, labels, numbers in (
        (data.train_images, data.train_labels, np.arange(250, 256)),
        (data.test_images, data.test_labels, np.arange(95, 99)),
    ):
        assert type(images) is type(labels) is np.ndarray
        assert (images.dtype, labels.dtype) == (np.float32, np.int32)
        assert images.shape == (len(numbers), 1, 28, 28)
        np.testing.assert_array_equal(images, np.broadcast_to(np.float32(numbers[:, None, None, None]) / 255, images.shape))
        assert labels.tolist() == (numbers % 10).tolist()
    assert offline == []
    assert hashes["train-images-idx3-ubyte.gz"] == train_images_sha1
    assert len(set(hashes.values())) == 4


@DOWNLOADED
def test_without_a_network_the_way_out_is_reported(tmp_path, offline, load, name, train_images_sha1):
    with pytest.raises(DataError, match=rf"{name}.*ConnectionError") as caught:
        load(str(tmp_path))
    assert str(tmp_path) in str(caught.value)
    assert "--data-dir" in str(caught.value)
    assert isinstance(caught.value.__cause__, ConnectionError)
    assert offline
    assert name in offline[0]

"""Images and labels for classification: scikit-learn's digits, and the data sets that Gluon downloads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Type

import mxnet as mx
import numpy as np

from ..errors import DataError
from ..runtime.environment import require


@dataclass(frozen=True)
class ImageData:
    """Training and test images with their labels, on the host.

    Attributes
    ----------
    name : str
    train_images, test_images : numpy.ndarray of float32, shape (N, channels, height, width), 0 to 1
    train_labels, test_labels : numpy.ndarray of int32, shape (N,), 0 to num_classes - 1
    """

    name: str
    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray

    @property
    def num_classes(self) -> int:
        """One more than the largest label."""
        return int(max(self.train_labels.max(), self.test_labels.max())) + 1


def load_digits() -> ImageData:
    """Return scikit-learn's handwritten digits: 1,438 training and 359 test images of 8x8, 10 classes.

    scikit-learn's wheel contains them, so nothing is downloaded. Every fifth image is a test image.

    Raises
    ------
    MissingExtraError
        scikit-learn is not installed.

    Source: Alpaydin, Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998.
    """
    digits = require("sklearn.datasets", "train", "load_digits").load_digits()
    images = (digits.images[:, None] / 16).astype(np.float32)
    labels = digits.target.astype(np.int32)
    is_test = np.arange(len(labels)) % 5 == 4
    return ImageData("digits", images[~is_test], labels[~is_test], images[is_test], labels[is_test])


def load_mnist(root: str) -> ImageData:
    """Return MNIST, which Gluon downloads into `root` if it is missing: 60,000 and 10,000 images of 28x28."""
    return _load_vision("mnist", mx.gluon.data.vision.MNIST, root)


def load_fashion_mnist(root: str) -> ImageData:
    """Return Fashion-MNIST, which Gluon downloads into `root` if it is missing: 60,000 and 10,000 images of 28x28."""
    return _load_vision("fashion-mnist", mx.gluon.data.vision.FashionMNIST, root)


def from_pixels(name: str, train: Any, test: Any) -> ImageData:
    """Return image data from (images, labels) pairs of uint8 pixels of shape (N, height, width)."""
    (train_images, train_labels), (test_images, test_labels) = train, test
    return ImageData(
        name,
        _scaled(train_images),
        np.ascontiguousarray(train_labels, np.int32),
        _scaled(test_images),
        np.ascontiguousarray(test_labels, np.int32),
    )


def _scaled(pixels: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(pixels[:, None], np.float32) / np.float32(255)


def _load_vision(name: str, dataset: Type[Any], root: str) -> ImageData:
    try:
        train, test = dataset(root=root, train=True), dataset(root=root, train=False)
    except Exception as error:  # of requests, the operating system or Gluon
        raise DataError(
            f"load {name}: got {type(error).__name__} ({error}); expected the files in {root}, or the network to download them. "
            "Put the four idx files into a folder and pass it as --data-dir (load_idx_folder)."
        ) from error
    return from_pixels(name, *((images.asnumpy()[..., 0], np.asarray(labels)) for images, labels in (train[:], test[:])))

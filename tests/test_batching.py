"""ArrayLoader: what each epoch holds, and in which order."""

import gluon_mgpu as mgpu
import numpy as np
import pytest
from gluon_mgpu.errors import DataError


def make_loader(num_examples, batch_size, **kwargs):
    """Labels 0, 1, 2, ...; each example is ten times its label."""
    labels = np.arange(num_examples)
    return mgpu.data.ArrayLoader(labels * 10, labels, batch_size, **kwargs)


def read(loader):
    """The labels of one epoch, as lists; the features must be those of the labels."""
    batches = []
    for X, y in loader:
        np.testing.assert_array_equal(X, y * 10)
        batches.append(y.tolist())
    return batches


def orders(epochs=3, **kwargs):
    loader = make_loader(20, 6, shuffle=True, **kwargs)
    return [read(loader) for _ in range(epochs)]


@pytest.mark.parametrize(
    "num_examples, last_batch, batches",
    [
        (5, "keep", [[0, 1], [2, 3], [4]]),
        (5, "discard", [[0, 1], [2, 3]]),
        (4, "keep", [[0, 1], [2, 3]]),
        (4, "discard", [[0, 1], [2, 3]]),
        (1, "keep", [[0]]),
    ],
)
def test_without_shuffling_batches_follow_the_arrays(num_examples, last_batch, batches):
    loader = make_loader(num_examples, 2, last_batch=last_batch)
    assert read(loader) == read(loader) == batches
    assert len(loader) == len(batches)


@pytest.mark.parametrize("last_batch, sizes", [("keep", [6, 6, 6, 2]), ("discard", [6, 6, 6])])
def test_shuffled_epochs_hold_every_example_at_most_once(last_batch, sizes):
    for batches in orders(last_batch=last_batch):
        assert [len(batch) for batch in batches] == sizes
        labels = sum(batches, [])
        assert len(set(labels)) == len(labels) == sum(sizes)
        assert labels != sorted(labels)


def test_the_order_depends_on_seed_and_epoch_alone():
    first, second, third = orders(seed=1)
    assert orders(seed=1) == [first, second, third]
    assert first != second != third != first
    assert all(mine != theirs for mine, theirs in zip(orders(seed=2), [first, second, third]))


@pytest.mark.parametrize(
    "num_features, num_labels, options, told",
    [
        (3, 2, {}, r"shapes \(3,\) and \(2,\)"),
        (0, 0, {}, r"shapes \(0,\) and \(0,\)"),
        (3, 3, {"batch_size": 0}, "batch_size=0"),
        (3, 3, {"batch_size": "2"}, "batch_size='2'"),
        (3, 3, {"last_batch": "rollover"}, "last_batch='rollover'"),
    ],
)
def test_bad_arguments_are_reported(num_features, num_labels, options, told):
    arguments = {"batch_size": 2, **options}
    with pytest.raises(DataError, match=f"^ArrayLoader: got .*{told}"):
        mgpu.data.ArrayLoader(np.zeros(num_features), np.zeros(num_labels), **arguments)

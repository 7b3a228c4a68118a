"""What data iterators give: MXNet's own come without their padding, begin each pass anew, and train as arrays do."""

from functools import partial

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.data import iterators
from gluon_mgpu.errors import TrainerError
from gluon_mgpu.models.hybrid_block import new_parameter
from mxnet import gluon

from .conftest import LOSS, gluon_loop, largest_difference, small_batches, small_net, weights_of

((X, Y),) = small_batches([10])


def batches_of_numpy(order, size, keeps_rest):
    """The batches that an epoch is to have, by hand."""
    return [(X[order[i : i + size]], Y[order[i : i + size]]) for i in range(0, len(order), size)][: None if keeps_rest else -1]


@pytest.mark.each_value
@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_padding_of_the_last_batch_is_not_trained_on(k, arrays):
    """NDArrayIter fills the last batch of 4 with examples of the first, which counted twice."""
    net = small_net([mx.cpu(i) for i in range(k)])
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1, "momentum": 0.9})
    data = mx.io.NDArrayIter(X, Y.astype("float32"), batch_size=4)
    history = mgpu.fit(net, LOSS, trainer, data, data, epochs=2, callbacks=[])
    by_hand = batches_of_numpy(np.arange(10), 4, True)
    one = gluon_loop(small_net([mx.cpu(0)]), "sgd", {"learning_rate": 0.1, "momentum": 0.9}, by_hand * 2)
    assert largest_difference(weights_of(net), weights_of(one)) <= 1e-5
    scores = mgpu.predict(net, data)
    assert scores.shape == (10, 3)
    assert np.abs(scores - mgpu.predict(net, [X])).max() <= 1e-6
    right = float((scores.argmax(axis=1) == Y).mean())
    assert history.rows[-1]["test_accuracy"] == mgpu.evaluate_accuracy_gpus(net, data) == pytest.approx(right, abs=1e-9)


@pytest.mark.parametrize(
    "last, expected", [("discard", [[0, 1, 2, 3], [4, 5, 6, 7]]), ("pad", [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]])]
)
def test_every_pass_begins_at_the_beginning(last, expected):
    data = mx.io.NDArrayIter(X, np.arange(10), batch_size=4, last_batch_handle=last)
    for _ in range(2):
        passed = [np.concatenate([y.asnumpy() for y in ys]) for _, ys in mgpu.prefetch(data, [mx.cpu(0), mx.cpu(1)])]
        assert [batch.astype(int).tolist() for batch in passed] == expected


def test_examples_that_roll_over_are_seen_once_in_two_epochs():
    """Their number stands in `pad`, too, in the first batch of the next epoch; they are no padding."""
    data = mx.io.NDArrayIter(X, np.arange(10), batch_size=4, last_batch_handle="roll_over")
    passes = [[y.asnumpy().astype(int).tolist() for _, (y,) in mgpu.prefetch(data, [mx.cpu(0)])] for _ in range(2)]
    assert passes == [[[0, 1, 2, 3], [4, 5, 6, 7]], [[8, 9, 0, 1], [2, 3, 4, 5], [6, 7, 8, 9]]]


def test_the_padding_of_batches_with_time_first():
    class TimeFirst(mx.io.DataIter):
        layout = "TN"

        def reset(self):
            self.rest = 1

        def next(self):
            if not self.rest:
                raise StopIteration
            self.rest = 0
            return mx.io.DataBatch([mx.nd.arange(12).reshape((3, 4))], [mx.nd.zeros((3, 4))], pad=1)

    (batch,) = iterators.batches_of(TimeFirst())
    assert batch.data[0].asnumpy().tolist() == [[0, 1, 2], [4, 5, 6], [8, 9, 10]]
    assert batch.label[0].shape == (3, 3)


def test_data_without_labels_predict_and_do_not_train():
    data = mx.io.NDArrayIter(X, batch_size=4)
    net = small_net([mx.cpu(0)])
    assert mgpu.predict(net, data).shape == (10, 3)
    before = weights_of(net)
    with pytest.raises(TrainerError, match="labels"):
        mgpu.fit(net, LOSS, mgpu.Trainer(net, "sgd"), data, epochs=1, callbacks=[])
    assert largest_difference(before, weights_of(net)) == 0.0


def test_batches_of_an_iterator_in_cpp_can_be_kept(tmp_path):
    """It writes each batch into the same memory: a queue of batches would hold the last one several times."""
    (tmp_path / "numbers.csv").write_text("\n".join(str(i) for i in range(100)))
    data = mx.io.CSVIter(data_csv=str(tmp_path / "numbers.csv"), data_shape=(1,), batch_size=2)
    data.last_batch_handle = "pad"
    for _ in range(2):
        batches = list(iterators.batches_of(data))
        assert [int(number) for X in batches for number in X.data[0].asnumpy().ravel()] == list(range(100))


def test_an_iterator_in_cpp_says_what_fills_its_last_batch(tmp_path):
    """It may be examples that are missing after a reset (`round_batch`, MXNet's default), or whatever the memory held."""
    (tmp_path / "numbers.csv").write_text("\n".join(map(str, range(7))))
    made = partial(mx.io.CSVIter, data_csv=str(tmp_path / "numbers.csv"), data_shape=(1,), batch_size=3)

    def numbers_of(data):
        return [int(number) for X in iterators.batches_of(data) for number in X.data[0].asnumpy().ravel()]

    for silent in (made(), mx.io.PrefetchingIter(made())):
        with pytest.raises(TrainerError, match="does not say what fills its last batch"):
            mgpu.prefetch(silent, [mx.cpu()])
    padding, rolling = made(round_batch=False), made()
    padding.last_batch_handle, rolling.last_batch_handle = "pad", "roll_over"
    assert [numbers_of(padding) for _ in range(3)] == [list(range(7))] * 3
    assert [numbers_of(rolling) for _ in range(2)] == [[0, 1, 2, 3, 4, 5, 6, 0, 1], [2, 3, 4, 5, 6, 0]]


def csv_iter(folder, X, y, size, **options):
    np.savetxt(folder / "X", X, "%g", ","), np.savetxt(folder / "y", y, "%g")
    return mx.io.CSVIter(data_csv=f"{folder}/X", label_csv=f"{folder}/y", data_shape=X.shape[1:], batch_size=size, **options)


def libsvm_iter(folder, X, y, size):
    rows = [" ".join([str(label), *(f"{i}:{value}" for i, value in enumerate(row))]) for row, label in zip(X, y)]
    (folder / "rows").write_text("\n".join(rows))
    return mx.io.LibSVMIter(data_libsvm=f"{folder}/rows", data_shape=X.shape[1:], batch_size=size)


def loader(folder, X, y, size, **options):
    return gluon.data.DataLoader(gluon.data.ArrayDataset(X, y.astype("float32")), size, **options)


def array_iter(folder, X, y, size, **options):
    return mx.io.NDArrayIter(X, y.astype("float32"), size, **options)


class Scores(gluon.Block):
    """One score for each class, the columns of the features, which may be sparse."""

    def forward(self, x):
        return x.tostype("default") if x.stype == "csr" else x


EVALUATED = [
    *((array_iter, {"last_batch_handle": last}, "") for last in ("pad", "roll_over")),
    *((loader, {"last_batch": last}, "") for last in ("keep", "rollover")),
    *((csv_iter, {"round_batch": rounds}, handle) for rounds in (True, False) for handle in ("pad", "roll_over")),
    *((libsvm_iter, {}, handle) for handle in ("pad", "roll_over")),
]


@pytest.mark.parametrize("resized", [False, True])
@pytest.mark.parametrize("make, options, handle", EVALUATED)
def test_evaluations_in_a_row_count_each_example_once_or_raise(make, options, handle, resized, tmp_path):
    """LibSVMIter gave 22 examples of 22, then 20, then 18: it fills its last batch with those that the next pass leaves out."""
    rng = np.random.RandomState(0)
    for num, size, read in [(22, 8, False), (6, 4, False), (6, 4, True), (12, 4, False), (7, 7, True), (9, 1, False)]:
        X, y = rng.randint(1, 9, (num, 3)).astype("float32"), rng.randint(0, 3, num)
        inner = data = make(tmp_path, X, y, size, **options)
        if handle:
            data.last_batch_handle = handle
        if resized and make is not loader:
            data = mx.io.ResizeIter(inner, -(-num // size))
        net = Scores()
        net.unused = new_parameter(net, "unused", shape=(1,), init="zeros")
        net.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
        try:
            if read:  # by a loop by hand
                all(data)
            found = [mgpu.evaluate_accuracy_gpus(net, data) for _ in range(3)]
        except TrainerError as error:
            assert "each example once in every pass" in str(error)
            fills_up = make is libsvm_iter or options.get("round_batch")
            assert "roll" in f"{options}{handle}" or (fills_up and num % size)
        else:
            assert found == pytest.approx([(X.argmax(axis=1) == y).mean()] * 3, abs=1e-9)
        all(inner)  # MXNet crashes when it deletes a LibSVMIter that still reads

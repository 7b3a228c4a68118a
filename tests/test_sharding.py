import collections

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.errors import DeviceError, ShardError
from gluon_mgpu.mxnet_internals.versions import is_mxnet2
from hypothesis import given
from hypothesis import strategies as st
from mxnet import gluon

CTX = [mx.cpu(i) for i in range(4)]


@given(st.integers(0, 1000), st.integers(1, 20))
def test_a_plan_is_balanced_as_array_split(num_examples, num_shards):
    sizes = mgpu.data_parallel.plan_shards(num_examples, num_shards)
    assert sizes == [len(part) for part in np.array_split(np.arange(num_examples), num_shards)]


@given(st.integers(0, 1000), st.lists(st.floats(0, 100), min_size=1, max_size=12).filter(lambda weights: sum(weights) > 1e-3))
def test_a_weighted_plan_is_off_by_less_than_one(num_examples, weights):
    sizes = mgpu.data_parallel.plan_shards(num_examples, len(weights), weights)
    assert sum(sizes) == num_examples
    for size, weight in zip(sizes, weights):
        assert abs(size - num_examples * weight / sum(weights)) < 1 + 1e-6
        assert weight > 0 or size == 0


@given(
    num_examples=st.integers(1, 9),
    num_devices=st.integers(1, 4),
    axis=st.integers(-3, 2),
    kind=st.sampled_from(["numpy", "nd", "np"]),
    dtype=st.sampled_from(["float32", "float16", "int32", "int64", "uint8"]),
)
def test_split_then_gather_is_the_identity(num_examples, num_devices, axis, kind, dtype):
    shape = [2, 3, 4]
    shape[axis] = num_examples
    host = np.random.RandomState(0).randint(0, 100, shape).astype(dtype)
    data = host if kind == "numpy" else {"nd": mx.nd, "np": mx.np}[kind].array(host, dtype=dtype)
    shards = mgpu.split_and_load({"x": (data, data)}, CTX[:num_devices], axis, even_split=False)
    sizes = mgpu.data_parallel.plan_shards(num_examples, num_devices)
    assert [shard["x"][0].shape[axis] for shard in shards] == [size for size in sizes if size]
    assert [shard["x"][1].context for shard in shards] == CTX[: len(shards)]
    back = mgpu.gather(shards, mx.cpu(1), axis)["x"][0]
    assert back.dtype == np.dtype(dtype)
    assert back.context == mx.cpu(1)
    np.testing.assert_array_equal(back.asnumpy(), host)
    assert isinstance(back, mx.np.ndarray) == (kind == "np" or (kind == "numpy" and is_mxnet2()))


@pytest.mark.pairwise
@pytest.mark.parametrize("even_split", [True, False])
@pytest.mark.parametrize("batch_axis", [0, 1])
def test_arrays_are_split_as_gluon_splits_them(arrays, devices, even_split, batch_axis):
    size = 6 if even_split else 7
    data = arrays.array(np.random.RandomState(0).uniform(size=(size, size, 2)))
    ours = mgpu.split_and_load(data, devices, batch_axis, even_split)
    theirs = gluon.utils.split_and_load(data, devices, batch_axis, even_split)
    assert len(ours) == len(theirs)
    for mine, gluons in zip(ours, theirs):
        assert mine.context == gluons.context
        assert type(mine) is type(gluons)
        np.testing.assert_array_equal(mine.asnumpy(), gluons.asnumpy())
    for mine, gluons in zip(
        mgpu.data_parallel.split_data(data, 3, batch_axis, False), gluon.utils.split_data(data, 3, batch_axis, False)
    ):
        np.testing.assert_array_equal(mine.asnumpy(), gluons.asnumpy())
    few = mgpu.data_parallel.split_data(data, size + 1, batch_axis, False)
    assert [one.shape[batch_axis] for one in few] == [1] * size


def test_host_arrays_become_arrays_of_the_mode(arrays):
    kind = mx.np.ndarray if arrays is mx.np else mx.nd.NDArray
    for value, dtype in [
        (np.zeros((4, 2)), "float32"),
        (np.zeros((4, 2), "float16"), "float16"),
        (np.arange(4), "int64"),
        (np.arange(4, dtype="int32"), "int32"),
        (np.arange(4, dtype="uint8"), "uint8"),
        (np.arange(4) % 2 == 0, "bool" if arrays is mx.np else "float32"),
        ([[1, 2], [3, 4], [5, 6], [7, 8]], "int64"),
        ([0.5, 1.5, 2.5, 3.5], "float32"),
    ]:
        shards = mgpu.split_and_load(value, CTX[:2])
        assert [type(shard) for shard in shards] == [kind, kind]
        assert {np.dtype(shard.dtype).name for shard in shards} == {dtype}
        assert mgpu.gather(shards).asnumpy().tolist() == np.asarray(value).tolist()


@pytest.mark.parametrize("labels", [[0, 1, 1], [[0, 1], [1, 0], [1, 1]]], ids=["numbers", "rows"])
def test_features_and_labels_of_plain_numbers_are_two_arrays(labels):
    """Both as lists of one shape, they could be read as one array of two rows."""
    Xs, ys = mgpu.split_batch([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], labels, CTX[:2])
    assert [x.asnumpy().tolist() for x in Xs] == [[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0]]]
    assert [y.asnumpy().tolist() for y in ys] == [labels[:2], labels[2:]]


@pytest.mark.parametrize("options", [{}, {"micro_steps": 2}, {"virtual_shards": 2}], ids=str)
def test_plain_numbers_train_as_arrays_do(options):
    X, y, found = [[1.0, 2.0], [3.0, -4.0], [0.5, 6.0]], [[0.0, 1.0], [1.0, 0.0], [1.0, 1.0]], []
    for features, labels in ((X, y), (np.array(X), np.array(y))):
        net = gluon.nn.Dense(2, in_units=2)
        net.initialize(mx.init.One(), ctx=CTX[:2])
        trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1}, virtual_shards=options.get("virtual_shards"))
        mgpu.train_batch(net, gluon.loss.L2Loss(), trainer, features, labels, micro_steps=options.get("micro_steps", 1))
        found.append(net.weight.data(CTX[0]).asnumpy())
    np.testing.assert_array_equal(*found)


def test_host_arrays_are_sliced_on_the_host(calls_to):
    """What goes to a device is the shard, not the batch: no array of the batch's size is made."""
    made = calls_to(mx.np if is_mxnet2() else mx.nd, "array", note=lambda name, data, **options: data.shape)
    mgpu.split_and_load(np.zeros((5, 3), "float32"), CTX[:2], even_split=False)
    assert made == [(3, 3), (2, 3)]


def test_a_shard_that_is_on_its_device_is_not_copied():
    data = mx.nd.zeros((4,), ctx=CTX[0])
    first, _ = mgpu.split_and_load(data, CTX[:2])
    first[:] = 7
    assert data.asnumpy().tolist() == [7, 7, 0, 0]
    assert mgpu.split_and_load(data, CTX[:1])[0] is data


def test_nested_data_keeps_its_form():
    Point = collections.namedtuple("Point", "x y")
    data = {"a": [np.zeros((3, 2)), (np.zeros(3),)], "p": Point(np.zeros((3, 1)), None)}
    first, second = mgpu.split_and_load(data, CTX[:2], even_split=False)
    assert isinstance(first["p"], Point)
    assert first["p"].y is None
    assert isinstance(first["a"], list)
    assert isinstance(first["a"][1], tuple)
    assert (first["a"][0].shape, second["a"][1][0].shape, second["p"].x.shape) == ((2, 2), (1,), (1, 1))
    ordered = mgpu.split_and_load(collections.OrderedDict(x=np.zeros(2)), CTX[:2])[0]
    assert isinstance(ordered, collections.OrderedDict)


def test_each_array_may_have_its_own_batch_axis():
    tokens, label, state = np.zeros((7, 4)), np.zeros(4), np.zeros((2, 4, 5))  # TN, N, LNC
    shards = mgpu.split_and_load(((tokens, {"h": state}), label), CTX[:2], batch_axis=((1, {"h": 1}), 0))
    (tokens_0, states_0), label_0 = shards[0]
    assert (tokens_0.shape, states_0["h"].shape, label_0.shape) == ((7, 2), (2, 2, 5), (2,))
    Xs, ys = mgpu.split_batch((tokens, state), label, CTX[:2], batch_axis=(1, 0))  # one number for all of X
    assert (Xs[1][0].shape, Xs[1][1].shape, ys[1].shape) == ((7, 2), (2, 2, 5), (2,))


def test_weights_and_devices_without_work():
    shards = mgpu.split_and_load(np.arange(6), CTX[:3], weights=[2, 0, 1])
    assert [(shard.context, shard.shape) for shard in shards] == [(CTX[0], (4,)), (CTX[2], (2,))]
    Xs, ys = mgpu.split_batch(np.arange(6), np.arange(6), CTX[:2], weights=[1, 5])
    assert ([x.size for x in Xs], [y.size for y in ys]) == ([1, 5], [1, 5])


def test_gather_of_host_arrays_stays_on_the_host():
    joined = mgpu.gather([np.zeros((1, 2)), np.ones((2, 2))])
    assert isinstance(joined, np.ndarray)
    assert joined.shape == (3, 2)
    assert mgpu.gather([np.zeros((1, 2)), np.ones((2, 2))], mx.cpu(1)).context == mx.cpu(1)


def test_a_split_can_be_differentiated():
    x = mx.nd.array([[1.0], [2.0], [3.0]])
    x.attach_grad()
    with mx.autograd.record():
        shards = mgpu.split_and_load(x, CTX[:2], even_split=False)
        losses = [(shard * shard).sum() for shard in shards]
    mx.autograd.backward(losses)
    assert x.grad.asnumpy().tolist() == [[2.0], [4.0], [6.0]]


@pytest.mark.mxnet1("sparse arrays")
def test_sparse_batches_are_split_as_gluon_splits_them():
    dense = np.eye(6, dtype="float32")[:5]
    data = mx.nd.sparse.csr_matrix(dense)
    ours = mgpu.split_and_load(data, CTX[:2], even_split=False)
    theirs = gluon.utils.split_and_load(data, CTX[:2], even_split=False)
    assert [shard.stype for shard in ours] == [shard.stype for shard in theirs] == ["csr", "csr"]
    assert [shard.context for shard in ours] == CTX[:2]
    np.testing.assert_array_equal(np.concatenate([shard.asnumpy() for shard in ours]), dense)


@pytest.mark.parametrize("dtype, becomes", [("int16", "int32"), ("uint16", "int32"), ("uint32", "int64")])
def test_dtypes_that_mxnet_has_not_become_larger_ones(dtype, becomes):
    largest = np.iinfo(dtype).max
    shards = mgpu.split_and_load(np.array([largest, 1], dtype), CTX[:2])
    assert [np.dtype(shard.dtype).name for shard in shards] == [becomes] * 2
    assert int(shards[0].asnumpy()[0]) == largest


BAD = [
    (lambda: mgpu.split_and_load(np.zeros(4), CTX[:2], weights=2), "got weights 2"),
    (lambda: mgpu.split_and_load(np.zeros((2, 3)), CTX[:3]), r"got a batch of 2 along axis 0 for 3 devices with even_split=True"),
    (lambda: mgpu.split_and_load((np.zeros((4, 3)), np.zeros(3)), CTX[:2]), r"got 4 examples in data\[0\] and 3 in data\[1\]"),
    (lambda: mgpu.split_and_load(np.zeros((0, 3)), CTX[:2]), "got a batch of 0 examples"),
    (lambda: mgpu.split_and_load(np.zeros(4), CTX[:2], batch_axis=1), r"got data of shape \(4,\) and batch_axis 1"),
    (lambda: mgpu.split_and_load(np.float32(3), CTX[:2]), r"of shape \(\)"),
    (lambda: mgpu.split_and_load([], CTX[:2]), "got no array"),
    (lambda: mgpu.split_and_load(np.zeros(4, "complex64"), CTX[:2]), "of dtype complex64"),
    (lambda: mgpu.split_and_load(np.array(["a", "b"]), CTX[:2]), "of dtype <U1"),
    (lambda: mgpu.split_and_load(np.zeros(4), CTX[:2], weights=[1]), r"got weights \[1\] for 2 shards"),
    (lambda: mgpu.split_and_load(np.zeros(4), CTX[:2], weights=[0, 0]), "not all 0"),
    (lambda: mgpu.split_and_load(np.zeros(4), CTX[:2], weights=[1, float("nan")]), "got weights"),
    (lambda: mgpu.data_parallel.split_data(np.zeros(4), 0), "got num_slice=0"),
    (lambda: mgpu.data_parallel.split_data(np.zeros(4), 3), "with even_split=True"),
    (lambda: mgpu.gather([]), r"got \[\]"),
    (lambda: mgpu.gather([np.zeros((1, 2)), np.zeros((1, 3))]), "expected dense arrays"),
    (lambda: mgpu.gather([mx.nd.zeros((1, 2)), np.zeros((1, 2))]), "expected dense arrays"),
    (lambda: mgpu.gather([np.zeros((1, 2)), (np.zeros((1, 2)),)]), "different forms"),
]


@pytest.mark.parametrize("call, told", BAD)
def test_what_cannot_be_split_is_reported(call, told):
    with pytest.raises(ShardError, match=told):
        call()


@pytest.mark.parametrize("shards", [1, ([1],), ([1], 2), (1, [2]), ([], []), ([1], [1, 2])])
def test_a_function_returns_as_many_shards_of_features_as_of_labels(shards):
    with pytest.raises(ShardError, match="split_f: got .* expected as many feature shards"):
        mgpu.eval_batch(gluon.nn.Dense(1), None, None, ctx=CTX, split_f=lambda X, y, devices: shards)


@pytest.mark.parametrize("ctx", [[], CTX[:1] * 2, mx.cpu(0), ["cpu(0)"], [mx.cpu_pinned(0)]])
def test_devices_must_be_different_contexts(ctx):
    with pytest.raises(DeviceError):
        mgpu.split_and_load(np.zeros(4), ctx)


def test_what_is_no_array_is_named_by_its_place():
    with pytest.raises(TypeError, match=r"data\['x'\]\[1\]: got str; expected an array"):
        mgpu.split_and_load({"x": [np.zeros(4), "label"]}, CTX[:2])
    with pytest.raises(ValueError, match=r"got a tuple of 2 and a tuple of 3"):
        mgpu.split_and_load((np.zeros(4), np.zeros(4)), CTX[:2], batch_axis=(0, 0, 0))


def test_weights_divide_each_processes_part(become):
    become(rank=1)
    shards = mgpu.split_and_load(np.arange(8), CTX[:2], weights=[1, 3])
    assert [shard.asnumpy().tolist() for shard in shards] == [[4], [5, 6, 7]]

import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.nested import is_leaf, leaves, map_leaves


def test_what_counts_as_one_array():
    for leaf in (mx.nd.ones(2), mx.np.ones(2), np.ones(2), np.float32(1), 3, 2.5, [1, 2], ((1, 2), (3, 4))):
        assert is_leaf(leaf), leaf
    for nested in ([np.ones(2)], (mx.nd.ones(2), 1), {"a": 1}, [], (), None, "text", ["a"], [1, None]):
        assert not is_leaf(nested), nested


def test_leaves_come_in_order_with_their_paths():
    data = {"x": [np.zeros(1), (np.ones(1), None)], "y": 3}
    assert [path for path, _ in leaves(data, "batch")] == ["batch['x'][0]", "batch['x'][1][0]", "batch['y']"]


def test_others_go_along():
    added = map_leaves(lambda _, a, b: a + b, {"x": (np.array(1), np.array(2))}, {"x": (10, 20)})
    assert [int(value) for value in added["x"]] == [11, 22]
    added = map_leaves(lambda _, a, b: a + b, (np.array(1), [np.array(2)]), 5)
    assert (int(added[0]), int(added[1][0])) == (6, 7)


def test_forms_that_differ():
    with pytest.raises(ValueError, match=r"data\['x'\]"):
        map_leaves(lambda *_: 0, {"x": (np.ones(1), np.ones(1))}, {"x": [1]})
    with pytest.raises(ValueError):
        map_leaves(lambda *_: 0, (np.ones(1),), {"x": 1})
    with pytest.raises(ValueError, match=r"has no 'y'"):
        map_leaves(lambda *_: 0, {"y": np.ones(1)}, {"x": 1})

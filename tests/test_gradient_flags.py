"""mxnet_internals/c_calls.py: the fresh flags of gradients."""

import mxnet as mx
import numpy as np
from gluon_mgpu.mxnet_internals.c_calls import Flags
from gluon_mgpu.mxnet_internals.parameters import is_fresh

from .conftest import set_fresh


def variables(count):
    found = [mx.nd.ones((3,), ctx=mx.cpu(i % 2)) for i in range(count)]
    mx.autograd.mark_variables(found, [weight.copy() for weight in found])
    return found


def fresh(weights):
    return [bool(is_fresh(weight)) for weight in weights]


def test_flags_are_those_of_mxnet():
    weights = variables(6)
    flags = Flags(weights)
    assert not flags.read().any()
    set_fresh(weights[5])
    assert flags.read().tolist() == [False] * 5 + [True] == fresh(weights)
    with mx.autograd.record():
        losses = [(weight * 2).sum() for weight in weights]
    mx.autograd.backward(losses)
    assert flags.read().all() and all(fresh(weights))
    flags.put(np.array([True, False, False, False, True, True]), False)
    assert flags.read().tolist() == [False, True, True, True, False, False] == fresh(weights)
    flags.put(np.array([True, False, False, False, False, True]), True)
    assert flags.read().tolist() == [True, True, True, True, False, True] == fresh(weights)
    flags.clear()
    assert not flags.read().any() and fresh(weights) == [False] * 6


def test_no_parameters_have_no_flags():
    flags = Flags([])
    flags.clear()
    assert flags.read().shape == (0,)


def test_the_arrays_live_as_long_as_their_flags():
    weights = variables(2)
    flags = Flags(weights)
    others = variables(100)
    del weights
    for weight in others:
        set_fresh(weight)
    flags.clear()
    assert all(fresh(others))

"""The calls that differ between MXNet 1.9 and 2, with stand-ins of what the version that is not here would pass."""

import weakref
from types import SimpleNamespace

import mxnet as mx
import pytest
from gluon_mgpu.errors import TrainerError
from gluon_mgpu.runtime import mxnet2
from mxnet.gluon import nn


@pytest.fixture(params=["1.9.1", "2.0.0+cu13.bw.20260617"])
def version(request, monkeypatch):
    monkeypatch.setattr(mx, "__version__", request.param)
    return request.param[0]


def named(*names):
    return [SimpleNamespace(name=name) for name in names]


def test_children_are_blocks(version):
    first, second = nn.Dense(1), nn.Dense(2)
    held = {"1": [first, second], "2": [weakref.ref(first), weakref.ref(second)]}[version]
    assert mxnet2.children(SimpleNamespace(_children=dict(enumerate(held)))) == [first, second]
    assert mxnet2.children(SimpleNamespace(_children={})) == []


def test_names_of_a_list_are_different_for_different_parameters_only(version):
    names = {"1": ["dense0_weight", "dense1_weight"], "2": ["weight", "weight"]}[version]
    one, two = named(*names)
    found = mxnet2.unique_names([one, two, one])
    assert len(set(found)) == 2
    assert found[0] == found[2]


def test_what_needs_the_graphs_of_mxnet_1_raises_on_2(version):
    if version == "1":
        assert mxnet2.require_mxnet1("Pipeline") is None
        return
    with pytest.raises(TrainerError, match="Pipeline: got MXNet 2.0.0"):
        mxnet2.require_mxnet1("Pipeline")

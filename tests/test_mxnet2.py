"""What differs between MXNet 1.9 and 2: the calls, and the features that stay with 1.9, which the pages list."""

import re
import weakref
from pathlib import Path
from types import SimpleNamespace

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.distributed.dist_sync import DistSync
from gluon_mgpu.errors import ProcessError, TrainerError
from gluon_mgpu.mxnet_internals import blocks, versions
from mxnet import autograd, gluon
from mxnet.gluon import nn

from .conftest import EXAMPLES, sequential
from .versions import HybridBlock, nd

ROOT = Path(__file__).parent.parent
CONTEXTS = [mx.cpu(0), mx.cpu(1)]
LOSS = gluon.loss.L2Loss()
on_2 = pytest.mark.skipif(not versions.is_mxnet2(), reason="MXNet 1.9: sh scripts/test_mxnet2.sh")


def batch():
    return np.ones((4, 3), "float32"), np.ones((4, 2), "float32")


@pytest.mark.parametrize("page", ["compatibility.md", "ko/compatibility.md"])
def test_the_page_lists_the_features_of_the_marks(page):
    section = (ROOT / "docs" / page).read_text("utf-8").split("### MXNet 2\n")[1].split("\n## ")[0]
    listed = re.findall(r"^\| ([^|`]+) \|", section, re.MULTILINE)[1:]
    own = "|".join(path.read_text("utf-8") for path in (ROOT / "tests").glob("*.py") if path.name != Path(__file__).name)
    assert sorted(listed) == sorted({*re.findall(r'\.mxnet1\("(.*?)"\)', own), *EXAMPLES})


@pytest.fixture(params=["1.9.1", "2.0.0+cu13.bw.20260617"])
def version(request, monkeypatch):
    monkeypatch.setattr(mx, "__version__", request.param)
    return request.param[0]


def named(*names):
    return [SimpleNamespace(name=name) for name in names]


def test_children_are_blocks(version):
    first, second = nn.Dense(1), nn.Dense(2)
    held = {"1": [first, second], "2": [weakref.ref(first), weakref.ref(second)]}[version]
    assert blocks.children(SimpleNamespace(_children=dict(enumerate(held)))) == [first, second]
    assert blocks.children(SimpleNamespace(_children={})) == []


def test_names_of_a_list_are_different_for_different_parameters_only(version):
    names = {"1": ["dense0_weight", "dense1_weight"], "2": ["weight", "weight"]}[version]
    one, two = named(*names)
    found = versions.unique_names([one, two, one])
    assert len(set(found)) == 2
    assert found[0] == found[2]


REFUSED = {
    "compile_step": lambda net: mgpu.compile_step(net, LOSS, mgpu.Trainer(net, "sgd"))(*batch()),
    "fit": lambda net: mgpu.fit(net, LOSS, mgpu.Trainer(net, "sgd"), [batch()], epochs=1, callbacks=[], compiled="on"),
    "Pipeline": lambda net: mgpu.Pipeline([net], CONTEXTS[:1], micro_batches=1),
    "split_stages": lambda net: mgpu.split_stages(net, 1, batch()[0]),
    "convert_sync_batchnorm": lambda net: mgpu.set_batch_norm(net, "sync"),
    "set_precision": lambda net: mgpu.Trainer(net, "sgd", precision="bf16"),
    "export": lambda net: mgpu.export(net, "net.onnx", batch()[0]),
}


@on_2
@pytest.mark.parametrize("operation", REFUSED)
def test_what_stays_with_1_9_raises_one_sentence(operation, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    net = sequential(nn.Dense(2, in_units=3), nn.BatchNorm(in_channels=2), ctx=CONTEXTS)
    with pytest.raises(TrainerError, match=rf"^{operation}: got .*MXNet 2.*; expected "):
        REFUSED[operation](net)
    assert not list(tmp_path.iterdir())


@on_2
@pytest.mark.parametrize("use", [lambda net: mgpu.Trainer(net, "sgd"), lambda net: mgpu.predict(net, [batch()[0]])])
def test_a_thread_without_np_arrays_is_named(use):
    net = sequential(nn.Dense(2, in_units=3), ctx=CONTEXTS)
    with mx.util.np_array(False), pytest.raises(TrainerError, match="without np arrays; expected them.*set_np"):
        use(net)


class Twice(HybridBlock):
    def __init__(self):
        super().__init__()
        self.layer = nn.Dense(3, in_units=3)

    def compute(self, F, x):
        return self.layer(self.layer(x))


@pytest.mark.parametrize("hybridize", [None, {}, {"static_alloc": True, "static_shape": True}])
def test_a_loop_of_a_chapter_gives_the_weights_of_one_device(hybridize, devices):
    """Deferred shapes, `split_and_load`, `autograd.backward` of each loss, `trainer.step`, as in d2l."""
    found = []
    for contexts in ([mx.cpu(0)], devices):
        mx.random.seed(1)
        net = sequential(nn.Dense(3), Twice(), nn.Dense(2), ctx=contexts, hybridize=hybridize)
        net(nd.ones((1, 3), ctx=contexts[0]))
        trainer = mgpu.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9})
        for number in range(3):
            X, y = (np.random.RandomState(number).rand(6, size).astype("float32") for size in (3, 2))
            Xs, ys = (gluon.utils.split_and_load(nd.array(one), contexts) for one in (X, y))
            with autograd.record():
                losses = [LOSS(net(a), b) for a, b in zip(Xs, ys)]
            autograd.backward(losses)
            trainer.step(6)
        found.append([param.data(contexts[-1]).asnumpy() for param in net.collect_params().values()])
    for one, other in zip(*found):
        np.testing.assert_allclose(one, other, atol=1e-6)


@on_2
def test_servers_that_add_in_float32_get_no_float64():
    with pytest.raises(ProcessError, match="got gradients in float64 from several processes; expected float32"):
        DistSync.all_reduce(SimpleNamespace(), [mx.nd.zeros(2, dtype="float64")])

"""Dropout's masks follow the seed where cuDNN's do not: shown with stand-ins on the CPU, as no GPU is needed."""

import copy
import json
import pickle
from functools import partial

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.errors import ModesError
from gluon_mgpu.mxnet_internals.blocks import graph_of
from gluon_mgpu.mxnet_internals.dropout import Dropout
from gluon_mgpu.trainer import seeded_dropout
from gluon_mgpu.trainer.seeded_dropout import with_seeds
from mxnet import autograd, gluon
from mxnet.gluon import nn, rnn

LOSS = gluon.loss.L2Loss()
pytestmark = pytest.mark.mxnet1("legacy arrays")


@pytest.fixture
def cudnn(monkeypatch):
    """Dropout on CPUs as on GPUs: unless `cudnn_off` is set, masks do not depend on MXNet's seed. Yields the masks drawn so."""
    own, unseeded, masks = mx.nd.Dropout, np.random.default_rng(), []

    def dropout(data, p=0.5, cudnn_off=False, **options):
        if cudnn_off or not autograd.is_training():
            return own(data, p=p, cudnn_off=cudnn_off, **options)
        masks.append(mx.nd.array((unseeded.random(data.shape) >= p) / (1 - p), ctx=data.context))
        return data * masks[-1]

    monkeypatch.setattr(mx.nd, "Dropout", dropout)
    monkeypatch.setattr(seeded_dropout, "_OF_CUDNN", "cpu")
    return masks


def layers():
    return [nn.Dense(16, in_units=4), nn.Dropout(0.5), nn.Dense(3, in_units=16)]


def network():
    net = nn.HybridSequential()
    net.add(*layers())
    return net


def batch(rng):
    return mx.nd.array(rng.randn(8, 4)), mx.nd.array(rng.randn(8, 3))


def test_the_stand_in_ignores_the_seed(cudnn):
    layer, x, masks = nn.Dropout(0.5), mx.nd.ones((8, 64)), []
    for _ in range(2):
        mx.random.seed(0)
        with autograd.record():
            masks.append(layer(x).asnumpy())
    assert len(cudnn) == 2 and (masks[0] != masks[1]).any()


def trained(make, train):
    """The weights after training from the same seed."""
    mx.random.seed(3)
    net = make()
    rng = np.random.RandomState(0)
    for _ in range(2):
        train(net, *batch(rng))
    return np.concatenate([param.data(param.list_ctx()[0]).asnumpy().ravel() for param in net.collect_params().values()])


@pytest.mark.parametrize("recompute", [False, True])
def test_a_stage_that_is_computed_again_draws_the_same_mask(cudnn, recompute):
    """`recompute=True` trained with the gradients of another mask than the loss's."""

    def make(recomputes):
        net = network()
        net.initialize(mx.init.Uniform(1.0))
        model = mgpu.Pipeline([*net], [mx.cpu(0), mx.cpu(0), mx.cpu(1)], micro_batches=2, recompute=recomputes)
        model.trainer = mgpu.Trainer(model, "sgd", {"learning_rate": 0.1})
        return model

    def train(model, X, y):
        mgpu.train_batch(model, LOSS, model.trainer, X, y)

    np.testing.assert_array_equal(trained(partial(make, recompute), train), trained(partial(make, False), train))
    assert not cudnn


def test_virtual_shards_draw_the_same_masks_on_any_number_of_devices(cudnn):
    def make(num_devices):
        net = network()
        net.initialize(mx.init.Uniform(1.0), ctx=[mx.cpu(i) for i in range(num_devices)])
        net.trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1}, virtual_shards=4)
        return net

    def train(net, X, y):
        mgpu.train_batch(net, LOSS, net.trainer, X, y)

    np.testing.assert_array_equal(trained(partial(make, 1), train), trained(partial(make, 2), train))
    assert not cudnn


def test_a_loop_by_hand_follows_the_seed_from_the_trainer_on(cudnn):
    net = network()
    net.initialize()
    net.hybridize()
    net(mx.nd.ones((1, 4)))  # Gluon keeps the graph of this call, with the former attribute
    mgpu.Trainer(net, "sgd")
    assert off(net._get_graph(mx.nd.ones((1, 4)))[1]) == ["True"]
    net.hybridize(False)
    with autograd.record():
        net(mx.nd.ones((1, 4)))
    assert not cudnn


def off(symbol):
    """The attribute of each Dropout in a graph."""
    nodes = json.loads(symbol.tojson())["nodes"]
    return [node["attrs"].get("cudnn_off") for node in nodes if node["op"] == "Dropout"]


class Functional(gluon.HybridBlock):
    def hybrid_forward(self, F, x):
        return F.Dropout(x, p=0.5) * F.Dropout(x, p=0.2, cudnn_off=False)


@pytest.mark.parametrize("is_np", [False, True])
def test_graphs_have_the_attribute_also_where_a_network_calls_the_operator(is_np):
    x = mx.sym.var("x")
    made = mx.sym.Dropout(mx.sym.Dropout(x, p=0.5), p=0.2, cudnn_off=False)
    made = made.as_np_ndarray() if is_np else made
    changed = with_seeds(made)
    assert (off(made), off(changed), type(changed)) == ([None, "False"], ["True", "True"], type(made))
    assert with_seeds(changed) is changed
    inner, _ = mx.sym.contrib.foreach(lambda one, state: (mx.sym.Dropout(one), state), x, mx.sym.var("state"))
    (loop,) = (node for node in json.loads(with_seeds(inner).tojson())["nodes"] if node["op"] == "_foreach")
    assert [node["attrs"]["cudnn_off"] for node in loop["subgraphs"][0]["nodes"] if node["op"] == "Dropout"] == ["True"]


def test_compiled_steps_and_stages_of_a_graph_have_the_attribute():
    net = nn.HybridSequential()
    net.add(nn.Dense(4, in_units=4), Functional(), nn.Dropout(0.5), nn.Dense(4, in_units=4))
    net.initialize()
    step = mgpu.compile_step(net, LOSS, mgpu.Trainer(net, "sgd"))
    step(mx.nd.ones((2, 4)), mx.nd.ones((2, 4)))
    (graph,) = step.passes._graphs.values()
    assert off(graph.symbol) == ["True"] * 3
    stages = mgpu.split_stages(Whole(net), 2, mx.nd.ones((2, 4)), balance="bytes")
    assert off(stages.graph.symbol) == ["True"] * 3


class Whole(gluon.HybridBlock):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def hybrid_forward(self, F, x):
        return self.net(x)


@pytest.mark.filterwarnings("ignore:Cannot decide type:UserWarning")  # MXNet's, of imports()
@pytest.mark.usefixtures("cudnn")
def test_imported_graphs_have_the_attribute(tmp_path):
    net = network()
    net.initialize()
    net.hybridize()
    net(mx.nd.ones((1, 4)))
    net.export(str(tmp_path / "net"))
    imported = gluon.SymbolBlock.imports(str(tmp_path / "net-symbol.json"), ["data"], str(tmp_path / "net-0000.params"))
    expected = imported(mx.nd.ones((1, 4))).asnumpy()
    assert off(graph_of(imported)) == ["False"]
    mgpu.Trainer(imported, "sgd")
    assert off(graph_of(imported)) == ["True"]
    np.testing.assert_array_equal(imported(mx.nd.ones((1, 4))).asnumpy(), expected)


@pytest.mark.usefixtures("cudnn")
def test_the_layer_stays_what_it_was():
    net = network()
    net.initialize()
    before = repr(net)
    mgpu.Trainer(net, "sgd")
    assert repr(net) == before and isinstance(net[1], nn.Dropout)
    for other in (copy.deepcopy(net[1]), pickle.loads(pickle.dumps(net[1]))):
        assert type(other) is Dropout


@pytest.mark.parametrize("layer", [rnn.LSTM, rnn.GRU, rnn.RNN])
def test_a_fused_rnn_with_dropout_is_refused_where_the_seed_matters(monkeypatch, layer):
    net = nn.HybridSequential()
    net.add(layer(4, num_layers=2, dropout=0.5, layout="NTC", input_size=4), nn.Dense(3, in_units=4, flatten=False))
    net.initialize()
    mgpu.Pipeline([*net], [mx.cpu(0), mx.cpu(1)], recompute=True)  # CPUs draw from MXNet's generator
    monkeypatch.setattr(seeded_dropout, "_OF_CUDNN", "cpu")
    with pytest.raises(ModesError, match="recompute=True and (rnn|lstm|gru)[0-9]+, dropout between the layers"):
        mgpu.Pipeline([*net], [mx.cpu(0), mx.cpu(1)], recompute=True)
    mgpu.Pipeline([*net], [mx.cpu(0), mx.cpu(1)])
    net.collect_params().reset_ctx(mx.cpu())
    trainer = mgpu.Trainer(net, "sgd", virtual_shards=2)
    with pytest.raises(ModesError, match="virtual_shards and .*dropout between the layers of a fused RNN on GPUs"):
        mgpu.train_batch(net, LOSS, trainer, mx.nd.ones((2, 3, 4)), mx.nd.ones((2, 3, 3)))


@pytest.mark.parametrize("options", [{"num_layers": 1, "dropout": 0.5}, {"num_layers": 2}])
def test_a_fused_rnn_that_draws_nothing_is_not_refused(monkeypatch, options):
    monkeypatch.setattr(seeded_dropout, "_OF_CUDNN", "cpu")
    seeded_dropout.check_seeds("Pipeline", "recompute=True", rnn.LSTM(4, **options), [mx.cpu()])

"""Networks that MXNet 1.9.1 computes wrongly once they are hybridized, also in plain Gluon: control flow, PReLU."""

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.errors import ModesError, TrainerError
from gluon_mgpu.mxnet_internals.versions import is_mxnet2, name_of
from gluon_mgpu.refusals import IN_A_GRAPH
from mxnet import autograd, gluon
from mxnet.gluon import nn

from .conftest import stack
from .versions import HybridBlock, nd

CONTEXTS = [mx.cpu(0), mx.cpu(1)]
STATIC = {"static_alloc": True, "static_shape": True}
MODES = [{}, {"static_alloc": True}, STATIC]
LOSS = gluon.loss.L2Loss()


class Lambda(HybridBlock):
    """Calls a function of F, its layers and its input."""

    def __init__(self, function, *layers):
        super().__init__()
        self._function, self._layers = function, layers
        for layer in layers:
            self.register_child(layer)

    def compute(self, F, x):
        return self._function(F, *self._layers, x)


def dense():
    return nn.Dense(3, in_units=3, activation="tanh")


def while_loop(F, layer, x):
    def body(i, state):
        return [state], [i + 1, layer(state) + 0.1]

    return F.contrib.while_loop(lambda i, _: i < 4, body, [F.zeros((1,)), F.zeros_like(x)], max_iterations=4)[1][1] + layer(x)


def cond(F, layer, x):
    for _ in range(2):
        x = F.contrib.cond(F.sum(x * x) > -1, lambda x=x: layer(x), lambda x=x: x)
    return x


def foreach(F, layer, x):
    return F.contrib.foreach(lambda row, state: (layer(row + state), row), F.expand_dims(x, 1), F.zeros((1, 3)))[0]


def prelu():
    return stack(dense(), nn.PReLU(in_channels=3), dense())


NETS = {
    "while_loop": lambda: stack(dense(), Lambda(while_loop, dense()), dense()),
    "cond": lambda: stack(dense(), Lambda(cond, dense()), dense()),
    "prelu": prelu,
    "prelu in foreach": lambda: stack(Lambda(foreach, prelu())),
}
flow = pytest.mark.mxnet1("while_loop, cond and foreach")
KINDS = [kind if kind == "prelu" else pytest.param(kind, marks=flow) for kind in NETS]
every_net = pytest.mark.parametrize("kind", KINDS)


def initialized(net, ctx=CONTEXTS, **mode):
    mx.random.seed(0)
    net.initialize(mx.init.Normal(0.7), ctx=ctx)
    if mode:
        net.hybridize(**mode)
    return net


def batch(number=0, size=6):
    rng = np.random.RandomState(number)
    return rng.randn(size, 3).astype("float32"), rng.randn(size, 3).astype("float32")


def weights(net):
    return np.concatenate([param.data(CONTEXTS[1]).asnumpy().ravel() for param in net.collect_params().values()])


def trainer_of(params, **options):
    return mgpu.Trainer(params, "sgd", {"learning_rate": 0.1}, **options)


def by_hand(net, trainer, number=0):
    X, y = batch(number)
    with autograd.record():
        losses = [LOSS(net(a), b) for a, b in zip(*mgpu.split_batch(X, y, CONTEXTS))]
    trainer.backward(losses)
    trainer.step(len(X))


def gradients(net, x):
    with autograd.record():
        loss = (net(nd.array(x)) ** 2).sum()
    loss.backward()
    return np.concatenate([param.grad().asnumpy().ravel() for param in net.collect_params().values()])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind == "prelu" or "cond" not in kind.values])  # it reads any memory
@pytest.mark.parametrize("mode", MODES, ids=["dynamic", "static_alloc", "static_shape"])
def test_mxnet_s_own_gradients_of_these_networks_are_wrong(kind, mode):
    """If one of these comparisons fails, MXNet is right, and the refusal should go."""
    found = []
    for hybrid in (False, True):
        net = initialized(NETS[kind](), [mx.cpu()])
        if hybrid:
            net.hybridize(**mode)
        found.append(gradients(net, batch(1)[0]))  # some of the slopes' inputs are negative
    with np.errstate(all="ignore"):
        assert not np.allclose(*found, rtol=1e-2, atol=1e-3)


WAYS = {
    "train_batch": lambda net, **options: mgpu.train_batch(net, LOSS, trainer_of(net, **options), *batch()),
    "of parameters": lambda net: mgpu.train_batch(net, LOSS, trainer_of(net.collect_params()), *batch()),
    "micro_steps": lambda net: mgpu.train_batch(net, LOSS, trainer_of(net), *batch(), micro_steps=2),
    "virtual_shards": lambda net: mgpu.train_batch(net, LOSS, trainer_of(net, virtual_shards=2), *batch()),
    "auto": lambda net: mgpu.compile_step(net, LOSS, trainer_of(net), compiled="auto")(*batch()),
    "off": lambda net: mgpu.compile_step(net, LOSS, trainer_of(net), compiled="off")(*batch()),
    "fit": lambda net: mgpu.fit(net, LOSS, trainer_of(net), [batch()], epochs=1, callbacks=[], metrics=()),
    "by hand": lambda net: by_hand(net, trainer_of(net)),
    "by hand, of parameters": lambda net: by_hand(net, trainer_of(net.collect_params())),
    "by hand, of a part": lambda net: by_hand(net, trainer_of(net[-1])),
    "local_sgd": lambda net: mgpu.train_batch(net, LOSS, mgpu.LocalSGD(net, "sgd", every=1), *batch()),
}


@every_net
@pytest.mark.parametrize("way", WAYS)
def test_training_names_the_layer_and_changes_nothing(kind, way):
    net = initialized(NETS[kind](), static_alloc=True)
    before = weights(net)
    name = r"1\.alpha" if is_mxnet2() else f"{kind.split()[0]}\\d_?"
    with pytest.raises(ModesError, match=f"{name}.* in {name_of(net)} .*hybridize.False") as caught:
        WAYS[way](net)
    assert caught.value.modes == ("hybridize()", IN_A_GRAPH)
    assert np.array_equal(weights(net), before)


@pytest.mark.mxnet1("compiled passes")
@every_net
def test_the_advice_of_a_compiled_step_helps(kind):
    net, plain = initialized(NETS[kind](), static_alloc=True), initialized(NETS[kind]())
    trainers = [trainer_of(net), trainer_of(plain)]
    with pytest.raises(TrainerError, match=f"wrong gradients of .*{kind.split()[0]}.*also after hybridize.*compiled='auto'"):
        mgpu.compile_step(net, LOSS, trainers[0])(*batch())
    with pytest.raises(ModesError):
        mgpu.compile_step(net, LOSS, trainers[0], compiled="auto")(*batch())
    net.hybridize(False)
    for number in range(3):
        mgpu.compile_step(net, LOSS, trainers[0], compiled="auto")(*batch(number))
        mgpu.train_batch(plain, LOSS, trainers[1], *batch(number))
    np.testing.assert_allclose(weights(net), weights(plain), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", ["by hand", "train_batch"])
def test_a_network_that_is_hybridized_later_is_noticed(way):
    net = initialized(stack(dense(), prelu(), kind=nn.Sequential))
    trainer = trainer_of(net)

    def step():
        mgpu.train_batch(net, LOSS, trainer, *batch()) if way == "train_batch" else by_hand(net, trainer)

    step()
    net[1].hybridize()  # a child of a network that is not hybridized itself
    for _ in range(2):
        with pytest.raises(ModesError, match=f"in {name_of(net[1])} .HybridSequential."):
            step()
    net[1].hybridize(False)
    step()


@flow
def test_a_loss_that_holds_one():
    class Own(gluon.loss.L2Loss):
        def hybrid_forward(self, F, output, label, sample_weight=None):
            return super().hybrid_forward(F, cond(F, F.sin, output * 1), label)

    net, loss = initialized(stack(dense()), static_alloc=True), Own()
    mgpu.train_batch(net, loss, trainer_of(net), *batch())
    loss.hybridize()
    with pytest.raises(ModesError, match=f"in {loss.name} .Own."):
        mgpu.train_batch(net, loss, trainer_of(net), *batch())


@pytest.mark.mxnet1("export")
def test_symbol_blocks_are_graphs_without_hybridize():
    x = mx.sym.var("data", dtype="float32")
    net = initialized(gluon.SymbolBlock(prelu()(x), x))
    with pytest.raises(ModesError, match="replace a SymbolBlock"):
        mgpu.train_batch(net, LOSS, trainer_of(net), *batch())


@pytest.mark.mxnet1("Pipeline")
def test_stages_of_a_pipeline():
    stages = [stack(prelu(), dense()), dense()]
    stages[0].hybridize()
    model = initialized(mgpu.Pipeline(stages, CONTEXTS, micro_batches=2), None)
    trainer = trainer_of(model)
    with pytest.raises(ModesError, match="prelu"):
        mgpu.train_batch(model, LOSS, trainer, *batch())
    stages[0].hybridize(False)
    mgpu.train_batch(model, LOSS, trainer, *batch())


@pytest.mark.mxnet1("Pipeline")
def test_stages_that_are_parts_of_a_graph():
    net = initialized(Lambda(lambda F, first, last, x: last(first(x)), prelu(), dense()), [mx.cpu()])
    with pytest.raises(TrainerError, match="cannot be divided: MXNet computes wrong gradients of .*prelu"):
        mgpu.split_stages(net, 2, nd.ones((2, 3)))


@pytest.mark.mxnet1("Pipeline")
def test_a_divided_network_whose_stages_are_hybridized():
    net = initialized(stack(prelu(), dense(), dense()), [mx.cpu()])
    net.hybridize()
    stages = mgpu.split_stages(net, 2, nd.ones((2, 3)), balance="bytes")
    assert len(stages[0].block) == 3  # PReLU is between two of its layers
    model = mgpu.Pipeline(stages, CONTEXTS, micro_batches=2)
    with pytest.raises(ModesError, match="prelu"):
        mgpu.train_batch(model, LOSS, trainer_of(model), *batch())


def same_as_plain(make, way, **mode):
    nets = [initialized(make()), initialized(make())]
    for block in nets[1] if type(nets[1]) is nn.Sequential else nets[1:]:
        block.hybridize(**mode)
    for net in nets:
        trainer = trainer_of(net)
        for number in range(3):
            way(net, trainer, number)
    np.testing.assert_allclose(weights(nets[0]), weights(nets[1]), rtol=1e-5, atol=1e-6)


RIGHT = {
    "PReLU is the last layer": lambda: stack(dense(), nn.PReLU(in_channels=3)),
    "PReLU is the first layer": lambda: stack(nn.PReLU(in_channels=3), dense()),
    "each layer has a graph of its own": lambda: stack(dense(), nn.PReLU(in_channels=3), dense(), kind=nn.Sequential),
    "a foreach with memory for each pass": lambda: stack(dense(), Lambda(foreach, dense()), dense()),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=flow) if "foreach" in name else name for name in RIGHT])
def test_graphs_that_are_right_still_train(name):
    same_as_plain(RIGHT[name], by_hand, static_alloc=True)
    same_as_plain(RIGHT[name], lambda net, trainer, number: mgpu.train_batch(net, LOSS, trainer, *batch(number)))


def test_a_frozen_slope_needs_no_gradient_until_it_is_trained():
    def frozen():
        net = prelu()
        net[1].alpha.grad_req = "null"
        return net

    same_as_plain(frozen, lambda net, trainer, number: mgpu.train_batch(net, LOSS, trainer, *batch(number)))
    net = initialized(frozen(), static_alloc=True)
    trainer = trainer_of(net)
    by_hand(net, trainer)
    net[1].alpha.grad_req = "write"
    with pytest.raises(ModesError, match="PReLU"):
        by_hand(net, trainer)


@flow
def test_a_compiled_foreach_is_right_with_static_memory():
    def step(net, trainer, number):
        mgpu.compile_step(net, LOSS, trainer, compiled="auto")(*batch(number))

    same_as_plain(lambda: stack(dense(), Lambda(foreach, dense()), dense()), step, **STATIC)
    net = initialized(stack(nn.Dense(3), Lambda(foreach, dense()), nn.Dense(3)), **STATIC)  # the first batch decides shapes
    step(net, trainer_of(net), 0)


@every_net
def test_predictions_of_these_networks_are_right(kind):
    nets = [initialized(NETS[kind]()), initialized(NETS[kind](), static_alloc=True)]
    data = [batch(number) for number in range(3)]
    np.testing.assert_allclose(*(mgpu.predict(net, [X for X, _ in data]) for net in nets), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(*(mgpu.evaluate(net, data, {}, loss=LOSS)["loss"] for net in nets), rtol=1e-5)
    for net in nets:
        mgpu.evaluate(net, data, {}, loss=LOSS, compiled="on" if kind == "prelu" and not is_mxnet2() else "auto")


@flow
def test_predictions_of_a_static_foreach_raise():
    net = initialized(stack(dense(), Lambda(foreach, dense()), dense()), **STATIC)
    message = f"foreach.* in {name_of(net)} .*without static_shape"
    for _ in range(2):
        with pytest.raises(ModesError, match=message):
            mgpu.predict(net, [batch()[0]])
        with pytest.raises(ModesError, match=message):
            mgpu.evaluate(net, [batch()], {}, loss=LOSS, compiled="off")
        with pytest.raises(ModesError, match=message):
            mgpu.train_batch(net, LOSS, trainer_of(net), *batch())
    net.hybridize(static_alloc=True)
    mgpu.predict(net, [batch()[0]])

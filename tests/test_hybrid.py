"""Networks whose last stage is data-parallel compute what one device computes."""

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.errors import TrainerError
from gluon_mgpu.models import Seq2Seq, SequenceLoss
from gluon_mgpu.mxnet_internals.parameters import structural_params
from mxnet.gluon import nn

from .conftest import as_array, initialized, largest_difference, sequential, stack
from .test_pipeline import Crossing, batches, contexts, dense, seeded, trained, values
from .versions import nd

pytestmark = pytest.mark.mxnet1("Pipeline")


def hybrid(net, num_stages, micro_batches=1, *, shared=None, ctx=None, sample=None, **options):
    """The pipeline of a network whose last layers, or the ones given, are data-parallel."""
    X = batches()[0][0] if sample is None else sample
    layers = list(net)[-2:] if shared is None else shared
    stages = mgpu.split_stages(net, num_stages, X, balance="bytes", data_parallel=layers)
    return mgpu.Pipeline(stages, contexts(num_stages) if ctx is None else ctx, micro_batches, **options)


@pytest.mark.each_value
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 7])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_it_trains_what_one_device_trains(num_stages, micro_batches, num_replicas, recompute, optimizer):
    bounds = {"clip_norm": 0.5}
    alone, expected = trained(dense(), optimizer, **bounds)
    ctx = contexts(num_stages, num_replicas)
    model = hybrid(dense(), num_stages, micro_batches, ctx=ctx, recompute=recompute)
    found, trainer = trained(model, optimizer, **bounds)
    scale = max(np.abs(value).max() for value in alone)
    assert largest_difference(found, alone) <= 1e-6 * scale
    assert float(trainer.grad_norm) == pytest.approx(float(expected.grad_norm), rel=1e-5)
    X = nd.array(batches()[0][0])
    assert largest_difference([model(X).asnumpy()], [seeded_like(found)(X).asnumpy()]) < 1e-6


def seeded_like(arrays):
    net = dense()
    for param, value in zip(net.collect_params().values(), arrays):
        param.set_data(nd.array(value))
    return net


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_weight_that_two_stages_of_one_device_share(micro_batches):
    alone, _ = trained(seeded(Crossing()))
    stages = mgpu.split_stages(seeded(Crossing()), 4, batches()[0][0], balance="bytes")
    found, _ = trained(mgpu.Pipeline(stages, [mx.cpu(0), mx.cpu(1)] * 2, micro_batches))
    assert largest_difference(found, alone) < 1e-6
    net = seeded(Crossing())  # its third layer shares the first one's weights; the last one is data-parallel
    found, _ = trained(hybrid(net, 2, micro_batches, shared=[net.last]))
    assert largest_difference(found, alone) < 1e-6


def sentences(dtype="int32"):
    rng = np.random.RandomState(1)
    source, target, wanted = (rng.randint(0, size, shape) for size, shape in ((20, (7, 6)), (22, (7, 5)), (22, (7, 5))))
    lengths = rng.randint(1, 7, 7), rng.randint(1, 6, 7)
    X, y = (source, lengths[0], target), (wanted, lengths[1])
    return tuple(one.astype(dtype) for one in X), tuple(one.astype(dtype) for one in y)


def translator(**options):
    mx.random.seed(4)
    return initialized(Seq2Seq(20, 22, embed_size=8, hidden_size=8, **options), init=mx.init.Xavier(magnitude=4), hybridize={})


@pytest.mark.parametrize(
    "arrays, options, dtype",
    [
        pytest.param(kind, options, dtype, marks=[] if kind == default else pytest.mark.exhaustive, id=f"{kind}-{name}")
        for kind in ("nd", "np")
        for name, default, options, dtype in [
            ("gru", "nd", {}, "float32"),
            ("lstm", "np", {"cell": "lstm", "num_layers": 2}, "int32"),
            ("tied", "nd", {"num_layers": 2, "tied": True, "attention": "additive"}, "int32"),
        ]
    ],
    indirect=["arrays"],
)
def test_a_translator(arrays, options, dtype):
    X, y = sentences(dtype)

    def result(net):
        trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1, "momentum": 0.9})
        for _ in range(3):
            mgpu.train_batch(net, SequenceLoss(), trainer, X, y)
        return values(net)

    alone = result(translator(**options))
    for num_stages, micro_batches in ((2, 1), (2, 3), (3, 2)):
        net = translator(**options)
        sample = tuple(map(as_array, X))
        model = hybrid(net, num_stages, micro_batches, shared=net.data_parallel_layers(), sample=sample)
        found = result(model)
        assert largest_difference(found, alone) <= 1e-6 * max(np.abs(value).max() for value in alone)
        everywhere = {name for name, param in structural_params(model).items() if len(param.list_ctx()) > 1}
        tied = {"output.weight", "target_embedding.weight"} if options.get("tied") else {"output.weight"}
        attention = {"decoder.attention.query.weight", "decoder.attention.score.weight"} if options.get("attention") else set()
        assert everywhere == {"encoder.keys.weight", "decoder.attention.join.weight", "output.bias", *tied, *attention}


def normalised():
    net = stack(nn.Dense(8, in_units=16), nn.Dense(8, in_units=8), nn.Dense(8, in_units=8), nn.BatchNorm(in_channels=8))
    return seeded(net)


@pytest.mark.parametrize(
    "make, shared, message",
    [
        (dense, lambda net: net[-1], "got data_parallel=Dense(16 -> 5, linear); expected a list of the network's layers"),
        (dense, lambda net: [net[0]], "all or nothing of the network"),
        (dense, lambda net: [nn.Dense(3, in_units=3)], "all or nothing of the network"),
        (dense, lambda net: [nn.Flatten()], "without parameters of their own; expected layers that have some"),
        (normalised, lambda net: [net[2]], "got BatchNorm in the data-parallel stage; expected it in the stages before"),
    ],
)
def test_what_cannot_be_is_refused(make, shared, message):
    net = make()
    with pytest.raises(TrainerError) as raised:
        hybrid(net, 2, shared=shared(net))
    assert message in str(raised.value)


def test_each_part_costs_what_it_holds():
    net = sequential(nn.Dense(8, in_units=4), nn.Dense(8, in_units=8), nn.Dense(2, in_units=8))
    found = mgpu.split_stages(net, 2, nd.ones((2, 4)), balance="bytes", data_parallel=[net[2]])
    assert found.costs == [160.0, 288.0, 72.0]

"""Error messages as this machine provokes them: each has the right entry first."""

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from mxnet import MXNetError, autograd, gluon, nd
from mxnet.gluon import nn

from .test_explain import first

PROVOKED = {}


def provokes(name):
    def note(function):
        PROVOKED[function.__name__] = (name, function)
        return function

    return note


def dense(units=3, in_units=2, **options):
    net = nn.Dense(units, in_units=in_units)
    net.initialize(**options)
    return net


def forward(net, *shape, dtype="float32"):
    net(nd.ones(shape, dtype=dtype)).wait_to_read()


def saved(tmp_path, net=None):
    path = str(tmp_path / "net.params")
    (net or dense()).save_parameters(path)
    return path


def hybrid(function):
    class Block(gluon.HybridBlock):
        def hybrid_forward(self, F, *args):
            return function(F, *args)

    block = Block()
    block.hybridize()
    return block


def written(tmp_path, data):
    path = tmp_path / "file"
    path.write_bytes(data)
    return str(path)


@provokes("parameter-not-initialized")
def no_initialize(tmp_path):
    forward(nn.Dense(3, in_units=2), 1, 2)


@provokes("not-initialized-on-context")
def other_device(tmp_path):
    forward(dense(ctx=mx.cpu(1)), 1, 2)


@provokes("deferred-initialization")
def read_before_the_first_batch(tmp_path):
    dense(in_units=0).weight.data()


@provokes("deferred-initialization")
def unknown_shape(tmp_path):
    gluon.Parameter("weight", shape=(3, 0)).initialize()


@provokes("reset-ctx-before-initialize")
def reset_before_initialize(tmp_path):
    nn.Dense(2, in_units=2).collect_params().reset_ctx(mx.cpu(1))


@provokes("shape-inconsistent")
def other_features(tmp_path):
    forward(dense(), 1, 5)


@provokes("shape-inconsistent")
def label_with_two_axes(tmp_path):
    gluon.loss.SoftmaxCrossEntropyLoss()(nd.ones((4, 2)), nd.ones((4, 2))).wait_to_read()


@provokes("broadcast")
def sum_of_other_shapes(tmp_path):
    (nd.ones((2, 3)) + nd.ones((3, 2))).wait_to_read()


@provokes("broadcast")
def elementwise_sum_of_other_shapes(tmp_path):
    nd.elemwise_add(nd.ones((2, 3)), nd.ones((3, 2))).wait_to_read()


@provokes("dtype-mismatch")
def float64_data(tmp_path):
    forward(dense(), 1, 2, dtype="float64")


@provokes("concat-shapes")
def concat(tmp_path):
    nd.concat(nd.ones((2, 3)), nd.ones((3, 2)), dim=1)


@provokes("samples-of-different-sizes")
def samples(tmp_path):
    list(gluon.data.DataLoader(gluon.data.SimpleDataset([np.ones(1), np.ones(2)]), batch_size=2))


@provokes("dot-shapes")
def dot(tmp_path):
    nd.dot(nd.ones((2, 3)), nd.ones((2, 3))).wait_to_read()


@provokes("reshape")
def reshape(tmp_path):
    nd.ones((2, 3)).reshape((4, 2))


@provokes("kernel-larger-than-input")
def small_image(tmp_path):
    forward(nn.MaxPool2D(9), 1, 1, 4, 4)


@provokes("wrong-number-of-axes")
def image_without_batch(tmp_path):
    net = nn.Conv2D(3, 3)
    net.initialize()
    forward(net, 8, 8, 3)


@provokes("layout-not-on-cpu")
def channels_last(tmp_path):
    net = nn.Conv2D(3, 3, layout="NHWC")
    net.initialize()
    forward(net, 1, 8, 8, 3)


@provokes("index-out-of-range")
def index(tmp_path):
    nd.ones((2,))[5]


@provokes("axis-out-of-range")
def axis(tmp_path):
    nd.sum(nd.ones((2, 2)), axis=5).wait_to_read()


@provokes("metric-shapes")
def metric(tmp_path):
    mx.metric.Accuracy().update([nd.ones((2,))], [nd.ones((3, 2))])


@provokes("module-inputs")
def bind(tmp_path):
    mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3).bind(mx.cpu(), {"data": nd.ones((1, 2))})


@provokes("operator-arguments")
def operator_argument(tmp_path):
    mx.sym.FullyConnected(mx.sym.var("data"), num_hidden="many")


@provokes("rnn-state")
def rnn_state(tmp_path):
    net = gluon.rnn.LSTM(4, input_size=3)
    net.initialize()
    net(nd.ones((5, 2, 3)), net.begin_state(3))


@provokes("cannot-differentiate")
def not_recorded(tmp_path):
    x = nd.ones((1,))
    x.attach_grad()
    (x * 2).backward()


@provokes("cannot-differentiate")
def backward_twice(tmp_path):
    x = nd.ones((1,))
    x.attach_grad()
    with autograd.record():
        y = x * x
    y.backward()
    y.backward()


@provokes("in-place-while-recording")
def in_place(tmp_path):
    x = nd.ones((1,))
    x.attach_grad()
    with autograd.record():
        y = x * 2
        y += 1


@provokes("any-container-empty")
def two_backward_passes(tmp_path):
    net = nn.BatchNorm(in_channels=2)
    net.initialize()
    with autograd.record():
        first, second = net(nd.ones((2, 2))), net(nd.ones((2, 2)))
    first.backward()
    second.backward()


@provokes("stale-gradient")
def unused_layer(tmp_path):
    net = nn.Sequential()
    net.add(dense(), dense())
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    with autograd.record():
        y = net[0](nd.ones((1, 2)))
    y.backward()
    trainer.step(1)


@provokes("no-gradient-array")
def frozen(tmp_path):
    net = nn.Dense(2, in_units=2)
    net.collect_params().setattr("grad_req", "null")
    net.initialize()
    net.weight.grad()


@provokes("np-symbol-in-hybrid-network")
def np_function_of_a_symbol(tmp_path):
    class Network(nn.HybridBlock):
        def hybrid_forward(self, F, x):
            return mx.np.concatenate([x, x])

    with mx.util.np_shape(True), mx.util.np_array(True):
        net = Network()
        net.hybridize()
        net(mx.np.ones((2, 3)))


@provokes("broadcast-axes")
def broadcast_like_of_fewer_axes(tmp_path):
    nd.broadcast_like(nd.ones(3), nd.ones((2, 3)))


@provokes("numpy-of-ndarrays")
def numpy_of_a_list_of_arrays(tmp_path):
    np.mean([nd.ones(1), nd.ones(1)])


@provokes("trainer-parameters")
def network_instead_of_parameters(tmp_path):
    gluon.Trainer(dense(), "sgd")


@provokes("optimizer-settings")
def unknown_optimizer(tmp_path):
    gluon.Trainer(dense().collect_params(), "nonsense")


@provokes("not-a-scalar")
def scalar(tmp_path):
    nd.ones((2,)).asscalar()


@provokes("not-a-scalar")
def condition(tmp_path):
    bool(nd.ones((2,)))


@provokes("custom-op")
def unknown_custom_op(tmp_path):
    nd.Custom(nd.ones((1,)), op_type="nonsense")


@provokes("legacy-and-np-arrays")
def np_array(tmp_path):
    dense()(mx.np.ones((1, 2)))


@provokes("input-not-ndarray")
def numpy_array(tmp_path):
    dense()(np.ones((1, 2)))


@provokes("input-not-ndarray")
def list_of_shards(tmp_path):
    dense()([nd.ones((1, 2))])


@provokes("symbol-in-hybrid-network")
def shape_of_a_symbol(tmp_path):
    hybrid(lambda F, x: x.reshape((x.shape[0], -1)))(nd.ones((1,)))


@provokes("symbol-in-hybrid-network")
def value_of_a_symbol(tmp_path):
    hybrid(lambda F, x: x.asnumpy())(nd.ones((1,)))


@provokes("symbol-in-hybrid-network")
def nd_of_a_symbol(tmp_path):
    hybrid(lambda F, x: nd.relu(x))(nd.ones((1,)))


@provokes("children-must-be-hybrid")
def plain_child(tmp_path):
    nn.HybridSequential().add(nn.Sequential())


@provokes("input-format-changed")
def other_arguments(tmp_path):
    block = hybrid(lambda F, *args: args[0])
    block(nd.ones((1,)), nd.ones((1,)))
    block(nd.ones((1,)))


@provokes("export-before-forward")
def export(tmp_path):
    dense().export(str(tmp_path / "net"))


@provokes("block-not-set-up")
def no_super(tmp_path):
    class Net(gluon.Block):
        def __init__(self):
            self.layer = nn.Dense(2)

    Net()


@provokes("fp16-on-cpu")
def fp16(tmp_path):
    net = dense()
    net.cast("float16")
    forward(net, 1, 2, dtype="float16")


@provokes("initializer")
def xavier_of_a_bias(tmp_path):
    nn.Dense(2, in_units=2, bias_initializer=mx.init.Xavier()).initialize()


@provokes("parameter-missing-in-file")
def other_names(tmp_path):
    dense().collect_params().save(str(tmp_path / "net.params"))
    nn.Dense(3, in_units=2).load_parameters(str(tmp_path / "net.params"))


@provokes("parameter-not-in-network")
def more_names(tmp_path):
    net, smaller = nn.Sequential(), nn.Sequential()
    net.add(dense(), dense(2, 3))
    smaller.add(nn.Dense(3, in_units=2))
    smaller.load_parameters(saved(tmp_path, net))


@provokes("parameter-shape-differs")
def other_shape(tmp_path):
    nn.Dense(3, in_units=4).load_parameters(saved(tmp_path))


@provokes("parameter-dtype-differs")
def other_dtype(tmp_path):
    net = nn.Dense(3, in_units=2, dtype="float64")
    net.initialize()
    nn.Dense(3, in_units=2).load_parameters(saved(tmp_path, net))


@provokes("invalid-params-file")
def damaged_params(tmp_path):
    nn.Dense(3, in_units=2).load_parameters(written(tmp_path, b"not what MXNet writes"))


@provokes("file-not-found")
def no_params(tmp_path):
    nn.Dense(3, in_units=2).load_parameters(str(tmp_path / "none.params"))


@provokes("operator-not-registered")
def unknown_operator(tmp_path):
    graph = b'{"nodes":[{"op":"Nonsense","name":"a","inputs":[]}],"arg_nodes":[],"heads":[[0,0,0]]}'
    mx.sym.load(written(tmp_path, graph))


@provokes("symbol-json-unreadable")
def no_json(tmp_path):
    mx.sym.load(written(tmp_path, b"<html>"))


@provokes("model-name-unknown")
def unknown_model(tmp_path):
    gluon.model_zoo.vision.get_model("nonsense")


@provokes("download-failed")
def no_network(tmp_path):
    gluon.utils.download("http://127.0.0.1:9/net.params", path=str(tmp_path / "net.params"), retries=0)


@provokes("invalid-recordio")
def damaged_record(tmp_path):
    mx.recordio.MXRecordIO(written(tmp_path, b"x" * 64), "r").read()


@provokes("no-record-files")
def no_record(tmp_path):
    mx.io.ImageRecordIter(path_imgrec=str(tmp_path / "none.rec"), data_shape=(3, 8, 8), batch_size=1)


@provokes("image-not-read")
def damaged_image(tmp_path):
    mx.image.imdecode(b"no image").wait_to_read()


@provokes("cannot-pickle")
def local_class(tmp_path):
    import pickle

    class Samples(gluon.data.Dataset):
        pass

    pickle.dumps(Samples())


@provokes("uneven-split")
def uneven(tmp_path):
    gluon.utils.split_and_load(nd.ones((5, 2)), [mx.cpu(0), mx.cpu(1)])


@provokes("uneven-split")
def fewer_examples_than_devices(tmp_path):
    gluon.utils.split_and_load(nd.ones((1, 2)), [mx.cpu(0), mx.cpu(1)], even_split=False)


@provokes("missing-package")
def no_package(tmp_path):
    import nonsense_package_of_no_one  # noqa: F401


@provokes("file-not-found")
def no_file(tmp_path):
    open(tmp_path / "none")  # noqa: SIM115


@provokes("ours-device-spec")
def unknown_device(tmp_path):
    mgpu.resolve_devices("tpu")


@provokes("ours-device-spec")
def device_twice(tmp_path):
    mgpu.resolve_devices([mx.cpu(0), mx.cpu(0)])


@provokes("ours-split")
def ours_uneven(tmp_path):
    mgpu.split_and_load(nd.ones((5, 2)), [mx.cpu(0), mx.cpu(1)], even_split=True)


@provokes("ours-unused-parameter")
def ours_unused(tmp_path):
    net = nn.Sequential()
    net.add(dense(), dense())
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1})
    with autograd.record():
        y = net[0](nd.ones((1, 2)))
    y.backward()
    trainer.step(1)


@provokes("ours-loss-not-finite")
def ours_nan(tmp_path):
    net = dense()
    batch = (np.full((4, 2), np.nan, "float32"), np.ones((4, 3), "float32"))
    mgpu.fit(net, gluon.loss.L2Loss(), mgpu.Trainer(net, "sgd", {"learning_rate": 0.1}), [batch], epochs=1, metrics=())


@provokes("shape-inconsistent")  # what MXNet says, not that a step failed
def ours_step(tmp_path):
    net = dense()
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1})
    mgpu.train_batch(net, gluon.loss.L2Loss(), trainer, np.ones((4, 5), "float32"), np.ones((4, 3), "float32"))


@provokes("ours-checkpoint")
def ours_no_checkpoint(tmp_path):
    net = dense()
    mgpu.load_checkpoint(tmp_path, net, mgpu.Trainer(net, "sgd", {"learning_rate": 0.1}))


@provokes("ours-trainer")
def ours_not_initialized(tmp_path):
    mgpu.Trainer(nn.Dense(2, in_units=2), "sgd", {"learning_rate": 0.1})


@provokes("ours-precision")
def ours_fp16(tmp_path):
    mgpu.Trainer(dense(), "sgd", {"learning_rate": 0.1}, precision="fp16")


@provokes("ours-data-file")
def ours_no_data(tmp_path):
    mgpu.data.load_idx_folder(tmp_path)


@provokes("convolution-channels")
def images_with_channels_last(tmp_path):
    net = nn.Conv2D(4, 3, in_channels=3)
    net.initialize()
    forward(net, 2, 8, 8, 3)


@provokes("groups-of-channels")
def groups_that_do_not_divide(tmp_path):
    net = nn.Conv2D(16, 3, groups=3, in_channels=3)
    net.initialize()
    forward(net, 2, 3, 8, 8)


@provokes("activation-name")
def activation_of_another_name(tmp_path):
    net = nn.Dense(3, activation="leakyrelu")
    net.initialize()
    forward(net, 2, 2)


@provokes("wrong-number-of-axes")
def volume_without_a_channel(tmp_path):
    net = nn.Conv3D(4, 3)
    net.initialize()
    forward(net, 2, 8, 8, 8)


@provokes("rnn-state")
def state_of_another_batch(tmp_path):
    layer = gluon.rnn.GRU(4)
    layer.initialize()
    layer(nd.ones((5, 2, 3)), layer.begin_state(7))


@provokes("ndarray-meets-symbol")
def array_in_a_hybrid_network(tmp_path):
    hybrid(lambda F, x: x - nd.ones(3))(nd.ones((2, 3)))


@provokes("inputs-by-position")
def input_by_name(tmp_path):
    hybrid(lambda F, x, mask: x * mask)(nd.ones(3), mask=nd.ones(3))


@provokes("sequential-takes-layers")
def function_as_a_layer(tmp_path):
    net = nn.Sequential()
    net.add(nd.relu)
    net.initialize()


@provokes("parameter-assigned")
def array_in_place_of_a_parameter(tmp_path):
    dense().weight = nd.ones((3, 2))


@provokes("symbol-expected")
def symbol_block_of_arrays(tmp_path):
    gluon.SymbolBlock(nd.ones(2), mx.sym.var("data"))


@provokes("pytorch-names")
def method_of_pytorch(tmp_path):
    nd.ones(2).cuda()


@provokes("context-as-text")
def device_as_text(tmp_path):
    dense(ctx="gpu")


@provokes("no-devices-to-divide-by")
def split_over_no_devices(tmp_path):
    gluon.utils.split_and_load(nd.ones((4, 2)), [])


@provokes("learning-rate-schedule")
def learning_rate_beside_a_schedule(tmp_path):
    schedule = mx.lr_scheduler.FactorScheduler(10)
    settings = {"learning_rate": 0.1, "lr_scheduler": schedule}
    gluon.Trainer(dense().collect_params(), "sgd", settings).set_learning_rate(0.01)


@provokes("arrays-of-different-length")
def arrays_of_other_lengths(tmp_path):
    gluon.data.ArrayDataset(nd.ones((4, 2)), nd.ones(3))


@provokes("transform-order")
def normalize_before_to_tensor(tmp_path):
    gluon.data.vision.transforms.Normalize(0.5, 0.5)(nd.ones((8, 8, 5)))


@provokes("array-of-this")
def array_of_ragged_lists(tmp_path):
    nd.array([[1, 2, 3], [4, 5]])


@provokes("split-size")
def split_unevenly(tmp_path):
    nd.split(nd.ones((5, 3)), num_outputs=2, axis=0)


@provokes("pad-operator")
def pad_of_two_axes(tmp_path):
    nd.pad(nd.ones((4, 4)), mode="constant", pad_width=(1, 1, 1, 1))


@provokes("box-arrays")
def regions_without_an_image(tmp_path):
    nd.contrib.ROIAlign(nd.ones((1, 1, 8, 8)), nd.ones((1, 4)), (2, 2), 1.0)


@provokes("attribute-called")
def shape_as_a_function(tmp_path):
    nd.ones(2).shape(0)


@provokes("ours-arguments")
def ours_no_pairs(tmp_path):
    net = dense()
    mgpu.fit(net, gluon.loss.L2Loss(), mgpu.Trainer(net, "sgd", {"learning_rate": 0.1}), [nd.ones((4, 2))], epochs=1)


@provokes("parameter-shape-differs")
def channels_of_another_layer(tmp_path):
    net = nn.HybridSequential()
    net.add(nn.Conv2D(16, 3), nn.BatchNorm(in_channels=32))
    net.initialize()
    net.hybridize()
    forward(net, 1, 3, 8, 8)


@provokes("argument-value")
def loader_without_a_batch_size(tmp_path):
    gluon.data.DataLoader([1, 2, 3])


@provokes("generator-not-list")
def index_of_a_loader(tmp_path):
    gluon.data.DataLoader([1, 2, 3], batch_size=2)[0]


@provokes("input-not-ndarray")
def function_that_returns_numpy(tmp_path):
    class Twice(autograd.Function):
        def forward(self, x):
            return 2 * x.asnumpy()

    x = nd.ones(3)
    x.attach_grad()
    with autograd.record():
        Twice()(x)


@provokes("module-inputs")
def two_layers_of_one_name(tmp_path):
    inner = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3, name="fc")
    mx.sym.FullyConnected(inner, num_hidden=4, name="fc").simple_bind(mx.cpu(), data=(2, 3))


@provokes("list-instead-of-array")
def number_as_a_label(tmp_path):
    gluon.loss.SigmoidBCELoss()(nd.ones((4, 1)), 1)


@provokes("not-a-scalar")
def float_of_an_np_array(tmp_path):
    float(mx.np.ones((4,)))


@provokes("npx-function")
def function_that_np_lacks(tmp_path):
    mx.np.fromfunction(lambda i: i, (3,))


@provokes("tensor-too-large")
def negative_size(tmp_path):
    nd.zeros((-3, 2))


@provokes("deferred-initialization")
def product_with_a_weight_of_unknown_size(tmp_path):
    class Layer(gluon.HybridBlock):
        def __init__(self):
            super().__init__()
            self.weight = self.params.get("weight", shape=(4, 0), allow_deferred_init=True)

        def hybrid_forward(self, F, x, weight):
            return F.dot(x, weight, transpose_b=True)

    layer = Layer()
    layer.initialize()
    forward(layer, 2, 3)


@provokes("learning-rate-schedule")
def schedule_by_name(tmp_path):
    gluon.Trainer(dense().collect_params(), "sgd", {"lr_scheduler": "cosine", "learning_rate": 0.1})


@provokes("dtype-not-supported")
def integers_in_dense(tmp_path):
    net = dense()
    net.cast("int8")
    forward(net, 1, 2, dtype="int8")


@provokes("ours-split")
def ours_fewer_labels(tmp_path):
    mgpu.data.ArrayLoader(np.ones((4, 2)), np.ones(3), batch_size=2)


@provokes("ours-arguments")
def ours_history_by_name(tmp_path):
    mgpu.History()["test_accuracy"]


@pytest.mark.filterwarnings("ignore")  # those of MXNet that precede an error
@pytest.mark.parametrize("name, provoke", PROVOKED.values(), ids=PROVOKED)
def test_a_provoked_message_has_the_right_entry_first(name, provoke, tmp_path):
    with pytest.raises(Exception) as caught:
        provoke(tmp_path)
        nd.waitall()
    text = f"{caught.type.__name__}: {caught.value}"
    assert first(text) == name, text


@pytest.mark.skipif(bool(mgpu.devices.usable_gpus()), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_explained():
    for use in (lambda: nd.ones((1,), ctx=mx.gpu(0)), lambda: mx.kv.create("nccl"), lambda: mx.context.gpu_memory_info(0)):
        with pytest.raises(MXNetError) as caught:
            use()
        assert first(str(caught.value)) in {
            "built-without-cuda",
            "nccl-missing",
            "libcuda-missing",
            "driver-too-old",
            "invalid-device-ordinal",
        }
    with pytest.raises(mgpu.errors.DeviceError) as caught:
        mgpu.resolve_devices("gpu")
    assert first(str(caught.value)) == "ours-no-gpu"

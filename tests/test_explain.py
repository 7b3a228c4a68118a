"""Error messages and their entries: as users reported them, as this machine provokes them, in logs, and on the command line."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import click
import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from click.testing import CliRunner
from gluon_mgpu.cli import main
from gluon_mgpu.cli.main import CommandGroup
from gluon_mgpu.explain import ENTRIES, explain_log, explain_message
from mxnet import MXNetError, autograd, gluon, nd
from mxnet.gluon import nn

from .test_docs import anchors

ROOT = Path(__file__).parent.parent
NAMES = [entry.name for entry in ENTRIES]

# Messages of public threads about MXNet, GluonCV, GluonNLP, GluonTS, Horovod and insightface, each with its entry.
REPORTED = (ROOT / "tests" / "data" / "reported_messages.txt").read_text(encoding="utf-8").splitlines()


def names(text):
    """The entry that is found first, and those that are close."""
    return [name for answer in explain_message(text) for name in (answer.entry.name, *answer.others)]


def first(text):
    return next(iter(names(text)), None)


# The entries


def test_there_are_entries():
    assert len(set(NAMES)) == len(NAMES) >= 40
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) for name in NAMES)


@pytest.mark.parametrize("entry", ENTRIES, ids=NAMES)
def test_an_entry_is_complete(entry):
    assert entry.messages and all(re.search("[A-Za-z0-9]{3}", message) for message in entry.messages)
    for text in (entry.cause, entry.fix):
        assert text.endswith(".") and not re.search("[가-힣]", text)
        assert all(len(re.sub("`[^`]*`", "code", one).split()) <= 25 for one in re.split(r"(?<=[.:;?]) ", text)), text
    for text in (entry.cause_ko, entry.fix_ko):
        assert re.search("[가-힣]", text) and text.endswith(".")
        assert re.search(r"(니다|세요)\.$|예: `[^`]+`\.$", text), text
    fixed = [set(re.findall(r"\b[A-Z]+_[A-Z_0-9]+\b|mgpu\.\w+|--[a-z-]+", text)) for text in (entry.fix, entry.fix_ko)]
    assert fixed[0] == fixed[1]  # the same settings, functions and options in both languages
    page, _, anchor = entry.link.partition("#")
    assert not anchor or anchor in anchors(ROOT / "docs" / page)


@pytest.mark.parametrize("entry", ENTRIES, ids=NAMES)
def test_an_entry_is_found_by_its_messages(entry):
    for message in entry.messages[:3]:
        assert entry.name in names(message.replace("…", "x")), message


def test_the_index_of_the_page_holds_every_entry():
    script = runpy.run_path(str(ROOT / "scripts" / "error_index.py"))
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    assert script["INDEX"].findall(page) == [script["index"]()], "run python scripts/error_index.py"


# Messages that users reported


def test_reported_messages_have_the_right_entry_first():
    assert len(REPORTED) >= 60
    wrong = []
    for line in REPORTED:
        name, message = line.split(": ", 1)
        assert name in NAMES
        wrong += [(name, first(message), message)] if first(message) != name else []
    assert not wrong


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   ",
        "hello world",
        "the weather is fine today",
        "Epoch 3: loss 0.3, accuracy 0.9",
        "안녕하세요",
        "ValueError: The order total must not be negative",
        "AssertionError: expected 3 invoices, got 2",
        "TypeError: price must be a number",
        "ValueError: invalid literal for int() with base 10: '12a'",
        "RuntimeError: robot arm did not reach home position",
        "django.db.utils.OperationalError: no such table: auth_user",
        "botocore.exceptions.NoCredentialsError: Unable to locate credentials",
        "npm ERR! code ERESOLVE",
        "OSError: [Errno 22] Invalid argument",
        "E: Unable to locate package foo",
        "fatal: not a git repository (or any of the parent directories): .git",
        "django.core.exceptions.ImproperlyConfigured: The SECRET_KEY setting must not be empty.",
        "jinja2.exceptions.TemplateNotFound: index.html",
        "java.lang.NullPointerException",
        "TypeError: Cannot read properties of undefined (reading 'map')",
        "sqlalchemy.exc.IntegrityError: (sqlite3.IntegrityError) NOT NULL constraint failed: users.name",
        "ValueError: Unknown currency code: XYZ",
        "AssertionError: Response status should be 200, got 404",
    ],
)
def test_what_is_no_known_message_has_no_answer(text):
    assert explain_message(text) == []


@pytest.mark.parametrize(
    "text, name",
    [
        (
            "paramter 'conv0_weight' wasnt initialised on context gpu(1), it was only initialized on gpu(0)",
            "not-initialized-on-context",
        ),
        ("OSError: libopenblas.so.0: 无法打开共享对象文件: 没有那个文件或目录", "system-library-missing"),
        ("[1,0]<stderr>:OSError: [WinError 126] 지정된 모듈을 찾을 수 없습니다", "windows-dll"),
        ("AttributeError: 'Symbol' object has no attribute 'shape'. Did you mean: 'reshape'?", "symbol-in-hybrid-network"),
        ("AttributeError: 'NDArray' object has no attribute 'unsqueeze'. Did you mean: 'squeeze'?", "pytorch-names"),
        ("AttributeError: module 'gluoncv.data' has no attribute 'batchfy'. Did you mean: 'batchify'?", "version-mismatch"),
    ],
)
def test_a_message_that_differs_a_little_is_found(text, name):
    assert first(text) == name


@pytest.mark.parametrize(
    "text, name",
    [
        ("src/operator/nn/new.cc:12: Check failed: lshape.ndim() == 7 (3 vs. 7)", "wrong-number-of-axes"),
        ("MXNetError: Check failed: a.dtype() == other (0 vs. 2)", "dtype-mismatch"),
        ("src/operator/new-inl.h:7: Check failed: first_axis < limit : no text", "operator-check-failed"),
        ("src/operator/new-inl.h:7: Check failed: axis_end < limit : no text", "index-out-of-range"),
        ("src/operator/contrib/multibox_new.cc:8: Check failed: ready == 1 (0 vs. 1)", "empty-labels"),
        ("src/operator/nn/new.cc:12: Check failed: ready == 1 (0 vs. 1)", "operator-check-failed"),
        ("src/storage/pooled_storage_new.h:5: Check failed: ready == 1", "gpu-out-of-memory"),
        ("src/operator/quantization/new.cc:5: Check failed: ready == 1", "quantization"),
        ("src/nnvm/new.cc:5: Check failed: ready == 1", "internal-check"),
        ("ValueError: the context of this NDArray must be 7", "argument-value"),
    ],
)
def test_a_check_without_an_entry_is_answered_by_its_file_or_its_condition(text, name):
    assert first(text) == name


def test_a_message_of_one_prefix_is_found():
    assert first("e == CUDNN_STATUS_SOMETHING_NEW") == "cudnn-failed"


# Messages that this machine provokes

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


@provokes("shapes-unknown")
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


# Logs

TRACEBACK = """Traceback (most recent call last):
  File "train.py", line 9, in <module>
    net(x)
{}"""


def test_a_log_is_answered_by_the_last_error_of_its_traceback():
    frames = "\n".join(f'  File "layer.py", line {i}, in forward\n    raise ValueError("no layer {i}")' for i in range(300))
    progress = "\r".join(f"{i}%|### | {i}/100 [00:{i:02d}<00:00, 9.1it/s]" for i in range(60))
    error = "MXNetError: Shape inconsistent, Provided = [3,2], inferred shape=(3,5)"
    log = f"{progress}\nTraceback (most recent call last):\n{frames}\n{error}\n"
    assert [answer.entry.name for answer in explain_log(log)] == ["shape-inconsistent"]


@pytest.mark.parametrize(
    "end",
    ["      RuntimeError: Cannot find the MXNet include path\n", "          RuntimeError: Cannot find the MXNet include path"],
)
def test_a_traceback_that_pip_indents_is_read(end):
    frames = "\n".join(f"{' ' * 6}{line}" for line in TRACEBACK.split("\n")[:-1])
    log = f"  error: subprocess-exited-with-error\n  [9 lines of output]\n{frames}\n{end}"
    assert explain_log(log)[0].entry.name == "horovod-not-built"


def test_a_message_of_cpp_in_two_lines_is_read_as_one():
    log = "terminate called after throwing an instance of 'std::system_error'\n  what():  Operation not permitted\n"
    assert explain_log(log)[0].entry.name == "threads-in-a-server"
    ranks = "".join(f"[1,0]<stderr>:{line}\n" for line in log.splitlines())
    assert explain_log(ranks)[0].entry.name == "threads-in-a-server"


def test_the_error_that_pytest_marks_comes_before_the_lines_of_code():
    log = 'numpy/__init__.py:284: in __getattr__\n    raise AttributeError("module {!r} has no attribute "\n'
    error = "AttributeError: module 'numpy' has no attribute 'bool'"
    assert explain_log(f"{log}E   {error}\nERROR conftest.py")[0].entry.name == "numpy-removed-names"


def test_errors_of_tracebacks_come_before_other_messages():
    log = "[10:00:00] src/base.cc:51: Upgrade advisory: this mxnet has been built against cuda library version 9020\n"
    log += TRACEBACK.format("IndexError: index 7 is out of bounds for axis 0 with size 2\n")
    assert [answer.entry.name for answer in explain_log(log)] == ["index-out-of-range", "upgrade-advisory"]


def test_an_error_that_says_little_is_read_with_the_line_that_raised_it():
    frames = '  File "recordio.py", line 313, in read_idx\n    pos = ctypes.c_size_t(self.idx[idx])\n               ^^^^^^^^\n'
    log = TRACEBACK.format(f"{frames}KeyError: 0\n")
    assert explain_log(log)[0].entry.name == "record-index"
    log = TRACEBACK.format('  File "a.py", line 1, in f\n    assert arg_shapes is not None\nAssertionError\n')
    assert [answer.entry.name for answer in explain_log(log)] == ["shapes-unknown"]


@pytest.mark.parametrize(
    "frame, error, name, without",
    [
        ("mxnet/onnx/mx2onnx/_op_translations.py", "NotImplementedError", "onnx-operator", "block-not-set-up"),
        ("mxnet/contrib/onnx/onnx2mx/import_onnx.py", "KeyError: 'Gemm_5'", "onnx-import", "key-not-found"),
        ("pydantic/main.py", "TypeError: f() missing 1 required positional argument: 'x'", "pydantic-version", "call-arguments"),
        ("multiprocessing/spawn.py", "EOFError: Ran out of input", "cannot-pickle", "invalid-params-file"),
    ],
)
def test_the_last_frame_of_a_traceback_names_the_library_of_an_error(frame, error, name, without):
    log = TRACEBACK.format(f'  File "/lib/python3.9/{frame}", line 5, in f\n    g()\n{error}\n')
    assert explain_log(log)[0].entry.name == first(log) == name
    other = TRACEBACK.format(f'  File "/lib/python3.9/{frame}", line 5, in f\n    g()\n  File "a.py", line 1, in g\n{error}\n')
    assert name not in {answer.entry.name for answer in explain_log(other)} and first(other) != name
    assert first(error) == without


FORWARD = (
    '  File "mxnet/module/module.py", line 606, in forward\n    shapes = tuple(i.shape for i in data_batch.data)\n{}\n',
    "mxnet/module/module.pyc in forward(self, data_batch)\n    605 \n--> 606     shapes = [data_batch.data]\n    607 \n{}\n",
    "[mxnet/module/module.py](https://host/#) in forward(self, data_batch)\n    605 \n--> 606  data_batch.data\n\n{}\n",
)


@pytest.mark.parametrize(
    "head", ["", "Traceback (most recent call last):\n", "AttributeError   Traceback (most recent call last)\n"]
)
@pytest.mark.parametrize("frame", FORWARD, ids=["python", "ipython", "colab"])
@pytest.mark.parametrize(
    "error, name, without",
    [
        ("AttributeError: 'NoneType' object has no attribute 'data'", "no-detection", "none-value"),
        ("AttributeError: 'NDArray' object has no attribute 'data'", "module-data-iter", "ndarray-method"),
    ],
)
def test_the_line_of_code_names_the_cause_in_every_form_of_a_traceback(head, frame, error, name, without):
    assert [answer.entry.name for answer in explain_log(head + frame.format(error))] == [name]
    assert first(error) == without


def test_a_traceback_of_which_the_head_is_missing_ends_with_its_error():
    log = (
        "INFO:root:Epoch[0]\n" + FORWARD[0].format("KeyError: 'x'") + "INFO:root:Epoch[1]\n" + FORWARD[0].format("KeyError: 'y'")
    )
    assert [answer.entry.name for answer in explain_log(log)] == ["key-not-found"]


def test_an_indented_traceback_is_read_to_its_error():
    log = TRACEBACK.format(FORWARD[0].format("AttributeError: 'NoneType' object has no attribute 'data'"))
    assert explain_log("\n".join(f"    {line}" for line in log.split("\n")))[0].entry.name == "no-detection"


def test_lines_below_an_error_without_a_traceback_belong_to_it():
    log = "RuntimeError: simple_bind error. Arguments:\ndata: (1, 3, 184, 200)\n[11:30:05] src/executor/graph_executor.cc:413: "
    log += (
        "InferShape pass cannot decide shapes for the following arguments. Please consider providing them as inputs:\nlabel: ()\n"
    )
    assert explain_log(log)[0].entry.name == "shapes-unknown"
    log = "MXNetError: Operator stack inferring shapes failed.\ninput shapes:\n{}\noutput shapes:\nNone\n"
    assert explain_log(log.format("None\nNone"))[0].entry.name == "scalar-or-empty-array"
    assert explain_log(log.format("[2,3]\n[2,4]"))[0].entry.name == "samples-of-different-sizes"


def test_a_traceback_without_its_first_line_is_one_message():
    log = '  File "lib/roi_data_layer/roidb.py", line 23, in f\n    roidb[i]["image"] = imdb.image_path_at(i)\n'
    assert explain_log(f"{log}IndexError: list index out of range\n")[0].entry.name == "region-cache"
    assert explain_log(log) == []


def test_a_pattern_that_goes_on_needs_another_word():
    assert explain_log("ModuleNotFoundError: No module named 'gluoncv'")[0].entry.name == "missing-package"
    assert explain_log("ModuleNotFoundError: No module named 'gluoncv.torch'")[0].entry.name == "version-mismatch"
    assert explain_log("ModuleNotFoundError: No module named 'mxnet'")[0].entry.name == "no-mxnet"


def test_a_bare_assertion_is_answered_by_its_condition_or_by_a_general_entry():
    for code, name in (("assert price > 0", "assertion"), ("assert os.path.isfile(_mask)", "file-not-found")):
        log = TRACEBACK.format(f'  File "a.py", line 1, in f\n    {code}\nAssertionError\n')
        assert explain_log(log)[0].entry.name == name
    assert explain_log(TRACEBACK.format("AssertionError\n")) == []


def test_an_error_that_a_library_raises_is_a_refused_value():
    frames = '  File "/lib/python3.9/site-packages/{}/transforms.py", line 5, in f\n    raise ValueError(text)\n'
    error = "ValueError: The scale 7 has no meaning here\n"
    assert explain_log(TRACEBACK.format(frames.format("gluoncv/data") + error))[0].entry.name == "argument-value"
    assert explain_log(TRACEBACK.format(frames.format("shop/data") + error)) == []


def test_a_warning_comes_after_an_error():
    log = "base_module.py:65: UserWarning: Data provided by label_shapes don't match names specified by label_names\n"
    log += "[06:22:55] src/storage/storage.cc:113: Compile with USE_CUDA=1 to enable GPU usage\n"
    assert [answer.entry.name for answer in explain_log(log)] == ["built-without-cuda", "module-inputs"]


def test_a_traceback_that_python_shows_in_quotes_is_read_as_one():
    printed = """{'time': 0.25,
  'traceback': 'Traceback (most recent call last):\\n'
               '  File "a.py", line 1, in <module>\\n'
               'ValueError: the batch cannot be '
               'evenly split into slices\\n',
  'train_map': -1}"""
    assert [answer.entry.name for answer in explain_log(printed)] == ["uneven-split"]


def test_the_traceback_of_a_worker_comes_before_its_consequence():
    frames = (
        '  File "/lib/python3.9/site-packages/gluonnlp/data/transforms.py", line 1089, in __call__\n    assert len(line) == 2\n'
    )
    log = f'multiprocessing.pool.RemoteTraceback:\n"""\nTraceback (most recent call last):\n{frames}AssertionError\n"""\n\n'
    log += "The above exception was the direct cause of the following exception:\n\n" + TRACEBACK.format("AssertionError\n")
    assert explain_log(log)[0].entry.name == "gluonnlp-vocabulary"


@pytest.mark.parametrize(
    "frame, found",
    [
        ("/lib/python3.9/site-packages/mxnet/gluon/contrib/estimator/estimator.py", "argument-value"),
        ("/src/incubator-mxnet/python/mxnet/gluon/contrib/estimator/estimator.py", "argument-value"),
        ("C:\\Anaconda3\\lib\\site-packages\\gluoncv\\data\\base.py", "argument-value"),
        ("/src/mxnet/train.py", None),
        ("/opt/envs/mxnet/lib/python3.9/site-packages/django/forms.py", None),
    ],
)
def test_what_a_library_for_mxnet_refuses_is_an_argument(frame, found):
    error = "ValueError: the order total is not acceptable"
    log = TRACEBACK.format(f'  File "{frame}", line 5, in f\n    raise ValueError(why)\n{error}\n')
    assert next((answer.entry.name for answer in explain_log(log)), None) == found
    tail = log.split("\n", log.count("\n") - 3)[-1]  # the header of the traceback is missing
    assert tail.startswith("  File") and next((answer.entry.name for answer in explain_log(tail)), None) == found


def test_a_traceback_of_a_notebook_is_read_to_its_last_frame():
    log = """ValueError                                Traceback (most recent call last)
<ipython-input-3-d2a6> in <module>()
----> 1 net(x)

~/lib/python3.6/site-packages/mxnet/gluon/contrib/estimator/estimator.py in f(self, x)
     71     def f(self, x):
---> 72         raise ValueError(why)
     73

ValueError: the order total is not acceptable
"""
    assert [answer.entry.name for answer in explain_log(log)] == ["argument-value"]


@pytest.mark.parametrize("end", ["", "\n\n        This probably means that you are not using fork"])
def test_a_message_may_be_broken_over_several_lines(end):
    text = (
        "RuntimeError:\n        An attempt has been made to start a new process before the\n        current process has finished"
    )
    text = f"{text} its bootstrapping phase.{end}\n"
    assert first(text) == explain_log(TRACEBACK.format(text))[0].entry.name == "main-guard"


def test_the_line_below_a_failed_launch_names_its_reason():
    text = "Launching horovodrun task function was not successful:\n"
    assert first(text) == "horovod-task"
    assert first(f"{text}bash: /opt/conda/bin/python3: No such file or directory") == "remote-python"


def test_a_message_inside_a_longer_one_is_not_its_cause():
    notice = "A fatal error occurred in asynchronous engine operation. If you do not know what caused this error, "
    notice += "you can try set environment variable MXNET_ENGINE_TYPE to NaiveEngine and run with debugger"
    assert first(notice) == "asynchronous-error"


def test_the_line_below_a_failed_cuda_call_names_its_reason():
    log = "MXNetError: src/common/cuda_utils.h:310: Check failed: e == cudaSuccess\n"
    log += "|| e == cudaErrorCudartUnloading: CUDA: invalid device ordinal\n"
    assert [answer.entry.name for answer in explain_log(log)] == ["invalid-device-ordinal", "cuda-call-failed"]


def test_a_chain_of_errors_is_answered_by_its_last_one_first():
    log = TRACEBACK.format("FileNotFoundError: [Errno 2] No such file or directory: 'a.rec'\n\n")
    log += "During handling of the above exception, another exception occurred:\n\n"
    log += TRACEBACK.format("ValueError: Pretrained model for resnet is not available.\n")
    assert [answer.entry.name for answer in explain_log(log)] == ["model-name-unknown", "file-not-found"]


def test_lines_that_belong_to_an_error_say_more_than_its_first_one():
    log = TRACEBACK.format("RuntimeError: simple_bind error. Arguments:\ndata: (1, 3, 640, 640)\n")
    log += "[16:14:50] src/storage/storage.cc:119: Compile with USE_CUDA=1 to enable GPU usage\n"
    log += "Stack trace:\n  [bt] (0) libmxnet.so\n"
    assert explain_log(log)[0].entry.name == "built-without-cuda"


def test_a_consequence_comes_after_its_cause():
    log = "[1,0]<stderr>:Horovod has been shut down. This was caused by an exception on one of the ranks\n"
    log += "\n".join(
        f"[1,1]<stderr>:{line}" for line in TRACEBACK.format("MemoryError: Unable to allocate 3 GiB for an array").split("\n")
    )
    assert [answer.entry.name for answer in explain_log(log)] == ["host-out-of-memory", "horovod-shut-down"]


def test_what_a_log_reports_first_is_answered_first():
    log = "ssh: Could not resolve hostname node1\nOSError: Too many open files\nssh: Could not resolve hostname node2\n"
    assert [answer.entry.name for answer in explain_log(log)] == ["ssh", "too-many-open-files"]


def test_the_log_of_a_job_of_several_processes():
    lines = TRACEBACK.format("OSError: [Errno 24] Too many open files").split("\n")
    log = "\n".join(f"\x1b[32m[{rank}] \x1b[0m{line}" for line in lines for rank in range(3))
    assert [answer.entry.name for answer in explain_log(log)] == ["too-many-open-files"]


def test_at_most_three_entries_answer_a_log():
    messages = ["Too many open files", "Address already in use", "Segmentation fault: 11", "No space left on device", "Bus error"]
    assert len(explain_log("\n".join(f"OSError: {message}" for message in messages))) == 3
    assert explain_log("INFO:root:Epoch[0] Batch [20] Speed: 33.7 samples/sec\n" * 1000) == []


# The command


def explain(*arguments, **options):
    return CliRunner().invoke(main, ["explain", *arguments], prog_name="gluon-mgpu", **options)


def test_the_command_explains_a_message():
    result = explain("RuntimeError: Parameter 'a' was not initialized on context cpu(0). It was only initialized on [gpu(0)].")
    assert result.exit_code == 0
    entry = next(entry for entry in ENTRIES if entry.name == "not-initialized-on-context")
    for text in (entry.name, entry.messages[0], entry.cause, entry.fix, f"docs/{entry.link}"):
        assert text in result.output
    assert entry.fix in explain(entry.name).output


@pytest.mark.parametrize(
    "arguments, environment, korean",
    [
        ((), {"LC_ALL": "ko_KR.UTF-8"}, True),
        ((), {"LC_ALL": "", "LC_MESSAGES": "", "LANG": "ko_KR.UTF-8"}, True),
        ((), {"LC_ALL": "C.UTF-8", "LANG": "ko_KR.UTF-8"}, False),
        (("--lang", "ko"), {"LC_ALL": "C.UTF-8"}, True),
        (("--lang", "en"), {"LC_ALL": "ko_KR.UTF-8"}, False),
    ],
)
def test_the_locale_chooses_the_language(arguments, environment, korean):
    output = explain(*arguments, "Too many open files", env=environment).output
    assert bool(re.search("[가-힣]", output)) == korean


def test_the_command_reads_a_log():
    result = explain("-", input=TRACEBACK.format("OSError: [Errno 24] Too many open files\n"))
    assert result.exit_code == 0 and result.output.startswith("too-many-open-files\n")


def test_the_command_names_close_entries():
    close = names("RuntimeError: CUDNN_STATUS_NOT_INITIALIZED and CUBLAS_STATUS_NOT_INITIALIZED")
    assert set(close[:2]) == {"cudnn-failed", "cublas-failed"}
    assert close[1] in explain("CUDNN_STATUS_NOT_INITIALIZED and CUBLAS_STATUS_NOT_INITIALIZED").output


@pytest.mark.parametrize("arguments, options", [(["hello world"], {}), (["-"], {"input": "all is well\n"})])
def test_what_nothing_fits_exits_with_1_and_names_the_doctor(arguments, options):
    result = explain(*arguments, **options)
    assert result.exit_code == 1
    assert "gluon-mgpu doctor" in result.output and "docs/troubleshooting.md" in result.output


def test_explain_works_where_mxnet_does_not(tmp_path):
    (tmp_path / "mxnet.py").write_text("raise OSError('libcudart.so.11.0: cannot open')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "LC_ALL": "C.UTF-8"}
    command = [
        sys.executable,
        "-c",
        "from gluon_mgpu_startup.command import main; main()",
        "explain",
        "libcudart.so.11.0: cannot open",
    ]
    done = subprocess.run(command, env=environment, cwd=str(ROOT), stdout=subprocess.PIPE, timeout=60)
    assert done.returncode == 0 and done.stdout.decode().startswith("cuda-library-missing\n")


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_error_of_mxnet_ends_with_the_hint(wrapped):
    @click.group(cls=CommandGroup)
    def group():
        pass

    @group.command()
    def fail():
        try:
            forward(dense(), 1, 5)
        except MXNetError as error:
            if wrapped:
                raise mgpu.errors.StepError(
                    "train_batch: got an error of the network; expected none. Try one example."
                ) from error
            raise

    result = CliRunner().invoke(group, ["fail"])
    assert result.exit_code == 1
    assert result.output.endswith("explained by: gluon-mgpu explain shape-inconsistent\n")
    assert len(result.output.splitlines()) == 1

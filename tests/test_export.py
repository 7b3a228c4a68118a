"""Exported files: other programs compute with them what the network computes."""

import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from click.testing import CliRunner
from gluon_mgpu.checkpoint.params_file import write_params
from gluon_mgpu.cli import main
from gluon_mgpu.errors import TrainerError
from gluon_mgpu.exporters import onnx_translator
from gluon_mgpu.exporters.onnx_operators import OPERATORS
from gluon_mgpu.mxnet_internals.blocks import batch_norm_options
from gluon_mgpu.mxnet_internals.versions import is_mxnet2
from gluon_mgpu.trainer.parameters import blocks_of
from hypothesis import given
from hypothesis import strategies as st
from mxnet import autograd, gluon
from mxnet.gluon import nn, rnn
from mxnet.gluon.model_zoo import vision

from .conftest import as_array, small_net, stack
from .versions import with_prefix

pytestmark = pytest.mark.mxnet1("export")
if is_mxnet2():  # which makes no blocks with hybrid_forward
    pytest.skip("MXNet 1.9's own: export", allow_module_level=True)

WORDS = ["하나 둘 셋", "넷, 다섯!", "여섯 일곱"], ["one two-three", "four, five!", "six seven"]


def run_onnx(file, *inputs):
    """The outputs of a file in ONNX Runtime, an oracle that knows nothing of MXNet."""
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return session.run(None, {one.name: value for one, value in zip(session.get_inputs(), inputs)})


def images(number, channels=1, size=6):
    return np.random.RandomState(number).uniform(-1, 1, (number, channels, size, size)).astype("float32")


def trained(net, compiled=False):
    """The network after two steps on devices whose shards differ, so that their running statistics do."""
    trainer, loss = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1}), gluon.loss.SoftmaxCrossEntropyLoss()
    step = mgpu.compile_step(net, loss, trainer, compiled="on" if compiled else "off")
    for i in range(2):
        step(images(7 + i) * (i + 1), np.arange(7 + i) % 3)
    return net


def imported(files, inputs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MXNet does not know the dtype of the inputs yet
        return gluon.SymbolBlock.imports(str(files[0]), inputs, str(files[1]))


def initialized(net, scale=0.5):
    net.initialize(mx.init.Uniform(scale))
    return net


class Tagger(nn.HybridBlock):
    def __init__(self, layer):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(10, 4), layer
        self.norm, self.output = nn.LayerNorm(), nn.Dense(3, flatten=False)

    def hybrid_forward(self, F, x):
        return self.output(self.norm(self.layer(self.embedding(x))))


@pytest.mark.each_value
@pytest.mark.parametrize("bn", ["local", "sync"])
@pytest.mark.parametrize("hybridize", [None, {"static_alloc": True, "static_shape": True}])
def test_a_trained_network_in_onnx(tmp_path, arrays, bn, hybridize):
    """On two devices, compiled or not: the running statistics are those that `evaluate` uses; the batch may have another size."""
    pytest.importorskip("onnx")
    ctx = [mx.cpu(0), mx.cpu(1)]
    net = small_net(ctx, normalize=True, hybridize=hybridize)
    net(as_array(images(2), ctx[1]))
    is_compiled = bool(hybridize) and bn == "local"
    trained(mgpu.set_batch_norm(net, bn), is_compiled)
    exported = mgpu.export(net, tmp_path / "new" / "net.onnx", images(4))
    assert exported.difference < 1e-5 and exported.inputs == {"data": ("batch", 1, 6, 6)}
    expected = mgpu.predict(net, [images(9)])
    (found,) = run_onnx(exported.files[0], images(9))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert np.ptp(expected, axis=0).max() > 0.01
    trained(net, is_compiled)  # it still trains, as what it was


@pytest.mark.parametrize("kind", ["rnn_relu", "rnn_tanh", "lstm", "gru"])
@pytest.mark.parametrize("num_layers", [1, 2, 3])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("layout", ["TNC", "NTC"])
@pytest.mark.parametrize("states", [False, True])
@pytest.mark.pairwise
def test_recurrent_layers_in_onnx(tmp_path, kind, num_layers, bidirectional, layout, states):
    """Stacked and in both directions; batch and steps may have other sizes, and states are inputs and outputs."""
    pytest.importorskip("onnx")
    options = {"activation": kind[4:]} if kind.startswith("rnn") else {}
    make = {"lstm": rnn.LSTM, "gru": rnn.GRU}.get(kind, rnn.RNN)
    net = initialized(make(5, num_layers, layout=layout, bidirectional=bidirectional, dropout=0.2, **options))
    rng = np.random.RandomState(0)

    def batch(number, steps):
        shape = (number, steps, 6) if layout == "NTC" else (steps, number, 6)
        begins = [
            rng.normal(size=(num_layers * (1 + bidirectional), number, 5)).astype("float32") for _ in range(1 + (kind == "lstm"))
        ]
        return (rng.normal(size=shape).astype("float32"), begins) if states else (rng.normal(size=shape).astype("float32"),)

    axes = None
    if states:  # their batch is the second axis
        names = [f"data{i}" for i in range(1, 2 + (kind == "lstm"))]
        axes = [[("data0", int(layout == "TNC")), *((name, 1) for name in names)], [("data0", int(layout == "NTC"))]]
    exported = mgpu.export(net, tmp_path / "net.onnx", batch(4, 3), dynamic_axes=axes)
    data, *begins = batch(2, 7)
    expected = net(mx.nd.array(data), *([[mx.nd.array(one) for one in begins[0]]] if states else []))
    expected = [expected[0], *expected[1]] if states else [expected]
    found = run_onnx(exported.files[0], data, *(begins[0] if states else []))
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        np.testing.assert_allclose(one, other.asnumpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("net", "shape"),
    [
        (stack(nn.Conv2D(3, 3), nn.BatchNorm(), nn.Dense(4), kind=nn.Sequential), (2, 1, 6, 6)),
        (stack(nn.Conv1D(4, 3), nn.MaxPool1D(2), nn.GroupNorm(2), nn.InstanceNorm()), (2, 3, 11)),
        (nn.GELU(), (2, 5)),
        (nn.HybridLambda(lambda F, x: F.contrib.AdaptiveAvgPooling2D(x, output_size=(3, 2))), (2, 3, 7, 5)),
        (nn.HybridLambda(lambda F, x: F.contrib.AdaptiveAvgPooling2D(F.split(x, 3)[1], output_size=4)), (2, 3, 6, 3)),
        (nn.HybridLambda(lambda F, x: F.contrib.AdaptiveAvgPooling2D(x)), (2, 3, 7, 5)),
        (stack(nn.Conv2DTranspose(4, 4, 2, 1), nn.PReLU(), nn.GlobalMaxPool2D()), (2, 3, 5, 5)),
    ],
)
def test_other_layers(tmp_path, net, shape):
    """Of one dimension, for groups, in a `Sequential` that is not hybrid, without parameters."""
    pytest.importorskip("onnx")
    assert mgpu.export(initialized(net), tmp_path / "net.onnx", np.random.normal(size=shape)).difference < 1e-5
    X = np.random.normal(size=(5, *shape[1:])).astype("float32")
    np.testing.assert_allclose(run_onnx(tmp_path / "net.onnx", X)[0], net(mx.nd.array(X)).asnumpy(), rtol=1e-4, atol=1e-5)


IMAGES = [[("data", 0)], [("data", 2)], [("data", 3)]]


@pytest.mark.parametrize(
    "net",
    [
        stack(nn.Conv2D(4, 3, 2, 1), nn.HybridLambda(lambda F, x: F.contrib.AdaptiveAvgPooling2D(x))),
        with_prefix(nn.Conv2D, "합성곱_", channels=4, kernel_size=3, strides=2, padding=1),
    ],
)
def test_images_of_any_size(tmp_path, net):
    pytest.importorskip("onnxruntime")
    path = tmp_path / "net.onnx"
    sizes = mgpu.export(initialized(net), path, np.random.normal(size=(2, 3, 15, 15)), dynamic_axes=IMAGES).inputs["data"]
    assert [isinstance(one, str) for one in sizes] == [True, False, True, True]
    X = np.random.normal(size=(1, 3, 31, 31)).astype("float32")
    np.testing.assert_allclose(run_onnx(path, X)[0], net(mx.nd.array(X)).asnumpy(), rtol=1e-4, atol=1e-5)


def test_a_file_for_one_image_size(tmp_path):
    """Its network takes others: one size more than the sample's may not show that the file does not."""
    pytest.importorskip("onnxruntime", minversion="1.22")  # earlier ones computed the window that begins behind the image
    with pytest.raises(TrainerError, match="dynamic_axes"):
        mgpu.export(nn.MaxPool2D(3, 3, 1, ceil_mode=True), tmp_path / "net.onnx", np.ones((2, 3, 15, 15)), dynamic_axes=IMAGES)


class Fixed(nn.HybridBlock):
    def hybrid_forward(self, F, x):
        return F.reshape(x, shape=(2, -1)) + F.ones((2, 3))


class Reshaped(nn.HybridBlock):
    """MXNet computes it for other sizes, from memory that is not the array's."""

    def hybrid_forward(self, F, x):
        return F.reshape(x, shape=(2, 3))


@pytest.mark.parametrize("net", [Fixed, Reshaped])
def test_a_network_for_one_batch_size(tmp_path, caplog, net):
    """Its file takes that size only, and a warning says so. Axes that were asked for raise, also one of several."""
    pytest.importorskip("onnx")
    with caplog.at_level(logging.WARNING, "gluon_mgpu"):
        exported = mgpu.export(net(), tmp_path / "net.onnx", np.zeros((2, 3), "float32"), check=False)
    assert exported.inputs == {"data": (2, 3)} and "fixed sizes" in caplog.text
    for axes in ([[("data", 0)]], [[("data", 1)], [("data", 0)]], [[]]):
        with pytest.raises(TrainerError, match="dynamic_axes"):
            mgpu.export(net(), tmp_path / "axes.onnx", np.zeros((2, 3), "float32"), check=False, dynamic_axes=axes)


ZOO = ("resnet18_v1", "resnet50_v2", "vgg11_bn", "alexnet", "densenet121", "squeezenet1.0", "inceptionv3", "mobilenetv2_0.5")


def patches(seed, number, size):
    """Images of coloured patches with noise: noise alone looks alike to a network."""
    rng = np.random.RandomState(seed)
    colours = np.kron(rng.normal(size=(number, 3, 7, 7)), np.ones((1, 1, size // 7 + 1, size // 7 + 1)))[:, :, :size, :size]
    return (colours + rng.normal(0, 0.3, colours.shape)).astype("float32")


def zoo_network(name, size):
    """A network with random weights and running statistics, whose output depends on its input."""
    rng = np.random.RandomState(0)
    mx.random.seed(0)
    net = vision.get_model(name)
    net.initialize(mx.init.Xavier(rnd_type="gaussian", factor_type="in", magnitude=2))  # keeps the size of relu's outputs
    layers = [block for block in blocks_of(net) if isinstance(block, nn.BatchNorm)]
    for layer in layers:
        batch_norm_options(layer)["momentum"] = 0.0  # the statistics become those of this batch
    with autograd.record():
        net(mx.nd.array(patches(2, 4, size))).wait_to_read()
    mx.nd.waitall()
    for layer in layers:
        for param in (layer.gamma, layer.running_var, layer.running_mean):
            param.set_data(param.data() * mx.nd.array(rng.uniform(0.7, 1.3, param.shape)))
        layer.beta.set_data(mx.nd.array(rng.normal(0, 0.2, layer.beta.shape)))
    return net


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("mobilenet0.25", 64),
        *(pytest.param(name, 299 if name == "inceptionv3" else 224, marks=pytest.mark.exhaustive) for name in ZOO),
    ],
)
def test_networks_of_the_model_zoo(tmp_path, name, size):
    """Also for another batch size than the sample's. The images' outputs differ, so that a constant one would be seen."""
    pytest.importorskip("onnx")
    net, X = zoo_network(name, size), patches(1, 3, size)
    mgpu.export(net, tmp_path / "net.onnx", X[:2])
    expected = net(mx.nd.array(X)).asnumpy()
    (found,) = run_onnx(tmp_path / "net.onnx", X)
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max() < np.ptp(expected, axis=0).max()


PLAIN = """
import sys
if sys.version_info >= (3, 12):
    import setuptools  # brings distutils, which Python 3.12 dropped
import numpy as np
if np.lib.NumpyVersion(np.__version__) >= "2.0.0":
    import gluon_mgpu  # restores more names
else:
    np.bool, np.object, np.float, np.int, np.complex = bool, object, float, int, complex  # for NumPy 1.24 and later
import mxnet as mx
from mxnet.gluon import SymbolBlock, nn
folder = sys.argv[1]
X = mx.nd.load(folder + "/X")[0]
net = SymbolBlock.imports(folder + "/net-symbol.json", ["data"], folder + "/net-0000.params")
again = nn.HybridSequential()
again.add(nn.Conv2D(4, kernel_size=3, padding=1), nn.Activation("tanh"), nn.BatchNorm(), nn.MaxPool2D(2), nn.Flatten())
again.add(nn.Dense(8, activation="tanh"), nn.Dense(3))
again.load_parameters(folder + "/checkpoint/net.params")
mx.nd.save(folder + "/Y", [net(X), again(X)])
assert not {name for name in sys.modules if name.startswith("gluon_mgpu.trainer")}
"""


def test_plain_mxnet_reads_both(tmp_path):
    """The symbol files, and the parameters in a checkpoint, in a process without this package."""
    net = small_net([mx.cpu(0), mx.cpu(1)], normalize=True)
    trained(mgpu.set_batch_norm(net, "sync"))
    mgpu.save_checkpoint(net, tmp_path / "checkpoint")
    exported = mgpu.export(net, tmp_path / "net", images(5))
    assert exported.difference < 1e-6 and [one.name for one in exported.files] == ["net-symbol.json", "net-0000.params"]
    mx.nd.save(str(tmp_path / "X"), [mx.nd.array(images(3))])
    site = str(Path(mx.__file__).parent.parent)
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), site]))
    command = [sys.executable, "-S", "-W", "ignore", "-c", PLAIN, str(tmp_path)]  # -S: without the import hook
    subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=True, timeout=120)
    for found in mx.nd.load(str(tmp_path / "Y")):
        np.testing.assert_allclose(found.asnumpy(), mgpu.predict(net, [images(3)]), rtol=1e-4, atol=1e-6)


@pytest.fixture
def np_mode():
    mx.npx.set_np()
    yield
    mx.npx.reset_np()


@pytest.mark.usefixtures("np_mode")
def test_symbol_files_for_np_arrays(tmp_path):
    """Also of a recurrent layer in another block, which MXNet itself cannot run as a graph of np arrays."""
    net = initialized(Tagger(rnn.GRU(5, layout="NTC", bidirectional=True)))
    X, other = np.random.randint(0, 9, (3, 4)).astype("int32"), mx.np.array(np.random.randint(0, 9, (2, 6)), dtype="int32")
    block = imported(mgpu.export(net, tmp_path / "net", X).files, ["data"])
    np.testing.assert_allclose(block(other).asnumpy(), net(other).asnumpy(), rtol=1e-4, atol=1e-6)
    if "onnx" in sys.modules:
        mgpu.export(net, tmp_path / "net.onnx", X)
        np.testing.assert_allclose(
            run_onnx(tmp_path / "net.onnx", other.asnumpy())[0], net(other).asnumpy(), rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize("path", ["net.onnx", "net"])
def test_a_file_that_differs_is_not_left_behind(tmp_path, path):
    """An existing file stays, and so it does on Ctrl-C."""
    pytest.importorskip("onnx")
    net = initialized(nn.HybridSequential())
    net.add(nn.Dense(64, activation="tanh"), nn.LayerNorm(), nn.Dense(9))
    net.initialize()
    X = np.random.rand(5, 33).astype("float32")
    mgpu.export(net, tmp_path / path, X)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    net[0].weight.set_data(net[0].weight.data() * 2)
    with pytest.MonkeyPatch.context() as patch:
        found = [np.full((5, 9), np.nan)]
        patch.setattr("gluon_mgpu.exporters.export.run_onnx", lambda *args: [found])
        patch.setattr("gluon_mgpu.exporters.export.run_symbol", lambda *args: [found])
        with pytest.raises(TrainerError, match="expected at most 0.0001"):
            mgpu.export(net, tmp_path / path, X)
        for name in ("run_onnx", "run_symbol"):
            patch.setattr(f"gluon_mgpu.exporters.export.{name}", interrupt)
        with pytest.raises(KeyboardInterrupt):
            mgpu.export(net, tmp_path / path, X)
    assert before == {file.name: file.read_bytes() for file in tmp_path.iterdir()}


def interrupt(*args):
    raise KeyboardInterrupt


@pytest.mark.parametrize("sample", [np.zeros((2, 4)), np.ones((2, 4), "float32"), np.eye(2, 4)], ids=["zeros", "ones", "eye"])
def test_random_values_are_compared_too(tmp_path, monkeypatch, sample):
    """Files that are right for 0 and 1. No global generator moves."""
    pytest.importorskip("onnx")
    net = nn.HybridLambda(lambda F, x: F.square(x))
    mgpu.export(net, tmp_path / "net.onnx", sample)
    mx.random.seed(0)
    drawn, state = mx.nd.random.uniform(shape=4).asnumpy(), np.random.get_state()[1].copy()
    mx.random.seed(0)
    monkeypatch.setitem(OPERATORS, "square", lambda operator: operator.end("Abs", *operator.inputs))
    with pytest.raises(TrainerError, match="differ from the network's"):
        mgpu.export(net, tmp_path / "wrong.onnx", sample)
    assert not (tmp_path / "wrong.onnx").exists()
    assert np.array_equal(np.random.get_state()[1], state) and np.array_equal(mx.nd.random.uniform(shape=4).asnumpy(), drawn)


def test_random_values_are_compared_of_symbol_files(tmp_path, monkeypatch):
    def doubled(file, named, **options):
        write_params(file, {name: 2 * value for name, value in named.items()}, **options)

    monkeypatch.setattr("gluon_mgpu.exporters.symbol_files.write_params", doubled)
    with pytest.raises(TrainerError, match="differ from the network's"):
        mgpu.export(initialized(nn.Dense(3)), tmp_path / "net", np.zeros((2, 4), "float32"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "function, sample",
    [
        (lambda F, x, i: F.gather_nd(x, i), (images(2)[:, 0, 0], np.zeros((2, 3), "float32"))),
        (lambda F, x, i: F.SequenceLast(x, i, use_sequence_length=True), (images(5)[:, 0], np.full(6, 2, "float32"))),
        (lambda F, x, i: F.take(x, i), (images(5)[:, 0, 0], np.int32([4, 1]))),
        (lambda F, x: F.log(x) + F.sqrt(x), np.ones((2, 3), "float32")),
        (lambda F, x: F.sqrt(x), np.zeros((2, 3), "float32")),
    ],
    ids=["indices", "lengths", "integers", "ones", "zeros"],
)
def test_random_values_are_some_that_the_network_accepts(tmp_path, caplog, function, sample):
    pytest.importorskip("onnx")
    mgpu.export(nn.HybridLambda(function), tmp_path / "net.onnx", sample)
    assert "only the sample" not in caplog.text


def test_a_network_that_rejects_random_values(tmp_path, caplog):
    net = nn.HybridLambda(lambda F, x: F.log(F.slice_axis(x, axis=1, begin=1, end=2) - F.slice_axis(x, axis=1, begin=0, end=1)))
    assert mgpu.export(net, tmp_path / "net", np.tile(np.float32([0, 1]), (9, 1))).difference == 0
    assert "only the sample is compared" in caplog.text


class Python(nn.HybridBlock):
    def hybrid_forward(self, F, x):
        return x * float(x.asnumpy().sum())


def pipeline():
    return mgpu.Pipeline([initialized(nn.Dense(2, in_units=3)), initialized(nn.Dense(2, in_units=2))], [mx.cpu(0), mx.cpu(1)])


X = np.ones((2, 3), "float32")


@pytest.mark.parametrize(
    "arguments",
    [
        (initialized(nn.Dense(2)), "net.txt", X),
        (initialized(nn.Dense(2)), "net.onnx", "images"),
        (initialized(nn.Dense(2, in_units=4)), "net.onnx", X),
        (Python(), "net.onnx", X),
        (pipeline(), "net", X),
        (initialized(mgpu.models.Seq2Seq(10, 12, embed_size=4, hidden_size=4)), "net.onnx", X),
    ],
)
def test_unsuited_arguments(tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TrainerError):
        mgpu.export(*arguments)
    assert not list(tmp_path.iterdir())


def test_mixed_precision_exports_in_float32(tmp_path, monkeypatch):
    """On any processor: the network does not run in bfloat16 here."""
    monkeypatch.setattr("gluon_mgpu.trainer.precision.can_compute_bf16", lambda: True)
    net = initialized(nn.Dense(3, in_units=4))
    mgpu.set_precision(net, "bf16")
    assert mgpu.export(net, tmp_path / "net", np.random.rand(2, 4).astype("float32")).difference < 1e-6
    exported = mgpu.export(net, tmp_path / "other", np.random.rand(2, 4).astype("float32"), check=False)
    assert exported.difference is None and exported.files[0].exists()


TRANSLATORS = [
    {"cell": "gru", "attention": "dot", "num_layers": 1},
    {"cell": "lstm", "attention": "additive", "num_layers": 2, "tied": True},
]


def translator(kind="words", **options):
    vocabularies = [mgpu.data.build_vocabulary(side, kind) for side in WORDS]
    made = mgpu.models.Translator(*vocabularies, embed_size=8, hidden_size=8, **options)
    made.net.initialize(mx.init.Uniform(2.0), ctx=[mx.cpu(0)])
    return made


@pytest.mark.parametrize("options", TRANSLATORS)
def test_a_translator_in_onnx_runtime(tmp_path, options):
    """Greedy translations are those of MXNet, alone and in a batch."""
    pytest.importorskip("onnxruntime")
    made = translator(**options)
    exported = mgpu.export(made, tmp_path / "model")
    assert exported.difference < 1e-5 and {one.name for one in exported.files} == set(os.listdir(tmp_path / "model"))
    texts = [*WORDS[0], "", "하나 넷, 일곱!", "모르는 말 셋"]
    expected = made.best(texts)
    assert len(set(expected)) >= 3
    other = onnx_translator.OnnxTranslator(tmp_path / "model")
    assert other.translate(texts) == expected == [other.translate([text])[0] for text in texts]


def test_the_program_translates_alone(tmp_path):
    """In a process without MXNet."""
    pytest.importorskip("onnxruntime")
    made = translator("characters")
    mgpu.export(made, tmp_path / "model")
    text = "import sys, runpy; sys.modules['mxnet'] = sys.modules['gluon_mgpu'] = None; sys.argv = sys.argv[1:]; runpy.run_path("
    start = f"{text}sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-c", start, str(tmp_path / "model" / "translate.py"), *WORDS[0]]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, check=True, timeout=120, env={**os.environ, "PYTHONIOENCODING": "utf-8"}
    )
    assert done.stdout.decode().splitlines() == made.best(list(WORDS[0]))
    shown = subprocess.run([sys.executable, *command[3:4], "--help"], stdout=subprocess.PIPE, check=True, timeout=120)
    assert shown.stdout.startswith(b"Translate with the ONNX files of a translator.")  # and not a translation of --help


TEXTS = [*WORDS[0], *WORDS[1], 'a-b, c! "d"'] * 3
OURS = [mgpu.data.build_vocabulary(TEXTS, kind, size=60) for kind in ("words", "characters", "subwords")]


@given(text=st.one_of(st.text(max_size=20), st.text('ab, -!"\t가▁\u1112\u1161', max_size=20)))
def test_its_vocabularies_are_ours(text):
    for ours in OURS:
        theirs, numbers = onnx_translator.Vocabulary(ours._model), ours.encode(text)
        assert theirs.encode(text) == numbers and theirs.decode(numbers) == ours.decode(numbers)


def test_the_command_exports_a_translator(tmp_path):
    pytest.importorskip("onnxruntime")
    made = translator()
    made.save(tmp_path / "run" / "best")
    done = CliRunner().invoke(main, ["export", str(tmp_path / "run"), "--onnx", str(tmp_path / "onnx")])
    assert done.exit_code == 0 and done.output.count("largest difference") == 1, done.output
    assert onnx_translator.OnnxTranslator(tmp_path / "onnx").translate(WORDS[0]) == made.best(WORDS[0])
    wrong = CliRunner().invoke(main, ["export", str(tmp_path / "run"), "--onnx", str(tmp_path)])
    assert wrong.exit_code == 1 and "holds" in wrong.output
    symbol = CliRunner().invoke(main, ["export", str(tmp_path / "run"), "--symbol", str(tmp_path / "model")])
    assert symbol.exit_code == 2 and "for a translator" in symbol.output


def small_classifier(num_classes):
    return stack(nn.Conv2D(4, 3, strides=2, padding=1), nn.BatchNorm(), nn.GlobalAvgPool2D(), nn.Dense(num_classes))


def test_the_command_exports_a_classifier(tmp_path, monkeypatch):
    """Its images may have any size; the classes and channels are read from the checkpoint."""
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr("gluon_mgpu.models.resnet18", small_classifier)
    net = initialized(small_classifier(4), 0.1)
    net(mx.nd.array(images(2, 3, 16)))
    mgpu.save_checkpoint(net, tmp_path / "run" / "best")
    done = CliRunner().invoke(main, ["export", str(tmp_path / "run"), "--onnx", str(tmp_path / "net.onnx")])
    assert done.exit_code == 0 and "largest difference" in done.output, done.output
    (found,) = run_onnx(tmp_path / "net.onnx", images(3, 3, 8))
    expected = net(mx.nd.array(images(3, 3, 8))).asnumpy()
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5 * np.abs(expected).max())

"""Error messages and their entries: as MXNet and others print them, as this machine provokes them, and on the command line."""

import re
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
from gluon_mgpu.known_errors import entries, explain_message, last_error
from gluon_mgpu.mxnet_internals.versions import is_mxnet2
from mxnet import MXNetError, autograd, gluon
from mxnet.gluon import nn

from .conftest import initialized, stack
from .versions import HybridBlock, nd

ROOT = Path(__file__).parent.parent
HANGUL = re.compile("[가-힣]")
NO_FILE = "cannot open shared object file: No such file or directory"

PRINTED = [  # messages as MXNet, CUDA, Python and others print them, each with its entry
    ("numpy-removed-names", "AttributeError: module 'numpy' has no attribute 'bool'."),
    ("numpy-2", "A module that was compiled using NumPy 1.x cannot be run in NumPy 2.0.1 as it may crash."),
    ("no-mxnet", "ModuleNotFoundError: No module named 'mxnet'"),
    ("libcuda-missing", f"OSError: libcuda.so.1: {NO_FILE}"),
    ("d2l-version", "AttributeError: module 'd2l.mxnet' has no attribute 'train_ch3'"),
    ("gpu-out-of-memory", "src/storage/./pooled_storage_manager.h:161: cudaMalloc retry failed: out of memory"),
    ("no-kernel-image", "vs. 0) : Name: mxnet_generic_kernel ErrStr:no kernel image is available for execution on the device"),
    (
        "nvrtc",
        "compileResult == NVRTC_SUCCESS (5 vs. 0) : NVRTC Compilation failed. Please set environment variable",
    ),
    ("nvrtc", "CUDA_ERROR_UNSUPPORTED_PTX_VERSION: the provided PTX was compiled with an unsupported toolchain."),
    ("cuda-after-fork", "src/storage/./pooled_storage_manager.h:84: CUDA: initialization error"),
    ("mixed-devices", "== default_ctx (gpu(0) vs. gpu(1)) CachedOp requires all inputs to live on the same context. But data"),
    ("function-saves-weight", '  File "train.py", line 12, in forward\n    self.save_for_backward(weight)'),
    ("no-step", "gluon_mgpu: no step for 120.3 s, after 0"),
    ("names-collide", "Cannot update self with other because they have different Parameters with the same name conv0"),
    ("shared-memory", "RuntimeError: DataLoader worker (pid 13) is killed by signal: Bus error."),
    ("horovod-not-built", "ImportError: Extension horovod.mxnet has not been built."),
    ("host-out-of-memory", "src/storage/./cpu_device_storage.h:75: Failed to allocate CPU Memory"),
    ("loss-not-finite", "gluon_mgpu.errors.NonFiniteLossError: fit: got a loss of nan at step 1 on cpu(0); expected finite"),
]

FOREIGN = ["", "KeyError", "KeyError: 'learning_rate'", "the process was killed by the wolf", "Epoch 3: loss 0.3, accuracy 0.9"]
FOREIGN += ["AssertionError: expected 3 invoices, got 2", "ValueError: invalid literal for int() with base 10: '12a'"]
FOREIGN += ["subprocess.CalledProcessError: Command 'make' returned non-zero exit status 2"]


def anchors(path):
    """The anchors that GitHub gives a page's headings: lower case, without punctuation, hyphens for spaces."""
    prose = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def first(text):
    return next((entry.name for entry in explain_message(text)), None)


# The entries


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_an_entry_is_complete_in_both_languages(entry):
    assert entry.has and len(entry.todo) == len(entry.todo_ko) >= 1
    for text in (entry.why, *entry.todo):
        assert not HANGUL.search(text) and re.search(r"[.`]$", text), text
        assert all(len(re.sub("`[^`]*`", "code", one).split()) <= 25 for one in re.split(r"(?<=[.:;?]) ", text)), text
    for text in (entry.why_ko, *entry.todo_ko):
        assert HANGUL.search(text) and re.search(r"(니다|세요)\.$|`$", re.sub(r"\)$", "", text)), text
    commands = [re.findall("`([^`]*)`", " ".join((why, *todo))) for why, todo in [entry[3:5], entry[5:7]]]
    assert set(commands[0]) == set(commands[1])
    page, _, anchor = entry.see.partition("#")
    assert (
        page.startswith("https://")
        or (not anchor and (ROOT / "docs" / page).is_file())
        or anchor in anchors(ROOT / "docs" / page)
    )


def test_each_fragment_finds_its_entry():
    wrong = []
    for entry in entries():
        for fragment in entry.has:
            line = fragment.strip("|").replace("…", " x ")
            wrong += [(entry.name, fragment, first(line))] if first(line) != entry.name else []
    assert not wrong


# Messages


def test_printed_messages_have_their_entry_first():
    assert not [(name, first(text), text) for name, text in PRINTED if first(text) != name]


@pytest.mark.parametrize("text", FOREIGN)
def test_foreign_messages_have_no_entry(text):
    assert explain_message(text) == []


def test_the_last_error_of_a_log_comes_first():
    log = "\n".join(text for _, text in PRINTED[:2]) + "\nepoch 3\nBus error (core dumped)\n" + PRINTED[0][1] + "\n"
    assert [entry.name for entry in explain_message(log)] == ["numpy-removed-names", "shared-memory", "numpy-2"]


@pytest.mark.parametrize(
    "text, line",
    [
        ("Traceback (most recent call last):\n  File 'a.py', line 1\nKeyError: 'a'\nsome more\n", "KeyError: 'a'"),
        ("a.b.OddError: x\nc.OtherException: y", "c.OtherException: y"),
        ("first\nlast\n\n", "last"),
        ("", ""),
    ],
)
def test_the_line_that_names_the_error_is_found(text, line):
    assert last_error(text) == line


# Messages that this machine provokes


def dense(units=3, in_units=2, **options):
    net = nn.Dense(units, in_units=in_units)
    net.initialize(**options)
    return net


def forward(net, *shape):
    net(nd.ones(shape)).wait_to_read()


class Lambda(HybridBlock):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.hybridize()

    def compute(self, F, *args):
        return self.function(F, *args)


def two_passes(net, first, second):
    with autograd.record():
        losses = [net(nd.ones((2, 2))), net(nd.ones((2, 2)))]
    losses[first].backward()
    losses[second].backward()


def unused_layer():
    net = stack(dense(), dense(), kind=nn.Sequential)
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    with autograd.record():
        y = net[0](nd.ones((1, 2)))
    y.backward()
    trainer.step(1)


messages = pytest.mark.mxnet1("messages of MXNet")
PROVOKED = [
    ("parameter-not-initialized", lambda: forward(nn.Dense(3, in_units=2), 1, 2)),
    pytest.param("not-initialized-on-context", lambda: forward(dense(ctx=mx.cpu(1)), 1, 2), marks=messages),
    ("deferred-initialization", lambda: dense(in_units=0).weight.data()),
    ("shape-inconsistent", lambda: forward(dense(), 1, 5)),
    ("image-axes", lambda: forward(initialized(nn.Conv2D(3, 3)), 8, 8, 3)),
    ("image-axes", lambda: forward(initialized(nn.Conv2D(3, 3, in_channels=1)), 8, 8, 3)),
    pytest.param("image-channels", lambda: forward(initialized(nn.Conv2D(3, 3, in_channels=1)), 2, 3, 8, 8), marks=messages),
    ("image-too-small", lambda: forward(initialized(nn.Conv2D(3, 7)), 2, 3, 5, 5)),
    ("one-hot-labels", lambda: gluon.loss.SoftmaxCELoss()(nd.ones((4, 10)), nd.ones((4, 10)))),
    ("rnn-axes", lambda: forward(initialized(gluon.rnn.LSTM(3)), 4, 5)),
    ("metric-shapes", lambda: (gluon if is_mxnet2() else mx).metric.Accuracy().update([nd.ones((2,))], [nd.ones((3, 2))])),
    ("cannot-differentiate", lambda: (nd.ones((1,)) * 2).backward()),
    ("any-container-empty", lambda: two_passes(initialized(nn.BatchNorm(in_channels=2)), 0, 1)),
    ("stale-gradient", unused_layer),
    ("trainer-parameters", lambda: gluon.Trainer(dense(), "sgd")),
    pytest.param("legacy-and-np-arrays", lambda: dense()(mx.np.ones((1, 2))), marks=messages),
    pytest.param("input-not-ndarray", lambda: dense()(np.ones((1, 2))), marks=messages),
    pytest.param(
        "symbol-in-hybrid-network", lambda: Lambda(lambda F, x: x.reshape((x.shape[0], -1)))(nd.ones((1,))), marks=messages
    ),
    ("children-must-be-hybrid", lambda: nn.HybridSequential().add(nn.Sequential())),
    ("uneven-split", lambda: gluon.utils.split_and_load(nd.ones((5, 2)), [mx.cpu(0), mx.cpu(1)])),
    ("device-missing", lambda: mgpu.devices.resolve_devices("tpu")),
]


@pytest.mark.parametrize("name, provoke", PROVOKED)
def test_a_provoked_message_has_its_entry_first(name, provoke):
    with pytest.raises((Exception, Warning)) as caught:
        provoke()
    assert first(f"{caught.type.__name__}: {caught.value}") == name


# The command


def explain(*arguments, **options):
    return CliRunner().invoke(main, ["explain", *arguments], prog_name="gluon-mgpu", **options)


def test_the_command_prints_the_remedies_in_their_order_and_a_page():
    entry = next(entry for entry in entries() if entry.name == "numpy-removed-names")
    shown = explain(PRINTED[0][1]).output.splitlines()
    assert shown[0] == entry.name and entry.why in shown[1] and entry.see in shown[-1]
    assert shown[3:-1] == [f"  {i}. {text}" for i, text in enumerate(entry.todo, 1)]
    assert explain(entry.name).output.splitlines() == shown


@pytest.mark.parametrize(
    "arguments, environment, korean",
    [
        ((), {"LC_ALL": "ko_KR.UTF-8"}, True),
        ((), {"LC_ALL": "", "LC_MESSAGES": "", "LANG": "ko_KR.UTF-8"}, True),
        ((), {"LC_ALL": "C.UTF-8", "LANG": "ko_KR.UTF-8"}, False),
        (("--language", "ko"), {"LC_ALL": "C.UTF-8"}, True),
        (("--language", "en"), {"LC_ALL": "ko_KR.UTF-8"}, False),
    ],
)
@pytest.mark.parametrize("text", ["Too many open files", "hello world"])
def test_the_locale_chooses_the_language(arguments, environment, korean, text):
    assert bool(HANGUL.search(explain(*arguments, text, env=environment).output)) == korean


def test_the_command_reads_a_log():
    result = explain("-", input="Traceback (most recent call last):\nOSError: [Errno 24] Too many open files\nbye\n")
    assert result.exit_code == 0 and result.output.startswith("too-many-open-files\n")


@pytest.mark.parametrize("arguments, options", [(["KeyError: 3"], {}), (["-"], {"input": "Traceback\nKeyError: 3\n"})])
def test_without_an_entry_the_command_names_the_line_and_where_to_ask(arguments, options):
    result = explain(*arguments, **options)
    assert result.exit_code == 1
    for text in ("KeyError: 3", "https://github.com/apache/mxnet/issues", "gluon-mgpu doctor", "docs/troubleshooting.md"):
        assert text in result.output


def run(code, *arguments, **options):
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=str(ROOT), stderr=subprocess.PIPE, timeout=60, **options)


def test_the_entries_need_neither_mxnet_nor_numpy():
    code = """
import runpy, sys
sys.modules.update(mxnet=None, numpy=None, click=None)
module = runpy.run_path("gluon_mgpu/known_errors.py")
assert not module["entries"].cache_info().misses  # the file is read for the first error
print(*[entry.name for entry in module["explain_message"]("No module named 'mxnet'")])
"""
    done = run(code, stdout=subprocess.PIPE)
    assert done.stdout.decode().split() == ["no-mxnet"], done.stderr


@messages
@pytest.mark.parametrize("wrapped", [False, True])
def test_an_error_of_mxnet_ends_with_the_hint(wrapped):
    @click.group(cls=CommandGroup)
    def group():
        pass

    @group.command()
    def fail():
        try:
            nd.dot(nd.ones((2, 3)), nd.ones((2, 3))).wait_to_read()
        except MXNetError as error:
            if wrapped:
                raise mgpu.errors.StepError("train_batch: got an error; expected none. Try one example.") from error
            raise

    result = CliRunner().invoke(group, ["fail"])
    assert result.exit_code == 1 and len(result.output.splitlines()) == 1
    assert result.output.endswith("explained by: gluon-mgpu explain dot-shapes\n")

"""Error messages and their entries: as users reported them, and on the command line."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import click
import gluon_mgpu as mgpu
import pytest
from click.testing import CliRunner
from gluon_mgpu.cli import main
from gluon_mgpu.cli.main import CommandGroup
from gluon_mgpu.explain import ENTRIES, explain_message
from mxnet import MXNetError, nd

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


def test_the_answer_shows_the_message_that_fits():
    shown = explain("OSError: libgfortran.so.3: cannot open shared object file").output.splitlines()[1]
    assert shown == "  message: libgfortran.so.…: cannot open shared object file"


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
    result = explain("-", input="Traceback (most recent call last):\nOSError: [Errno 24] Too many open files\n")
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


def test_the_name_of_a_file_gets_the_command_that_reads_it(tmp_path):
    path = tmp_path / "train log.txt"
    path.write_text("all is well")
    result = explain(str(path))
    assert result.exit_code == 1 and f"gluon-mgpu explain - < '{path}'" in result.output


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
            nd.dot(nd.ones((2, 3)), nd.ones((2, 3))).wait_to_read()
        except MXNetError as error:
            if wrapped:
                raise mgpu.errors.StepError(
                    "train_batch: got an error of the network; expected none. Try one example."
                ) from error
            raise

    result = CliRunner().invoke(group, ["fail"])
    assert result.exit_code == 1
    assert result.output.endswith("explained by: gluon-mgpu explain dot-shapes\n")
    assert len(result.output.splitlines()) == 1

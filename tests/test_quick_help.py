"""`gluon-mgpu --help` is shown without MXNet, and is that of the commands; Ctrl-C during the imports ends quietly."""

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import gluon_mgpu as mgpu
import pytest
from click.testing import CliRunner
from gluon_mgpu.cli import main

from gluon_mgpu_startup.quick_help import FILE, quick_help

ROOT = Path(__file__).parent.parent
WRITTEN = json.loads(Path(FILE).read_text(encoding="utf-8"))
NAMES = list(WRITTEN["commands"])


def of_this_click():
    return WRITTEN["click"].split(".")[:2] == version("click").split(".")[:2]


@pytest.mark.skipif(not of_this_click(), reason="another click formats options in another way")
def test_the_file_is_that_of_the_commands():
    made = runpy.run_path(str(ROOT / "scripts" / "command_help.py"))["text"]()
    assert json.loads(made)["commands"] == WRITTEN["commands"], "run python scripts/command_help.py"


@pytest.mark.skipif(not of_this_click(), reason="another click formats options in another way")
@pytest.mark.parametrize("width", [60, 80, 120])
def test_it_is_what_the_commands_print(width):
    groups = {name for name in NAMES if any(other.rpartition(" ")[0] == name for other in NAMES if other)}
    assert groups == {"", "bench", "predict", "train"}
    fresh = runpy.run_path(str(ROOT / "scripts" / "command_help.py"))["fresh"](main)
    for name in NAMES:
        for arguments in ([*name.split(), "--help"], [*name.split(), "-h"], *([name.split()] if name in groups else [])):
            quick, slow = (
                CliRunner().invoke(command, arguments, prog_name="gluon-mgpu", terminal_width=width)
                for command in (quick_help(arguments), fresh)
            )
            assert (quick.output, quick.exit_code) == (slow.output, slow.exit_code), arguments


def test_it_answers_nothing_else():
    for line in (
        "train resnet18",
        "devices --json",
        "train resnet18 --epochs 1 --help",
        "launch -n 2 true --help",
        "trian",
        "devices --version",
    ):
        assert quick_help(line.split()) is None, line
    said = [CliRunner().invoke(one, ["--version"], prog_name="gluon-mgpu").output for one in (quick_help(["--version"]), main)]
    assert said[0] == said[1] == f"gluon-mgpu, version {mgpu.__version__}\n"


def test_it_imports_no_mxnet():
    program = f"""
import sys
from gluon_mgpu_startup.command import main
for name in {NAMES!r}:
    sys.argv = ["gluon-mgpu", *name.split(), "--help"]
    try:
        main()
    except SystemExit as end:
        assert end.code == 0
assert not {{"mxnet", "numpy", "gluon_mgpu"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.count(b"Usage: gluon-mgpu") == len(NAMES)


def test_ctrl_c_during_the_import_of_mxnet_ends_quietly(tmp_path):
    """It printed the traceback of whatever MXNet was importing."""
    (tmp_path / "mxnet").mkdir()
    lines = "import pathlib, time\npathlib.Path(__file__).with_name('started').touch()\ntime.sleep(60)\n"
    (tmp_path / "mxnet" / "__init__.py").write_text(lines)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    started = subprocess.Popen(
        [sys.executable, "-m", "gluon_mgpu_startup.command", "devices"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    while not (tmp_path / "mxnet" / "started").exists():
        assert started.poll() is None
        time.sleep(0.01)
    started.send_signal(signal.SIGINT)
    assert started.communicate(timeout=30) == (b"", b"")
    assert started.returncode == 130

"""The start: little happens with `import gluon_mgpu`, and MXNet comes with the first name that needs it."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import gluon_mgpu as mgpu
import pytest

ROOT = Path(__file__).parent.parent
OUTPUT = {"capture_output": True, "text": True, "timeout": 240}


def run_python(program, **environment):
    done = subprocess.run([sys.executable, "-c", program], env={**os.environ, **environment}, **OUTPUT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_import_sets_defaults_and_leaves_mxnet_to_the_first_use():
    program = """
import os, sys
import gluon_mgpu as mgpu
print(sorted({name.split(".")[1] for name in sys.modules if name.startswith("gluon_mgpu.")}))
print("mxnet" in sys.modules, os.environ["CUDA_DEVICE_ORDER"])
mgpu.errors, mgpu.distributed.this_process(), mgpu.distributed.LaunchError, mgpu.runtime.num_cores()
print("mxnet" in sys.modules)
mgpu.use_devices
print("mxnet" in sys.modules)
"""
    first, *others = run_python(program, CUDA_DEVICE_ORDER="PCI_BUS_ID").splitlines()
    assert first == "['errors', 'interrupts', 'mxnet_internals', 'runtime', 'version']"
    assert others == ["False PCI_BUS_ID", "False", "True"]


def test_every_name_is_there_and_completed():
    assert dir(mgpu) == mgpu.__all__ and len(set(mgpu.__all__)) == len(mgpu.__all__) <= 52
    assert {"fit", "Trainer", "data", "devices", "models"} <= set(mgpu.__all__)
    assert not {"trainer", "environment", "attach_stub", "runtime"} & set(dir(mgpu))
    for name in mgpu.__all__:
        assert getattr(mgpu, name) is not None
    with pytest.raises(AttributeError):
        mgpu.nothere  # noqa: B018


@pytest.mark.parametrize("room", sorted(path.parent.name for path in (ROOT / "gluon_mgpu").glob("*/__init__.pyi")))
def test_every_room_lists_its_names_by_task(room):
    module = importlib.import_module(f"gluon_mgpu.{room}")
    assert dir(module) == module.__all__
    for name in module.__all__:
        assert getattr(module, name) is not None and name in module.__doc__, name


def test_mypy_reads_the_names_and_their_arguments(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "program.py").write_text(
        "import gluon_mgpu as mgpu\n"
        "with mgpu.use_devices('cpu*2') as ctx:\n"
        "    mgpu.nothere\n"
        "    mgpu.fit(nothere=1)\n"
        "    print(mgpu.models.resnet18(10), mgpu.errors.DeviceError, mgpu.distributed.this_process().rank)\n"
        "    mgpu.data.nothere\n"
    )
    command = [sys.executable, "-m", "mypy", str(tmp_path / "program.py")]  # with the project's options, to share its cache
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    errors = [line for line in done.stdout.splitlines() if "error:" in line]
    assert [line.split(":")[1] for line in errors] == ["3", "4", "6"], done.stdout
    assert 'has no attribute "nothere"' in errors[0] and 'Unexpected keyword argument "nothere"' in errors[1]


QUICK = ["", "agree", "devices", "doctor", "explain", "export", "find-batch-size", "launch", "monitor", "predict"]
QUICK += ["predict resnet18", "train", "train resnet18", "train seq2seq", "translate"]


def test_help_needs_no_mxnet():
    program = f"""
import sys
from gluon_mgpu.cli.main import run
for name in {QUICK!r}:
    sys.argv = ["gluon-mgpu", *name.split(), "--help"]
    try:
        run()
    except SystemExit as end:
        assert not end.code, name
    assert "mxnet" not in sys.modules, name
"""
    output = run_python(program)
    assert all(f"Usage: gluon-mgpu {name}".rstrip() in output for name in QUICK)


def test_ctrl_c_during_the_import_of_mxnet_ends_with_130(tmp_path):
    (tmp_path / "mxnet").mkdir()
    (tmp_path / "mxnet" / "__init__.py").write_text("raise KeyboardInterrupt")
    command = [sys.executable, "-m", "gluon_mgpu", "devices"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(tmp_path)}, cwd=tmp_path, **OUTPUT)
    assert (done.returncode, done.stdout) == (130, "") and "Traceback" not in done.stderr, done

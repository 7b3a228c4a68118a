"""What must hold before and while MXNet is imported; each in a Python of its own."""

import os
import subprocess
import sys
import textwrap
import types

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu import runtime
from gluon_mgpu.errors import MissingExtraError


def run_python(program, *options, **environment):
    """The output of a program, and whether it ended well."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *options, "-c", textwrap.dedent(program)],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=120,
        text=True,
    )
    return done.stdout, done.returncode == 0


@pytest.mark.parametrize("first", ["gluon_mgpu, mxnet", "mxnet, gluon_mgpu"])
def test_either_import_may_come_first(first):
    """With NumPy 1.24 or newer `import mxnet` alone fails; the line in gluon_mgpu.pth mends that."""
    program = f"import {first}\nprint(gluon_mgpu.split_data(mxnet.nd.ones((4,)), 2)[0].shape, mxnet.np.ones(2).sum())"
    assert run_python(program) == ("(2,) 2.0\n", True)


def test_python_starts_without_importing_anything_more():
    program = "import sys; print([name for name in ('numpy', 'mxnet', 'gluon_mgpu') if name in sys.modules])"
    assert run_python(program) == ("[]\n", True)


def test_aliases_leave_numpy_s_own_names_alone(monkeypatch):
    import gluon_mgpu_numpy

    fake = types.ModuleType("numpy")
    fake.__version__ = "1.26.4"
    fake.float = "numpy's own"
    monkeypatch.setitem(sys.modules, "numpy", fake)
    gluon_mgpu_numpy.add_aliases()
    assert (fake.bool, fake.float) == (bool, "numpy's own")
    for version in ("1.23.5", "2.1.0"):
        other = types.ModuleType("numpy")
        other.__version__ = version
        monkeypatch.setitem(sys.modules, "numpy", other)
        gluon_mgpu_numpy.add_aliases()
        assert not hasattr(other, "bool")


def test_without_mxnet_the_extras_are_named():
    program = """
        import importlib.util
        find_spec = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *rest: None if name == "mxnet" else find_spec(name, *rest)
        import gluon_mgpu
    """
    told, ended_well = run_python(program)
    assert not ended_well
    assert "MissingExtraError: import gluon_mgpu: got no package mxnet; need MXNet 1.9.1." in told
    assert "pip install 'gluon_mgpu[cpu]'" in told
    assert "'gluon_mgpu[cu112]'" in told


@pytest.mark.parametrize(
    "replaced, told",
    [
        ({"mxnet": "2.0.0"}, "got mxnet 2.0.0; need MXNet 1.9.1"),
        ({"numpy": "2.1.0"}, "got numpy 2.1.0; need 1.17 to 1.26"),
    ],
)
def test_versions_that_do_not_fit(monkeypatch, replaced, told):
    def fake(name):
        module = types.ModuleType(name)
        module.__version__ = {"mxnet": "1.9.1", "numpy": np.__version__, **replaced}[name]
        return module

    monkeypatch.setattr(runtime.importlib, "import_module", fake)
    with pytest.raises(ImportError, match=told):
        runtime.load_mxnet()


def test_a_missing_system_library_is_named(monkeypatch):
    def fake(name):
        if name == "mxnet":
            raise OSError("libgomp.so.1: cannot open shared object file: No such file or directory")
        return np

    monkeypatch.setattr(runtime.importlib, "import_module", fake)
    with pytest.raises(ImportError, match="got libgomp.so.1: cannot open .* package libgomp1"):
        runtime.load_mxnet()


@pytest.mark.parametrize(
    "missing, kind, told",
    [("distutils.version", ImportError, "Run pip install setuptools"), ("other", ModuleNotFoundError, "No module named .other.")],
)
def test_a_python_without_distutils_is_told(monkeypatch, missing, kind, told):
    def fake(name):
        if name == "mxnet":
            raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)
        return np

    monkeypatch.setattr(runtime.importlib, "import_module", fake)
    with pytest.raises(ImportError, match=told) as caught:
        runtime.load_mxnet()
    assert type(caught.value) is kind


def test_settings_are_defaults_and_can_be_switched_off():
    program = "import os, gluon_mgpu; print(os.environ.get('MXNET_CPU_TEMP_COPY'))"
    environment = {name: value for name, value in os.environ.items() if name != "MXNET_CPU_TEMP_COPY"}
    for given, expected in [
        ({}, "128"),
        ({"MXNET_CPU_TEMP_COPY": "8"}, "8"),
        ({"GLUON_MGPU_RUNTIME": "off"}, "None"),
        ({"GLUON_MGPU_RUNTIME": "off", "MXNET_CPU_TEMP_COPY": "8"}, "8"),
    ]:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program],
            env={**environment, **given},
            stdout=subprocess.PIPE,
            timeout=120,
            text=True,
        )
        assert done.stdout.strip() == expected, given


def test_an_extra_that_is_missing_is_named():
    with pytest.raises(MissingExtraError, match=r"plot: got no package nonsense .*; need the extra 'train'\. Run pip install"):
        runtime.require("nonsense.inside", "train", "plot")
    assert runtime.require("numpy.linalg", "train", "plot") is np.linalg


def test_threads_of_new_contexts_are_set_whatever_the_environment_says():
    program = """
        import gluon_mgpu as mgpu
        import mxnet as mx
        with mgpu.use_devices("cpu:1"):
            print(mgpu.runtime.threads_of(0))
        with mgpu.use_devices("cpu:1-3"):
            print([mgpu.runtime.threads_of(i) for i in range(4)])
    """
    for environment in ({}, {"MXNET_CPU_WORKER_NTHREADS": "3"}):
        assert run_python(program, OMP_NUM_THREADS="4", **environment) == ("0\n[1, 1, 1, 1]\n", True)
    told, _ = run_python(program, OMP_NUM_THREADS="4", GLUON_MGPU_RUNTIME="off")
    assert told == "0\n[0, 0, 0, 0]\n"


def test_one_context_that_has_run_keeps_its_threads():
    program = """
        import gluon_mgpu as mgpu
        import mxnet as mx
        mx.nd.ones((2, 2)).wait_to_read()
        with mgpu.use_devices("cpu:2"):
            print([mgpu.runtime.threads_of(i) for i in range(2)])
    """
    assert run_python(program, OMP_NUM_THREADS="4") == ("[4, 1]\n", True)


def test_the_version_is_in_one_place():
    metadata = pytest.importorskip("importlib.metadata")
    assert metadata.version("gluon_mgpu") == mgpu.__version__
    assert mx.__version__.startswith("1.")

"""What must hold before and while MXNet is imported: decisions here, and processes that prove them."""

import ctypes
import os
import subprocess
import sys
import textwrap
from unittest import mock

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.errors import DeviceError, MissingExtraError
from gluon_mgpu.runtime import environment as runtime
from gluon_mgpu.runtime import loaded, openmp_threads


def ended(program, environment, *options):
    """The process of a program, with its errors in its output."""
    command = [sys.executable, *options, "-c", program]
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=240, text=True)


def run_python(program, **environment):
    """The output of a program, and whether it ended well."""
    done = ended(textwrap.dedent(program), {**os.environ, **environment}, "-W", "ignore")
    return done.stdout, done.returncode == 0


@pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) >= "1.24.0", reason="needs a NumPy before 1.24")
def test_mxnet_may_be_imported_first():
    """With a warning of what that loses, once."""
    program = """
        import mxnet, gluon_mgpu
        print(gluon_mgpu.data_parallel.split_data(mxnet.nd.ones((4,)), 2)[0].shape, mxnet.np.ones(2).sum())
    """
    told, ended_well = run_python(program, PYTHONPATH="")  # with scikit-learn and SciPy
    assert ended_well and told.endswith(" Swap the imports.\n(2,) 2.0\n") and told.count("mxnet imported before") == 1


def test_without_mxnet_the_extras_are_named():
    program = """
        import importlib.util
        find_spec = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *rest: None if name == "mxnet" else find_spec(name, *rest)
        import gluon_mgpu
        gluon_mgpu.fit
    """
    told, ended_well = run_python(program)
    assert not ended_well
    assert "MissingExtraError: import gluon_mgpu: got no package mxnet; expected MXNet 1.9.1." in told
    assert "pip install --no-deps mxnet==1.9.1" in told
    assert "pip install '.[cu112]'" in told


@pytest.mark.parametrize(
    "code, told",
    [
        ("__version__ = '3.0.0'", "got mxnet 3.0.0; expected MXNet 1.9.1"),
        ("__version__ = '1.7.0'", "got mxnet 1.7.0; expected MXNet 1.9.1"),
        (
            OSError("libgomp.so.1: cannot open shared object file: No such file or directory"),
            "apt-get install libgomp1 libquadmath0 zlib1g",
        ),
        (AttributeError("module 'numpy' has no attribute 'long'"), "With NumPy 1, run pip install 'scipy<1.16'"),
        (
            ValueError("numpy.dtype size changed, may indicate binary incompatibility"),
            "numpy.dtype size changed, .*pip install --upgrade scipy",
        ),
    ],
)
def test_what_mxnet_needs_is_named(tmp_path, monkeypatch, code, told):
    (tmp_path / "mxnet.py").write_text(code if isinstance(code, str) else f"raise {code!r}")
    monkeypatch.delitem(sys.modules, "mxnet")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ImportError, match=told):
        loaded.load_mxnet()


@pytest.mark.parametrize(
    "environment, expected", [({}, "128"), ({"MXNET_CPU_TEMP_COPY": "8"}, "8"), ({"GLUON_MGPU_RUNTIME": "off"}, None)]
)
def test_settings_are_defaults_and_can_be_switched_off(environment, expected):
    with mock.patch.dict(os.environ, clean(**environment), clear=True), mock.patch.object(runtime, "set_here", set()):
        runtime.prepare()
        assert os.environ.get("MXNET_CPU_TEMP_COPY") == expected
        is_off = environment.get("GLUON_MGPU_RUNTIME") == "off"
        assert os.environ.get("MXNET_GPU_PARALLEL_RAND_COPY") == (None if is_off else "1")


def test_an_extra_that_is_missing_is_named(tmp_path, monkeypatch):
    with pytest.raises(MissingExtraError, match=r"nonsense .*'train'"):
        runtime.require("nonsense.inside", "train", "plot")
    assert runtime.require("numpy.linalg", "train", "plot") is np.linalg
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken.py").write_text("raise OSError('libfoo.so.1: cannot open shared object file')")
    with pytest.raises(MissingExtraError, match=r"broken that works \(libfoo.so.1: .*'train'"):
        runtime.require("broken", "train", "plot")


def clean(**environment):
    """This environment without what decides threads, memory and copies, and with what is given."""
    decides = ("OMP_", "MXNET_", "MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD", "GLUON_MGPU_")
    return {**{name: value for name, value in os.environ.items() if not name.startswith(decides)}, **environment}


def run_clean(*programs, **environment):
    """The output of a program that starts with none of the settings made; warnings of this package come with it."""
    done = ended("\n".join(map(textwrap.dedent, programs)), clean(**environment), "-W", "ignore::DeprecationWarning")
    assert done.returncode == 0, done.stdout
    return done.stdout.splitlines()


# Asks the OpenMP library, from inside an operator that runs on the context's own worker: owes nothing to openmp_threads.py.
ASK = """
    import ctypes

    def asked(device_id):
        import mxnet as mx

        found = []
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
        openmp = ctypes.CDLL("libgomp.so.1")

        def look(_run, _param):
            found.append(openmp.omp_get_max_threads())

        ask = function(look)
        keep.append(ask)
        context = (ctypes.c_int * 2)(1, device_id)
        mx.base._LIB.MXEnginePushSync(ask, None, None, ctypes.byref(context), None, 0, None, 0, None, 0, b"ask")
        mx.nd.waitall()
        while not found:
            pass
        return found[0]

    keep = []
"""


@pytest.fixture(scope="module")
def plain():
    """The lines that one process prints, which has three cores and none of the settings."""
    three = "import os\nos.sched_getaffinity = lambda pid: set(range(3))"
    program = """
        with mgpu.use_devices("cpu*1"):
            print(asked(0))
        with mgpu.use_devices("cpu*3"):
            print([asked(i) for i in range(3)])
    """
    return run_clean(three, MALLOC, ASK, program)


@pytest.mark.mxnet1("OpenMP threads of one context")
def test_one_context_alone_gets_all_cores_and_keeps_them(plain):
    assert plain[2:] == ["3", "[3, 1, 1]"]


def test_several_contexts_get_one_thread_each_whatever_the_environment_says():
    program = """
        import gluon_mgpu as mgpu
        with mgpu.use_devices("cpu:1-3"):
            print([asked(i) for i in range(1, 4)])
    """
    assert run_clean(ASK, program, OMP_NUM_THREADS="4", MXNET_OMP_MAX_THREADS="4") == ["[1, 1, 1]"]


NUMBERS = [({}, 7), ({"OMP_NUM_THREADS": "5"}, 0), ({"MXNET_OMP_MAX_THREADS": "5"}, 0), ({"GLUON_MGPU_RUNTIME": "off"}, None)]
NUMBERS += [({"MXNET_ENGINE_TYPE": "ThreadedEngine"}, 0), ({"MXNET_ENGINE_TYPE": "ThreadedEnginePerDevice"}, 7)]


@pytest.fixture
def wanted(monkeypatch, cgroups):
    """A function: how many threads one context gets of seven cores; None if none are asked for."""
    found = [None]
    monkeypatch.setattr(openmp_threads, "set_threads", lambda contexts, *, alone: found.append(alone()))
    cgroups(7)
    return lambda: (runtime.set_threads([mx.cpu()]), found[-1])[1]


@pytest.mark.parametrize("environment, number", NUMBERS)
def test_the_number_of_threads_of_one_context(wanted, environment, number):
    """0 keeps MXNet's number, None asks for nothing."""
    with mock.patch.dict(os.environ, clean(**environment), clear=True):
        assert wanted() == number


def test_one_thread_is_asked_for_within_a_block_only(wanted):
    with mock.patch.dict(os.environ, clean(), clear=True):
        with runtime.one_thread():
            assert wanted() == 1
        with runtime.one_thread(False):
            assert wanted() == 7
        assert wanted() == 7


def test_several_workers_of_a_context_are_refused(monkeypatch):
    monkeypatch.setenv("MXNET_CPU_WORKER_NTHREADS", "2")
    seen = openmp_threads.contexts_seen()
    with pytest.raises(DeviceError):
        mgpu.devices.resolve_devices([mx.cpu(77)])
    assert openmp_threads.contexts_seen() == seen


# Cores


@pytest.fixture
def cgroups(tmp_path, monkeypatch):
    """A function that binds this process to cores, and writes what /proc/self/cgroup says and the files of a cgroup tree."""

    def write(bound=8, own="", files=()):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(bound)))
        (tmp_path / "own").write_text(own)
        for name, text in dict(files).items():
            path = tmp_path / "fs" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    for name, place in {"_OWN_CGROUPS": "own", "_CGROUPS": "fs"}.items():
        monkeypatch.setattr(openmp_threads, name, str(tmp_path / place))
    return write


@pytest.mark.parametrize(
    "own, files, expected",
    [
        ("", {}, 0.0),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 0.0),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "50000 100000\n"}, 0.5),
        ("0::/a/b\n", {"a/b/cpu.max": "400000 100000\n", "a/cpu.max": "300000 100000\n"}, 3.0),
        ("0::/of/the/host\n", {"cpu.max": "250000 100000\n"}, 2.5),
        ("0::/\n", {"cpu.max": "rubbish\n"}, 0.0),
        ("3:cpuset:/a\n", {"cpu.max": "200000 50000\n"}, 0.0),
    ],
)
def test_quotas_are_read(cgroups, own, files, expected):
    cgroups(8, own, files)
    assert openmp_threads.cpu_quota() == pytest.approx(expected)


@pytest.mark.parametrize("quota, bound, expected", [(0.2, 8, 1), (1.0, 8, 1), (1.2, 8, 2), (7.5, 8, 8), (64, 8, 8), (3, 2, 2)])
def test_cores_are_the_smaller_of_affinity_and_quota_rounded_up(cgroups, quota, bound, expected):
    cgroups(bound, "0::/\n", {"cpu.max": f"{int(quota * 100000)} 100000\n"})
    assert runtime.num_cores() == expected


# Memory

MALLOC = """
    import ctypes
    import gluon_mgpu as mgpu
    from gluon_mgpu.doctor.settings import settings
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
    # glibc gives an array above its threshold a mapping of its own: its chunk's second lowest size bit says so.
    def is_mapped(num_bytes):
        array = libc.malloc(num_bytes)
        size = ctypes.c_size_t.from_address(array - ctypes.sizeof(ctypes.c_size_t)).value
        libc.free(array)
        return bool(size & 2)
    print(is_mapped(20 * 2**20), is_mapped(40 * 2**20))
    print([(s.value, s.source) for s in settings() if s.name.startswith("M_")])
"""
GLIBC = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="the C library is not glibc")


@pytest.mark.parametrize("given, found", [({}, "4"), ({"MXNET_CPU_TEMP_COPY": "128"}, "128")])
def test_one_context_takes_few_buffers(given, found):
    program = """
        import os
        from gluon_mgpu.runtime import environment
        environment.prepare()
        environment.set_one_context()
        print(os.environ["MXNET_CPU_TEMP_COPY"])
    """
    assert run_clean(program, **given) == [found]


@GLIBC
def test_large_arrays_come_from_memory_that_malloc_keeps(plain):
    mapped, values = plain[:2]
    assert mapped == "False False"
    assert values == "[('0', 'gluon_mgpu'), ('never', 'gluon_mgpu')]"

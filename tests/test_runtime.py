"""What must hold before and while MXNet is imported: decisions here, and processes that prove them."""

import ctypes
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import types

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.errors import MissingExtraError
from gluon_mgpu.runtime import environment as runtime
from gluon_mgpu.runtime import threads

from .test_cuda import elf


def run_python(program, *options, **environment):
    """The output of a program, and whether it ended well."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *options, "-c", textwrap.dedent(program)],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=240,
        text=True,
    )
    return done.stdout, done.returncode == 0


@pytest.mark.parametrize("first", [pytest.param("gluon_mgpu, mxnet", marks=pytest.mark.exhaustive), "mxnet, gluon_mgpu"])
def test_either_import_may_come_first(first):
    """With NumPy 1.24 or newer `import mxnet` alone fails; the line in gluon_mgpu.pth mends that."""
    program = f"import {first}\nprint(gluon_mgpu.split_data(mxnet.nd.ones((4,)), 2)[0].shape, mxnet.np.ones(2).sum())"
    assert run_python(program, PYTHONPATH="") == ("(2,) 2.0\n", True)  # with scikit-learn and SciPy


def test_python_starts_without_importing_anything_more():
    program = "import sys; print([name for name in ('numpy', 'mxnet', 'gluon_mgpu') if name in sys.modules])"
    assert run_python(program) == ("[]\n", True)


def test_aliases_leave_numpy_s_own_names_alone(monkeypatch):
    from gluon_mgpu.runtime import numpy_names

    fake = types.ModuleType("numpy")
    fake.__version__ = "1.26.4"
    fake.float = "numpy's own"
    monkeypatch.setitem(sys.modules, "numpy", fake)
    numpy_names.add_aliases()
    assert (fake.bool, fake.float) == (bool, "numpy's own")
    for version in ("1.23.5", "2.1.0"):
        other = types.ModuleType("numpy")
        other.__version__ = version
        monkeypatch.setitem(sys.modules, "numpy", other)
        numpy_names.add_aliases()
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
    assert "MissingExtraError: import gluon_mgpu: got no package mxnet; expected MXNet 1.9.1." in told
    assert "pip install 'gluon_mgpu[cpu]'" in told
    assert "'gluon_mgpu[cu112]'" in told


@pytest.mark.parametrize(
    "replaced, told",
    [
        ({"mxnet": "3.0.0"}, "got mxnet 3.0.0; expected MXNet 1.9.1"),
        ({"mxnet": "1.7.0"}, "got mxnet 1.7.0; expected MXNet 1.9.1"),
        ({"numpy": "2.1.0"}, "got numpy 2.1.0; expected 1.17 to 1.26"),
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
    "switch, told",
    [
        ("on", "ImportError: import mxnet: got no libcublasLt.so.9; no libcublas.so.9; expected the CUDA libraries"),
        (
            "off",
            "libcuda.so.1 comes with the NVIDIA driver; CUDA's others come with pip install 'gluon_mgpu[cu112]'",
        ),
    ],
)
def test_cuda_s_libraries_are_looked_for_before_mxnet_is_imported(tmp_path, switch, told):
    library = bytearray(elf("libcublas.so.9"))
    library[18] = 183  # of another processor: the dynamic linker refuses it
    (tmp_path / "libmxnet.so").write_bytes(library)
    environment = {"MXNET_LIBRARY_PATH": str(tmp_path / "libmxnet.so"), "GLUON_MGPU_RUNTIME": switch}
    said, ended_well = run_python("import gluon_mgpu", **environment)
    assert not ended_well
    assert told in said.splitlines()[-1]


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


@pytest.fixture
def load(monkeypatch):
    """A function that loads a fake MXNet where the environment says this alone; it returns which variables are then set."""
    fake = types.ModuleType("mxnet")
    fake.__version__ = "1.9.1"

    def load_with(environment, made=()):
        monkeypatch.setattr(os, "environ", {**clean(**environment), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
        monkeypatch.setattr(runtime, "_set_here", set())
        monkeypatch.setattr(runtime, "_too_late", set())
        monkeypatch.setattr(runtime, "_is_made", lambda what: what in made)
        runtime.load_mxnet()
        return {name: os.environ[name] for name in ("MXNET_CPU_TEMP_COPY", "MXNET_ENGINE_TYPE") if name in os.environ}

    monkeypatch.setattr(runtime.importlib, "import_module", lambda name: fake if name == "mxnet" else np)
    return load_with


OFF = {"GLUON_MGPU_RUNTIME": "off"}
COPIES, SERIAL_TYPE = {"MXNET_CPU_TEMP_COPY": "128"}, {"MXNET_ENGINE_TYPE": "NaiveEngine"}


@pytest.mark.parametrize(
    "environment, expected",
    [
        ({}, COPIES),
        ({"MXNET_CPU_TEMP_COPY": "8"}, {"MXNET_CPU_TEMP_COPY": "8"}),
        (OFF, {}),
        ({**OFF, "MXNET_CPU_TEMP_COPY": "8"}, {"MXNET_CPU_TEMP_COPY": "8"}),
        ({"GLUON_MGPU_DEBUG": "1"}, {**COPIES, **SERIAL_TYPE}),
        ({"GLUON_MGPU_DEBUG": "off"}, COPIES),
        ({**OFF, "GLUON_MGPU_DEBUG": "1"}, SERIAL_TYPE),
        ({"GLUON_MGPU_DEBUG": "1", "MXNET_ENGINE_TYPE": "ThreadedEngine"}, {**COPIES, "MXNET_ENGINE_TYPE": "ThreadedEngine"}),
    ],
)
def test_settings_are_defaults_and_can_be_switched_off(load, environment, expected):
    assert load(environment) == expected


@pytest.mark.parametrize(
    "environment, made, expected, warned",
    [
        ({}, runtime._BUFFERS_MADE, {}, "MXNET_CPU_TEMP_COPY=4"),
        ({"MXNET_CPU_TEMP_COPY": "64"}, runtime._BUFFERS_MADE, {"MXNET_CPU_TEMP_COPY": "64"}, ""),
        (OFF, runtime._BUFFERS_MADE, {}, ""),
        ({"GLUON_MGPU_DEBUG": "1"}, runtime._ENGINE_MADE, COPIES, "errors of a backward pass come late"),
        ({"GLUON_MGPU_DEBUG": "1", **SERIAL_TYPE}, runtime._ENGINE_MADE, {**COPIES, **SERIAL_TYPE}, ""),
    ],
)
def test_settings_that_mxnet_has_read_before_are_left_alone(load, caplog, environment, made, expected, warned):
    assert load(environment, [made]) == expected
    assert bool(caplog.messages) == bool(warned)
    assert warned in caplog.text


def test_an_extra_that_is_missing_is_named():
    with pytest.raises(
        MissingExtraError, match=r"plot: got no package nonsense .*; expected the extra 'train'\. Run pip install"
    ):
        runtime.require("nonsense.inside", "train", "plot")
    assert runtime.require("numpy.linalg", "train", "plot") is np.linalg


def clean(**environment):
    """This environment without what decides threads, memory and copies, and with what is given."""
    decides = ("OMP_", "MXNET_", "MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD", "GLUON_MGPU_")
    return {**{name: value for name, value in os.environ.items() if not name.startswith(decides)}, **environment}


def run_clean(*programs, **environment):
    """The output of a program that starts with none of the settings made; warnings of this package come with it."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", "\n".join(map(textwrap.dedent, programs))]
    done = subprocess.run(
        command, env=clean(**environment), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=240, text=True
    )
    assert done.returncode == 0, done.stdout
    return done.stdout.splitlines()


# Asks the OpenMP library, from inside an operator that runs on the context's own worker: owes nothing to threads.py.
ASK = """
    import ctypes

    def asked(device_id, number=0):
        import mxnet as mx

        found = []
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
        openmp = ctypes.CDLL("libgomp.so.1")

        def look(_run, _param):
            if number:
                openmp.omp_set_num_threads(number)
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
        with mgpu.use_devices("cpu:1"):
            print(asked(0))
        with mgpu.use_devices("cpu:3"):
            print([asked(i) for i in range(3)])
    """
    return run_clean(three, MALLOC, ASK, program)


def test_one_context_alone_gets_all_cores_and_keeps_them(plain):
    assert plain[3:] == ["3", "[3, 1, 1]"]


@pytest.mark.parametrize(
    "environment",
    [pytest.param(environment, marks=pytest.mark.exhaustive) for environment in ({}, {"OMP_NUM_THREADS": "4"})]
    + [{"OMP_NUM_THREADS": "4", "MXNET_OMP_MAX_THREADS": "4"}],
)
def test_several_contexts_get_one_thread_each_whatever_the_environment_says(environment):
    program = """
        import gluon_mgpu as mgpu
        with mgpu.use_devices("cpu:1-3"):
            print([asked(i) for i in range(1, 4)])
    """
    assert run_clean(ASK, program, **environment) == ["[1, 1, 1]"]


@pytest.mark.parametrize(
    "environment, expected",
    [
        ({"OMP_NUM_THREADS": "5"}, 5),
        pytest.param({"OMP_NUM_THREADS": "4", "GLUON_MGPU_RUNTIME": "off"}, 4, marks=pytest.mark.exhaustive),
        pytest.param({"OMP_NUM_THREADS": "5", "MXNET_CPU_WORKER_NTHREADS": "2"}, 5, marks=pytest.mark.exhaustive),
    ],
)
def test_what_the_environment_says_stands_for_one_context(environment, expected):
    program = """
        import gluon_mgpu as mgpu
        with mgpu.use_devices("cpu:1"):
            print(asked(0))
    """
    assert run_clean(ASK, program, **environment) == [str(expected)]


@pytest.mark.parametrize(
    "environment, number",
    [
        ({}, 7),
        ({"OMP_NUM_THREADS": "5"}, 0),
        ({"MXNET_OMP_MAX_THREADS": "5"}, 0),
        ({"MXNET_CPU_WORKER_NTHREADS": "1"}, 7),
        ({"MXNET_CPU_WORKER_NTHREADS": "2"}, 0),
        ({"MXNET_ENGINE_TYPE": "ThreadedEngine"}, 0),
        ({"MXNET_ENGINE_TYPE": "ThreadedEnginePerDevice"}, 7),
        ({"GLUON_MGPU_RUNTIME": "off"}, None),
    ],
)
def test_the_number_of_threads_of_one_context(monkeypatch, environment, number):
    """0 keeps MXNet's number, None asks for nothing."""
    found = []
    monkeypatch.setattr(os, "environ", clean(**environment))
    monkeypatch.setattr(runtime, "num_cores", lambda: 7)
    monkeypatch.setattr(threads, "set_threads", lambda contexts, *, alone: found.append(alone()))
    runtime.set_threads([mx.cpu()])
    assert found == [number] * (number is not None)


@pytest.mark.exhaustive
def test_mxnet_s_own_limit_stands_for_one_context():
    program = """
        import os
        os.sched_getaffinity = lambda pid: set(range(7))
        import gluon_mgpu as mgpu
        with mgpu.use_devices("cpu:1"):
            print(asked(0) == 7)
    """
    assert run_clean(ASK, program, MXNET_OMP_MAX_THREADS="1") == ["False"]
    assert run_clean(ASK, program) == ["True"]


@pytest.mark.parametrize(
    "environment, expected",
    [
        pytest.param({}, [1, 1, 1, 1], marks=pytest.mark.exhaustive),
        ({"MXNET_CPU_WORKER_NTHREADS": "3"}, [1, 1, 1, 1]),
        pytest.param({"GLUON_MGPU_RUNTIME": "off"}, [0, 0, 0, 0], marks=pytest.mark.exhaustive),
    ],
)
def test_threads_of_new_contexts_are_set_whatever_the_environment_says(environment, expected):
    program = """
        import gluon_mgpu as mgpu
        import mxnet as mx
        with mgpu.use_devices("cpu:1"):
            print(mgpu.runtime.threads_of(0))
        with mgpu.use_devices("cpu:1-3"):
            print([mgpu.runtime.threads_of(i) for i in range(4)])
    """
    assert run_python(program, OMP_NUM_THREADS="4", **environment) == (f"0\n{expected}\n", True)


def test_a_context_that_has_run_keeps_its_threads():
    program = """
        import os
        os.sched_getaffinity = lambda pid: set(range(7))
        import gluon_mgpu as mgpu
        import mxnet as mx
        mx.nd.ones((2, 2)).wait_to_read()
        before = asked(0)
        with mgpu.use_devices("cpu:1"):
            print(asked(0) == before != 7)
        with mgpu.use_devices("cpu:2"):
            print(asked(0) == before == mgpu.runtime.threads_of(0), asked(1), mgpu.runtime.threads_of(1))
    """
    assert run_clean(ASK, program) == ["True", "True 1 1"]


@pytest.mark.exhaustive
def test_one_context_that_has_run_keeps_its_threads():
    program = """
        import gluon_mgpu as mgpu
        import mxnet as mx
        mx.nd.ones((2, 2)).wait_to_read()
        with mgpu.use_devices("cpu:2"):
            print([mgpu.runtime.threads_of(i) for i in range(2)])
    """
    assert run_python(program, OMP_NUM_THREADS="4") == ("[4, 1]\n", True)


@pytest.mark.exhaustive
def test_two_contexts_with_several_threads_are_warned_of_after_one_came_alone():
    program = """
        import os
        os.sched_getaffinity = lambda pid: set(range(3))
        import gluon_mgpu as mgpu
        with mgpu.use_devices("cpu:1"):
            pass
        asked(1, {number})
        with mgpu.use_devices("cpu:2"):
            print("ready")
    """
    *warned, ready = run_clean(ASK, program.format(number=2))
    assert ready == "ready"
    told = (
        "RuntimeWarning: use_devices: got contexts that have already run, cpu(0) with 3 and cpu(1) with 2 threads; expected one"
    )
    assert told in "\n".join(warned)
    assert run_clean(ASK, program.format(number=1)) == ["ready"]


# The serial engine

SERIAL = """
    import os
    {first}
    import gluon_mgpu as mgpu
    from gluon_mgpu.runtime.engine import is_serial
    {then}
    with mgpu.use_devices("cpu:2") as ctx:
        print(is_serial(), os.environ.get("MXNET_ENGINE_TYPE"), [mgpu.runtime.threads_of(i) for i in range(2)])
        print({{(setting.value, setting.source) for setting in mgpu.runtime.settings(ctx) if "cpu(" in setting.name}})
"""


def serial(first="", then="", **environment):
    lines = run_clean(SERIAL.format(first=first, then=then), OMP_NUM_THREADS="3", **environment)
    return [line for line in lines if "start using engine" not in line]


@pytest.mark.exhaustive
def test_two_contexts_of_the_serial_engine_are_not_warned_of():
    """Each operation has three threads, but none runs beside another."""
    assert serial(MXNET_ENGINE_TYPE="NaiveEngine") == ["True NaiveEngine [0, 0]", "{('3', 'environment')}"]


def test_debugging_asks_for_the_serial_engine():
    """Also where mxnet was imported first and has run nothing. Each operation has three threads, but they run in turn."""
    assert serial("import mxnet", GLUON_MGPU_DEBUG="1") == ["True NaiveEngine [0, 0]", "{('3', 'environment')}"]


@pytest.mark.exhaustive
def test_an_engine_that_was_chosen_stands_until_it_is_replaced():
    then = "print(os.environ['MXNET_ENGINE_TYPE']); from gluon_mgpu import debug; debug.run_serially()"
    told = serial("", then, GLUON_MGPU_DEBUG="1", MXNET_ENGINE_TYPE="ThreadedEngine")
    assert told == ["ThreadedEngine", "True NaiveEngine [0, 0]", "{('3', 'environment')}"]


def test_an_engine_that_has_begun_is_told_and_its_contexts_get_one_thread_each():
    """Were it taken for the serial engine, its contexts would keep several, and could hang."""
    warned, *told = serial("import mxnet; mxnet.nd.ones((2,), ctx=mxnet.cpu(5))", GLUON_MGPU_DEBUG="1")
    assert warned.startswith("import gluon_mgpu: got an mxnet that has run operations before; expected gluon_mgpu first")
    assert told == ["False None [1, 1]", "{('1', 'gluon_mgpu')}"]


# Cores


@pytest.fixture
def cgroups(tmp_path, monkeypatch):
    """A function that writes the files of a cgroup tree, and what /proc/self/cgroup says."""

    def write(own, files):
        (tmp_path / "own").write_text(own)
        for name, text in files.items():
            path = tmp_path / "fs" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    monkeypatch.setattr(threads, "_OWN_CGROUPS", str(tmp_path / "own"))
    monkeypatch.setattr(threads, "_CGROUPS", str(tmp_path / "fs"))
    return write


V1 = "4:memory:/a\n3:cpu,cpuacct:/docker/7\n0::/\n"


@pytest.mark.parametrize(
    "own, files, expected",
    [
        ("", {}, 0.0),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 0.0),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "50000 100000\n"}, 0.5),
        ("0::/a/b\n", {"a/b/cpu.max": "400000 100000\n", "a/cpu.max": "300000 100000\n"}, 3.0),
        ("0::/of/the/host\n", {"cpu.max": "250000 100000\n"}, 2.5),
        ("0::/\n", {"unified/cpu.max": "70000 20000\n"}, 3.5),
        ("0::/\n", {"cpu.max": "rubbish\n"}, 0.0),
        (V1, {"cpu,cpuacct/docker/7/cpu.cfs_quota_us": "-1\n", "cpu,cpuacct/docker/7/cpu.cfs_period_us": "100000\n"}, 0.0),
        (V1, {"cpu,cpuacct/docker/7/cpu.cfs_quota_us": "120000\n", "cpu,cpuacct/docker/7/cpu.cfs_period_us": "100000\n"}, 1.2),
        (V1, {"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "50000\n"}, 4.0),
        ("3:cpuset:/a\n", {"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "50000\n"}, 0.0),
    ],
)
def test_quotas_are_read(cgroups, own, files, expected):
    cgroups(own, files)
    assert threads.cpu_quota() == pytest.approx(expected)


@pytest.mark.parametrize("quota, bound, expected", [(0.2, 8, 1), (1.0, 8, 1), (1.2, 8, 2), (7.5, 8, 8), (64, 8, 8), (3, 2, 2)])
def test_cores_are_the_smaller_of_affinity_and_quota_rounded_up(cgroups, monkeypatch, quota, bound, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(bound)))
    cgroups("0::/\n", {"cpu.max": f"{int(quota * 100000)} 100000\n"})
    assert runtime.num_cores() == expected


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system cannot bind threads to cores")
def test_cores_respect_the_affinity():
    found = []

    def bind_and_count():  # the affinity of this thread alone
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        found.append(runtime.num_cores())

    thread = threading.Thread(target=bind_and_count)
    thread.start()
    thread.join()
    assert found == [1]


# Memory

MALLOC = """
    import ctypes
    import gluon_mgpu as mgpu
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
    # glibc gives an array above its threshold a mapping of its own: its chunk's second lowest size bit says so.
    def is_mapped(num_bytes):
        array = libc.malloc(num_bytes)
        size = ctypes.c_size_t.from_address(array - ctypes.sizeof(ctypes.c_size_t)).value
        libc.free(array)
        return bool(size & 2)
    print(is_mapped(20 * 2**20), is_mapped(40 * 2**20))
    print([(s.value, s.source) for s in mgpu.runtime.settings() if s.name.startswith("M_")])
    print([s.reason for s in mgpu.runtime.settings() if s.name.startswith("M_")][0])
"""
GLIBC = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="the C library is not glibc")


@GLIBC
def test_large_arrays_come_from_memory_that_malloc_keeps(plain):
    mapped, values = plain[:2]
    assert mapped == "False False"
    assert values == "[('0', 'gluon_mgpu'), ('never', 'gluon_mgpu')]"


@pytest.mark.exhaustive
@GLIBC
@pytest.mark.parametrize(
    "environment, source, reason",
    [
        ({"GLUON_MGPU_RUNTIME": "off"}, "off", "GLUON_MGPU_RUNTIME=off keeps the value that it has without gluon_mgpu."),
        ({"MALLOC_TRIM_THRESHOLD_": "200000"}, "environment", "MALLOC_TRIM_THRESHOLD_ in the environment has priority."),
        ({"MALLOC_ARENA_MAX": "2"}, "environment", "MALLOC_ARENA_MAX in the environment has priority."),
        ({"GLIBC_TUNABLES": "glibc.malloc.tcache_count=3"}, "environment", "GLIBC_TUNABLES in the environment has priority."),
    ],
)
def test_a_choice_of_memory_stands(environment, source, reason):
    mapped, values, why = run_clean(MALLOC, **environment)
    assert mapped == "True True"
    assert f", '{source}')" in values
    assert why == reason


@pytest.mark.exhaustive
@GLIBC
def test_another_allocator_is_left_alone(tmp_path):
    """What LD_PRELOAD brings counts where it brings malloc."""
    if not shutil.which("cc"):
        pytest.skip("needs a C compiler, cc")
    sources = {
        "other": "#include <stddef.h>\nvoid *__libc_malloc(size_t);\nvoid *malloc(size_t size) { return __libc_malloc(size); }",
        "unrelated": "int unrelated(void) { return 1; }",
    }
    for name, source in sources.items():
        (tmp_path / f"{name}.c").write_text(source)
        command = ["cc", "-shared", "-fPIC", "-o", str(tmp_path / f"lib{name}.so"), str(tmp_path / f"{name}.c")]
        subprocess.run(command, check=True, timeout=240)
    mapped, values, why = run_clean(MALLOC, LD_PRELOAD=str(tmp_path / "libother.so"))
    assert (mapped, why) == ("True True", "The allocator is libother.so.")
    assert "'environment'" in values
    assert run_clean(MALLOC, LD_PRELOAD=str(tmp_path / "libunrelated.so"))[0] == "False False"


# mxnet first


def test_an_mxnet_that_has_run_no_operator_gets_the_settings():
    """The array's engine has begun by then; the buffers come with the operator after it, and show it."""
    program = """
        import mxnet as mx
        array = mx.nd.array([1, 2])
        array.wait_to_read()
        import gluon_mgpu as mgpu
        from gluon_mgpu.runtime import environment
        print([(s.value, s.source) for s in mgpu.runtime.settings() if s.name == "MXNET_CPU_TEMP_COPY"])
        print(environment._is_made(environment._ENGINE_MADE), environment._is_made(environment._BUFFERS_MADE))
        (array + 1).wait_to_read()
        print(environment._is_made(environment._BUFFERS_MADE))
    """
    assert run_clean(program) == ["[('128', 'gluon_mgpu')]", "True False", "True"]


@pytest.mark.parametrize(
    "used, environment, told",
    [
        pytest.param("", {}, False, marks=pytest.mark.exhaustive),
        pytest.param("(mx.nd.array([1, 2]) + 1).wait_to_read()", {}, True, marks=pytest.mark.exhaustive),
        ("mx.random.seed(1)", {}, True),
        pytest.param("mx.random.seed(1)", {"MXNET_CPU_TEMP_COPY": "64"}, False, marks=pytest.mark.exhaustive),
        pytest.param("mx.random.seed(1)", {"GLUON_MGPU_RUNTIME": "off"}, False, marks=pytest.mark.exhaustive),
    ],
)
def test_an_mxnet_that_was_used_before_is_told(used, environment, told):
    program = f"""
        import mxnet as mx
        {used}
        import gluon_mgpu as mgpu
        print([(s.value, s.source) for s in mgpu.runtime.settings() if s.name == "MXNET_CPU_TEMP_COPY"])
    """
    *warned, value = run_clean(program, **environment)
    if told:
        (line,) = warned
        assert line.startswith("import gluon_mgpu: got an mxnet that has run operators before; expected gluon_mgpu first")
        assert "MXNET_CPU_TEMP_COPY=4" in line
        assert value == "[('4', \"MXNet's default\")]"
    else:
        assert warned == []
        number = {"MXNET_CPU_TEMP_COPY": ("64", "environment"), "GLUON_MGPU_RUNTIME": ("4", "off")}
        assert value == str([next((number[name] for name in environment), ("128", "gluon_mgpu"))])


# Settings


@pytest.mark.exhaustive
def test_settings_say_who_set_them():
    program = """
        import gluon_mgpu as mgpu
        with mgpu.use_devices({spec!r}) as ctx:
            for setting in mgpu.runtime.settings(ctx):
                print(setting.name, "|", setting.value, "|", setting.source, "|", setting.reason)
    """

    def found(spec, **environment):
        lines = [line.split(" | ") for line in run_clean(program.format(spec=spec), **environment)]
        assert all(len(line) == 4 and line[3].endswith(".") for line in lines)
        return {line[0]: (line[1], line[2]) for line in lines}

    ours = found("cpu:2")
    assert ours["threads of cpu(0)"] == ours["threads of cpu(1)"] == ("1", "gluon_mgpu")
    assert ours["MXNET_CPU_TEMP_COPY"] == ("128", "gluon_mgpu")
    assert ours["MXNET_CPU_PARALLEL_RAND_COPY"] == ("1", "MXNet's default")
    given = found("cpu:1", OMP_NUM_THREADS="3", MXNET_CPU_TEMP_COPY="16", MXNET_CPU_PARALLEL_RAND_COPY="8")
    assert given["threads of cpu(0)"] == ("3", "environment")
    assert given["MXNET_CPU_TEMP_COPY"] == ("16", "environment")
    assert given["MXNET_CPU_PARALLEL_RAND_COPY"] == ("8", "environment")
    off = found("cpu:2", OMP_NUM_THREADS="3", GLUON_MGPU_RUNTIME="off")
    assert off["threads of cpu(0)"] == off["threads of cpu(1)"] == ("3", "off")
    assert off["MXNET_CPU_TEMP_COPY"] == ("4", "off")


class Libc:
    """A C library whose mallopt refuses what is not in `takes`; without malloc, it is not glibc."""

    def __init__(self, takes):
        self.takes, self.calls = takes, []

    def mallopt(self, parameter, value):
        self.calls.append((parameter, value))
        return int(parameter in self.takes)


@pytest.mark.parametrize(
    "environment, reason",
    [
        ({}, ""),
        ({"MALLOC_ARENA_MAX": "2"}, "MALLOC_ARENA_MAX in the environment has priority."),
        ({"GLIBC_TUNABLES": "glibc.malloc.tcache_count=3"}, "GLIBC_TUNABLES in the environment has priority."),
        ({"GLIBC_TUNABLES": "glibc.rtld.nns=4"}, ""),
    ],
)
def test_who_sets_the_allocator(monkeypatch, environment, reason):
    monkeypatch.setattr(os, "environ", {"PATH": "", **environment})
    monkeypatch.setattr(runtime, "_library_of", lambda function: "libc.so.6")
    assert runtime._why_not_allocator() == reason
    libc = Libc(takes=[parameter for parameter, _ in runtime.ALLOCATOR.values()])
    libc.malloc = libc.gnu_get_libc_version = None
    monkeypatch.setattr(ctypes, "CDLL", lambda name: libc)
    monkeypatch.setattr(runtime, "_set_here", set())
    runtime._set_allocator()
    assert libc.calls == ([] if reason else list(runtime.ALLOCATOR.values()))
    assert runtime._set_here == (set() if reason else set(runtime.ALLOCATOR))


def test_an_allocator_that_refuses_or_is_another_one_is_left_alone(monkeypatch):
    monkeypatch.setattr(os, "environ", {"PATH": ""})
    monkeypatch.setattr(runtime, "_set_here", set())
    libc = Libc(takes=[])
    monkeypatch.setattr(ctypes, "CDLL", lambda name: libc)
    assert runtime._why_not_allocator() == "The C library is not glibc."
    libc.malloc, libc.gnu_get_libc_version = "/usr/lib/libjemalloc.so.2", "/lib/libc.so.6"
    monkeypatch.setattr(runtime, "_library_of", lambda function: function)
    assert runtime._why_not_allocator() == "The allocator is libjemalloc.so.2."
    libc.malloc = libc.gnu_get_libc_version
    runtime._set_allocator()
    assert len(libc.calls) == 1 and runtime._set_here == set()  # one of two settings alone would only cost memory


@pytest.mark.parametrize("others, reason", [([], "A single context gets every core"), ([1], "Two CPU contexts with several")])
def test_threads_say_why_they_are_so_many(monkeypatch, others, reason):
    for name, value in (("ask_threads", 1 if others else 8), ("were_set", True), ("contexts_seen", [0, *others])):
        monkeypatch.setattr(threads, name, lambda *_, value=value: value)
    setting = runtime._threads_setting(0)
    assert (setting.value, setting.source) == ("1" if others else "8", "gluon_mgpu") and setting.reason.startswith(reason)


def test_without_openmp_threads_are_unknown(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert threads.ask_threads(7) == 0


def test_a_library_that_does_not_show_its_engine_has_made_none():
    assert runtime._is_made("no_such_symbol") is False


def test_an_old_numpy_has_all_names(monkeypatch):
    monkeypatch.setattr(runtime.importlib, "import_module", lambda name: types.SimpleNamespace(__version__="1.19.5"))
    setting = runtime._aliases_setting()
    assert (setting.value, setting.source) == ("not needed", "-") and "NumPy 1.19.5" in setting.reason


def test_numpy_names_are_told():
    (names,) = [setting for setting in runtime.settings() if setting.name == "NumPy names"]
    old = tuple(int(part) for part in np.__version__.split(".")[:2]) < (1, 24)
    assert (names.value, names.source) == (("not needed", "-") if old else ("6 put back", "gluon_mgpu"))


def test_the_version_is_in_one_place():
    metadata = pytest.importorskip("importlib.metadata")
    assert metadata.version("gluon_mgpu") == mgpu.__version__
    assert mx.__version__.startswith("1.")


def test_import_mxnet_alone_loads_cuda_s_libraries_too(tmp_path):
    (tmp_path / "libmxnet.so").write_bytes(elf("libcublas.so.9"))
    program = """
        import ctypes, sys
        asked, CDLL = [], ctypes.CDLL
        ctypes.CDLL = lambda name, *rest, **options: asked.append(name) or CDLL(name, *rest, **options)
        import importlib.util
        importlib.util.find_spec("mxnet")
        print("libcublas.so.9" in asked, "gluon_mgpu" in sys.modules, "mxnet" in sys.modules)
    """
    library = str(tmp_path / "libmxnet.so")
    assert run_python(program, MXNET_LIBRARY_PATH=library) == ("True False False\n", True)
    assert run_python(program, MXNET_LIBRARY_PATH=library, GLUON_MGPU_RUNTIME="off") == ("False False False\n", True)


def test_one_thread_is_asked_for_within_a_block_only():
    before = runtime._threads_alone()
    with runtime.one_thread():
        assert runtime._threads_alone() == 1
    with runtime.one_thread(False):
        assert runtime._threads_alone() == before
    assert runtime._threads_alone() == before

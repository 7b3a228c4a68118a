"""Where CUDA's libraries are looked for, in which order, what is told where one is missing, and how versions are read."""

import configparser
import ctypes
import os
import re
import shutil
import struct
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import mxnet as mx
import pytest
from gluon_mgpu.runtime import cuda_libraries

from .conftest import assert_house_style

ROOT = Path(__file__).parent.parent
SONAMES = [
    "libcuda.so.1",
    "libcudart.so.11.0",
    "libnvrtc.so.11.2",
    "libcublasLt.so.11",
    "libcublas.so.11",
    "libcufft.so.10",
    "libcurand.so.10",
    "libcusolver.so.11",
    "libcudnn.so.8",
    "libnccl.so.2",
    "libnvToolsExt.so.1",
]
PACKAGES = {  # whose lib folder each stands in, as the wheels nvidia-*-cu11 have it
    "libcudart.so.11.0": "cuda_runtime",
    "libnvrtc.so.11.2": "cuda_nvrtc",
    "libcublasLt.so.11": "cublas",
    "libcublas.so.11": "cublas",
    "libcufft.so.10": "cufft",
    "libcurand.so.10": "curand",
    "libcusolver.so.11": "cusolver",
    "libcudnn.so.8": "cudnn",
    "libnccl.so.2": "nccl",
    "libnvToolsExt.so.1": "nvtx",
}
PARTS = [f"libcudnn_{part}.so.8" for part in ("ops_infer", "ops_train", "cnn_infer", "cnn_train", "adv_infer", "adv_train")]


def elf(*names):
    """A shared library that needs others, and nothing else: one segment at address 4096 and a dynamic section."""
    strings = b"\0" + b"".join(name.encode() + b"\0" for name in names)
    entries, offset = [], 1
    for name in names:
        entries.append((1, offset))  # DT_NEEDED
        offset += len(name) + 1
    start = 64 + 2 * 56
    entries += [(5, 4096 + start), (10, len(strings)), (0, 0)]  # DT_STRTAB, DT_STRSZ, DT_NULL
    dynamic = b"".join(struct.pack("<qQ", *entry) for entry in entries)
    end = start + len(strings) + len(dynamic)
    header = b"\x7fELF\x02\x01\x01" + bytes(9)
    header += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 2, 0, 0, 0)
    load = struct.pack("<IIQQQQQQ", 1, 4, 0, 4096, 4096, end, end, 4096)
    dynamic_at = start + len(strings)
    table = struct.pack("<IIQQQQQQ", 2, 4, dynamic_at, 4096 + dynamic_at, 4096 + dynamic_at, len(dynamic), len(dynamic), 8)
    return header + load + table + strings + dynamic


class World:
    """Folders of libraries that are none, and a dynamic linker that knows which were opened."""

    def __init__(self, folder):
        self.folder = folder
        self.linker = {"libcuda.so.1": "/usr/lib/libcuda.so.1", "libz.so.1": "/usr/lib/libz.so.1"}
        self.opened = []  # in order, what was asked for and found

    def put(self, place, soname, content=b""):
        """Write a library into a folder of this world, and return its path."""
        path = self.folder / place / soname
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return str(path)

    def put_wheels(self, *but):
        for soname, package in PACKAGES.items():
            if soname not in but:
                self.put(f"site/nvidia/{package}/lib", soname)
        for part in PARTS:
            if part not in but:
                self.put("site/nvidia/cudnn/lib", part, elf("libcudnn_ops_infer.so.8", "libz.so.1"))

    def dlopen(self, name):
        loaded = [path for path in self.opened if os.path.basename(path) == name]
        path = name if "/" in name else (loaded + [self.linker.get(name)])[0]
        if not path:
            raise OSError(f"{name}: cannot open shared object file: No such file or directory")
        if os.path.isfile(path) and Path(path).read_bytes() == b"broken":
            raise OSError(f"{path}: file too short")
        if path not in self.opened:
            self.opened.append(path)
        return types.SimpleNamespace(path=path)


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A machine with the GPU wheel of MXNet and the driver, and nothing of CUDA yet."""
    world = World(tmp_path)
    find_spec = cuda_libraries.importlib.util.find_spec

    def only_ours(name, *rest):
        if name == "nvidia":
            return types.SimpleNamespace(submodule_search_locations=[str(tmp_path / "site" / "nvidia")])
        return find_spec(name, *rest)

    monkeypatch.setattr(cuda_libraries.importlib.util, "find_spec", only_ours)
    monkeypatch.setattr(cuda_libraries, "_dlopen", world.dlopen)
    monkeypatch.setattr(cuda_libraries, "_path_of", lambda library: library.path)
    monkeypatch.setattr(cuda_libraries, "_LOCAL", str(tmp_path / "local"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    for name in ("LD_LIBRARY_PATH", "CONDA_PREFIX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    needs = [soname for soname in reversed(SONAMES) if soname != "libcublasLt.so.11"]
    monkeypatch.setenv("MXNET_LIBRARY_PATH", world.put("mxnet", "libmxnet.so", elf("libdl.so.2", *needs, "libc.so.6")))
    return world


# Reading what a library needs


@pytest.mark.parametrize("names", [[], ["libc.so.6"], SONAMES], ids=len)
def test_what_a_library_needs_is_read(tmp_path, names):
    (tmp_path / "a.so").write_bytes(elf(*names))
    assert cuda_libraries.needed(str(tmp_path / "a.so")) == names


def test_a_real_library_is_read():
    assert "libc.so.6" in cuda_libraries.needed(mx.libinfo.find_lib_path()[0])
    assert cuda_libraries.mxnet_library() == mx.libinfo.find_lib_path()[0]


@pytest.mark.parametrize(
    "content", [b"", b"\x7fELF", b"\x7fELF\x01\x01" + bytes(80), b"text" * 40], ids=["none", "cut", "32", "text"]
)
def test_what_is_no_library_needs_nothing(tmp_path, content):
    (tmp_path / "a.so").write_bytes(content)
    assert cuda_libraries.needed(str(tmp_path / "a.so")) == cuda_libraries.needed(str(tmp_path / "absent.so")) == []


def test_a_library_that_was_cut_short_never_raises(tmp_path):
    whole = elf(*SONAMES)
    for length in range(0, len(whole), 5):
        (tmp_path / "a.so").write_bytes(whole[:length])
        assert set(cuda_libraries.needed(str(tmp_path / "a.so"))) <= {*SONAMES, ""}


# Loading


def test_the_cpu_wheel_needs_nothing(world, monkeypatch):
    monkeypatch.setenv("MXNET_LIBRARY_PATH", world.put("mxnet", "libmxnet.so", elf("libgomp.so.1", "libopenblas.so.0")))
    cuda_libraries.load()
    assert (world.opened, cuda_libraries.libraries()) == ([], [])


def test_wheels_are_loaded_in_an_order_in_which_each_finds_what_it_needs(world):
    world.put_wheels()
    cuda_libraries.load()
    ours = [path for path in world.opened if path != world.linker["libz.so.1"]]
    assert [os.path.basename(path) for path in ours] == SONAMES
    assert all(path.startswith(str(world.folder / "site")) for path in ours[1:])


def test_what_the_linker_knows_comes_first(world):
    """LD_LIBRARY_PATH, ldconfig, and what another package has loaded: dlopen finds all three by the name."""
    world.put_wheels()
    world.linker["libcublas.so.11"] = "/opt/mine/libcublas.so.11"
    cuda_libraries.load()
    assert [path for path in world.opened if "libcublas.so" in path] == ["/opt/mine/libcublas.so.11"]


def test_wheels_conda_and_folders_of_cuda_in_this_order(world, monkeypatch):
    world.put_wheels("libnccl.so.2")
    monkeypatch.setenv("CONDA_PREFIX", str(world.folder / "conda"))
    monkeypatch.setenv("CUDA_HOME", str(world.folder / "home"))
    places = ["local/cuda-11.2/lib64", "local/cuda-11.10/lib64", "home/lib64", "prefix/lib", "conda/lib"]
    (world.folder / "prefix" / "conda-meta").mkdir(parents=True)
    expected = ["system", "system", "system", "conda", "conda"]
    world.put("local/cuda-12.0/lib64", "libnccl.so.2")
    for place, source in zip(places, expected):
        path = world.put(place, "libnccl.so.2")
        del world.opened[:]
        cuda_libraries.load()
        assert [one for one in world.opened if "nccl" in one] == [path]
        assert {library.name: library.source for library in cuda_libraries.libraries()}["NCCL"] == source
    path = world.put("site/nvidia/nccl/lib", "libnccl.so.2")
    del world.opened[:]
    cuda_libraries.load()
    assert [one for one in world.opened if "nccl" in one] == [path]


def test_a_library_that_cannot_be_loaded_is_looked_for_further_on(world, monkeypatch):
    world.put_wheels()
    world.put("site/nvidia/cufft/lib", "libcufft.so.10", b"broken")
    monkeypatch.setenv("CUDA_PATH", str(world.folder / "cuda"))
    path = world.put("cuda/lib64", "libcufft.so.10")
    cuda_libraries.load()
    assert [one for one in world.opened if "cufft" in one] == [path]


def refused():
    with pytest.raises(ImportError) as caught:
        cuda_libraries.load()
    assert_house_style(caught.value)
    return str(caught.value)


def test_all_that_is_missing_is_told_with_the_places_and_the_command(world, monkeypatch):
    world.put_wheels("libcudnn.so.8", "libnccl.so.2")
    monkeypatch.setenv("CUDA_HOME", str(world.folder / "home"))
    monkeypatch.setenv("LD_LIBRARY_PATH", "/some/where")
    told = refused()
    assert told.startswith("import mxnet: got no libcudnn.so.8; no libnccl.so.2; expected the CUDA libraries")
    assert f"wheel {world.folder}/site/nvidia, system" in told
    assert f"system {world.folder}/home/lib64" in told
    assert "LD_LIBRARY_PATH=/some/where" in told
    assert told.endswith("Run pip install 'gluon_mgpu[cu112]', which installs those of CUDA 11.")


def test_a_build_for_cuda_12_is_not_sent_to_the_extra_of_cuda_11(world, monkeypatch):
    monkeypatch.setattr(cuda_libraries, "_wanted", lambda: ["libcudart.so.12", "libcudnn.so.9"])
    assert refused().endswith("This MXNet was built for CUDA 12: install that CUDA, or run in the container that it comes from.")


def test_another_major_version_is_told(world):
    world.put_wheels("libcudnn.so.8")
    path = world.put("site/nvidia/cudnn/lib", "libcudnn.so.9")
    assert refused().startswith(f"import mxnet: got no libcudnn.so.8 (there is {path}); expected")


def test_a_library_that_cannot_be_loaded_is_told(world):
    world.put_wheels()
    path = world.put("site/nvidia/cufft/lib", "libcufft.so.10", b"broken")
    assert refused().startswith(f"import mxnet: got no libcufft.so.10 ({path}: file too short); expected")


def test_without_a_driver_nothing_else_is_loaded_or_looked_for(world):
    world.put_wheels()
    world.put("site/nvidia/cuda_runtime/lib", "libcuda.so.1")  # a driver belongs to the kernel: not to a wheel
    del world.linker["libcuda.so.1"]
    told = refused()
    assert "got no libcuda.so.1; expected the NVIDIA driver" in told
    assert "pip install 'gluon_mgpu[cpu]'" in told


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_cudnn_that_is_missing_is_told_now_and_not_with_the_first_convolution(world, part):
    world.put_wheels(part)
    assert refused().startswith(f"import mxnet: got no {part}, which cuDNN needs; expected")
    world.linker[part] = f"/opt/{part}"
    cuda_libraries.load()


def test_what_a_part_of_cudnn_needs_is_told(world):
    """A Python that was built apart from the system's may run where zlib is not installed."""
    world.put_wheels()
    del world.linker["libz.so.1"]
    told = refused()
    assert told.startswith("import mxnet: got no libz.so.1, which cuDNN needs; expected")
    assert "Ubuntu's package zlib1g. Run pip" in told


# What the doctor shows


def with_functions(path, functions):
    """A library whose functions write a number to their last argument, and return 0."""
    library = types.SimpleNamespace(path=path)
    for name, number in functions.items():

        def function(*arguments, number=number):
            arguments[-1]._obj.value = number[arguments[0]] if isinstance(number, tuple) else number
            return 0

        setattr(library, name, function)
    return library


def test_libraries_tell_their_versions_and_where_they_come_from(world, monkeypatch):
    world.put_wheels("libnccl.so.2", "libcurand.so.10", "libcusolver.so.11")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(world.folder / "chosen"))
    world.linker["libnccl.so.2"] = world.put("chosen", "libnccl.so.2")
    real = world.put("local/cuda-11.2/lib64", "libcusolver.so.11.0.2.7")
    os.symlink(real, str(world.folder / "local/cuda-11.2/lib64/libcusolver.so.11"))
    functions = {
        "libcuda.so.1": {"cuDriverGetVersion": 12040},
        "libnccl.so.2": {"ncclGetVersion": 22105},
        "libcublas.so.11": {"cublasGetProperty": (11, 11, 3)},
        "libcudnn.so.8": {"cudnnGetProperty": (8, 9, 6)},
    }
    monkeypatch.setattr(
        cuda_libraries, "_dlopen", lambda name: with_functions(world.dlopen(name).path, functions.get(os.path.basename(name), {}))
    )
    monkeypatch.setattr(cuda_libraries.metadata, "version", lambda name: {"nvidia-nvtx-cu11": "11.8.86"}.get(name, "of another"))
    found = {library.name: library for library in cuda_libraries.libraries()}
    assert [library.soname for library in found.values()] == SONAMES
    told = {name: (found[name].version, found[name].source) for name in ("NVIDIA driver", "NCCL", "cuBLAS", "cuDNN", "NVTX")}
    assert told == {
        "NVIDIA driver": ("12.4", "linker"),
        "NCCL": ("2.21.5", "linker"),
        "cuBLAS": ("11.11.3", "wheel"),
        "cuDNN": ("8.9.6", "wheel"),
        "NVTX": ("11.8.86", "wheel"),
    }
    assert (found["cuSOLVER"].version, found["cuSOLVER"].source) == ("11.0.2.7", "system")
    assert found["cuRAND"] == cuda_libraries.CudaLibrary("cuRAND", "libcurand.so.10", "", "", "missing")


@pytest.mark.parametrize(
    "stem, functions, expected",
    [
        ("libcuda", {"cuDriverGetVersion": 11020}, "11.2"),
        ("libcudart", {"cudaRuntimeGetVersion": 11080}, "11.8"),
        ("libnccl", {"ncclGetVersion": 2804}, "2.8.4"),
        ("libnccl", {"ncclGetVersion": 21605}, "2.16.5"),
        ("libcufft", {"cufftGetProperty": (10, 9, 0)}, "10.9.0"),
        ("libcublasLt", {"cublasLtGetProperty": (11, 3, 1)}, "11.3.1"),
    ],
)
def test_versions_are_read_as_their_makers_write_them(stem, functions, expected):
    assert cuda_libraries._KNOWN[stem].version(with_functions("", functions)) == expected


def test_nvrtc_writes_two_numbers():
    def version(major, minor):
        major._obj.value, minor._obj.value = 11, 2
        return 0

    assert cuda_libraries._KNOWN["libnvrtc"].version(types.SimpleNamespace(nvrtcVersion=version)) == "11.2"


def test_the_file_of_a_loaded_library_is_known():
    path = cuda_libraries._path_of(ctypes.CDLL(mx.libinfo.find_lib_path()[0]))
    assert os.path.realpath(path) == os.path.realpath(mx.libinfo.find_lib_path()[0])


# The whole, with a linker that is one


def test_a_library_finds_what_was_loaded_for_it(tmp_path):
    if not shutil.which("cc"):
        pytest.skip("needs a C compiler, cc")

    def compiled(place, soname, source, *options):
        folder = tmp_path / place
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "a.c").write_text(source)
        command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{soname}", "-o", str(folder / soname), str(folder / "a.c"), *options]
        subprocess.run(command, check=True, timeout=240)
        return str(folder / soname)

    version = "int cufftGetProperty(int which, int *value) { *value = which + 7; return 0; }"
    cufft = compiled("site/nvidia/cufft/lib", "libcufft.so.10", version)
    mxnet = compiled("mxnet", "libmxnet.so", "int cufftGetProperty(); int (*used)() = cufftGetProperty;", cufft)
    program = f"""
        import ctypes, sys
        sys.path.insert(0, {str(tmp_path / "site")!r})
        import importlib.util
        spec = importlib.util.spec_from_file_location("cuda", {cuda_libraries.__file__!r})
        cuda = sys.modules["cuda"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(cuda)
        try:
            ctypes.CDLL({mxnet!r})
        except OSError as error:
            print(error)
        cuda.load()
        ctypes.CDLL({mxnet!r})
        (library,) = cuda.libraries()
        print(library.path, library.version, library.source)
        print(hasattr(ctypes.CDLL(None), "cufftGetProperty"))  # for all that come after it
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "MXNET_LIBRARY_PATH": mxnet},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=240,
        text=True,
    )
    before, after, is_global = done.stdout.splitlines()
    assert before.startswith("libcufft.so.10: cannot open shared object file")
    assert after == f"{cufft} 7.8.9 wheel"
    assert is_global == "True"


# The extra that brings them


def test_the_extra_brings_every_library_in_a_version_that_was_tried():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    lines = config["options.extras_require"]["cu112"].split("\n")
    found = [
        re.fullmatch(r"nvidia-(\w[\w-]*)-cu11==([\d.]+); .*Linux.* and .*x86_64.*", line) for line in lines if "-cu11=" in line
    ]
    wheels = dict(match.groups() for match in found)
    assert {name.replace("-", "_") for name in wheels} == set(PACKAGES.values())
    assert wheels["cudnn"].startswith("8.")
    assert "mxnet-cu112==1.9.1" in lines


def test_a_module_that_is_only_called_nvidia_has_no_wheels(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvidia", types.ModuleType("nvidia"))
    assert list(cuda_libraries._wheel_folders()) == []


def test_a_function_of_cuda_that_fails_has_no_answer():
    def fails(pointer):
        return 35  # cudaErrorInsufficientDriver

    with pytest.raises(OSError, match="cudaRuntimeGetVersion failed"):
        cuda_libraries._ask(types.SimpleNamespace(cudaRuntimeGetVersion=fails), "cudaRuntimeGetVersion")

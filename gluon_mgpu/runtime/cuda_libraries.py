"""The CUDA libraries that MXNet's GPU wheel is linked to: found and loaded before `import mxnet`."""

from __future__ import annotations

import ctypes
import glob
import importlib.util
import os
import re
import struct
import sys
from dataclasses import dataclass
from importlib import metadata
from typing import Any, BinaryIO, Callable, Dict, Iterable, Iterator, List, Tuple

Version = Callable[[Any], str]

_LOCAL = "/usr/local"  # NVIDIA's installer creates cuda-11.2, cuda-11.8, ... here
_CUDNN_PARTS = ("ops_infer", "ops_train", "cnn_infer", "cnn_train", "adv_infer", "adv_train")
_HINTS = {"libz.so.1": "libz.so.1 is Debian's and Ubuntu's package zlib1g."}
_DRIVER = "libcuda"
_RTLD_DI_LINKMAP = 2  # dlfcn.h


@dataclass(frozen=True)
class CudaLibrary:
    """A CUDA library that MXNet is linked to.

    Attributes
    ----------
    name : str
        Its product name: `CUDA runtime`, `cuDNN`.
    soname : str
        MXNet's name for it: `libcudnn.so.8`.
    path : str
        The file; "" if it is missing.
    version : str
        The version that the library reports, otherwise that of its wheel or file name; "" if unknown.
    source : str
        The origin of the file: `wheel` (a package nvidia-*-cu11), `conda`, `system` (a folder of CUDA), `linker`
        (`LD_LIBRARY_PATH`, or another path of the dynamic linker), or `missing`.
    """

    name: str
    soname: str
    path: str
    version: str
    source: str


def load() -> None:
    """Load the CUDA libraries of MXNet that the dynamic linker does not find.

    ```
    loaded already, LD_LIBRARY_PATH, ldconfig  ─►  wheels nvidia-*-cu11  ─►  conda  ─►  CUDA_HOME, CUDA_PATH, /usr/local/cuda-11*
    ```

    The first place with a library is used. MXNet's CPU wheel needs no such library: then nothing is loaded.

    Raises
    ------
    ImportError
        A library is missing, exists only in another major version, or cannot be loaded.
    """
    found = {soname: _open(soname) for soname in _wanted()}
    missing = [soname for soname, (library, _) in found.items() if library is None]
    if missing and missing[0].startswith(f"{_DRIVER}.so"):
        raise ImportError(
            f"import mxnet: got no {missing[0]}; expected the NVIDIA driver: MXNet's GPU wheel needs it, also on the CPU. "
            "Install the driver (in a container: docker run --gpus all), or use the CPU wheel: run pip uninstall mxnet-cu112, "
            "then pip install 'gluon_mgpu[cpu]'."
        )
    if missing:
        _refuse([found[soname][1] for soname in missing], found)
    for soname, (library, _) in found.items():
        if soname == "libcudnn.so.8":
            lacking = _missing_parts(_path_of(library))
            if lacking:
                _refuse(lacking, found)


def libraries() -> List[CudaLibrary]:
    """Return the CUDA libraries that MXNet's library needs, with origins and versions; [] for the CPU wheel.

    It needs no GPU: libraries report their versions without one.

    Examples
    --------
    >>> all(library.source in ("linker", "wheel", "conda", "system", "missing") for library in libraries())
    True
    """
    return [_describe(soname) for soname in _wanted()]


def cuda_major(sonames: Iterable[str]) -> int:
    """Return the major version of CUDA to which a library with these dependencies is linked, 0 if it is linked to none.

    Examples
    --------
    >>> cuda_major(["libcudart.so.11.0", "libcudnn.so.8"]), cuda_major(["libcudart.so.12"]), cuda_major(["libm.so.6"])
    (11, 12, 0)
    """
    matches = (re.match(r"libcudart\.so\.(\d+)", soname) for soname in sonames)
    return next((int(match.group(1)) for match in matches if match), 0)


def needed(path: str) -> List[str]:
    """Return the libraries that a shared library needs (its DT_NEEDED entries), [] if it is not a 64-bit ELF file.

    Source: System V ABI, chapters "Object Files" and "Program Loading and Dynamic Linking"; elf(5).
    """
    try:
        with open(path, "rb") as file:
            return _read_needed(file)
    except (OSError, struct.error, ValueError, StopIteration):
        return []


def _read_needed(file: BinaryIO) -> List[str]:
    header = file.read(64)
    if header[:6] != b"\x7fELF\x02\x01":  # 64 bit, little endian
        return []
    (table,) = struct.unpack_from("<Q", header, 32)
    size, count = struct.unpack_from("<HH", header, 54)
    file.seek(table)
    segments = [struct.unpack_from("<IIQQQQ", file.read(size)) for _ in range(count)]
    entries: List[Tuple[int, int]] = []
    for kind, _, offset, _, _, num_bytes in segments:
        if kind == 2:  # PT_DYNAMIC
            file.seek(offset)
            entries += struct.iter_unpack("<qQ", file.read(num_bytes // 16 * 16))
    strings = next(value for tag, value in entries if tag == 5)  # DT_STRTAB, an address in memory
    names = next(
        strings - address + offset
        for kind, _, offset, address, _, num_bytes in segments
        if kind == 1 and address <= strings < address + num_bytes  # PT_LOAD
    )
    return [_read_string(file, names + value) for tag, value in entries if tag == 1]


def _read_string(file: BinaryIO, offset: int) -> str:
    file.seek(offset)
    return file.read(4096).partition(b"\0")[0].decode()


def mxnet_library() -> str:
    """Return the file that `import mxnet` will load, "" if there is none.

    Source: mxnet 1.9.1, libinfo.py, `find_lib_path`.
    """
    spec = importlib.util.find_spec("mxnet")
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(":") if os.environ.get("LD_LIBRARY_PATH") else []
    for package in (spec.submodule_search_locations or []) if spec else []:
        folders += [package, os.path.join(package, "../../lib"), os.path.join(package, "../../build")]
    files = [os.environ.get("MXNET_LIBRARY_PATH", ""), *(os.path.join(folder.strip(), "libmxnet.so") for folder in folders)]
    return next((file for file in files if os.path.isfile(file)), "")


def _wanted() -> List[str]:
    """Return the sonames of the CUDA libraries that MXNet's library needs, each after its own dependencies."""
    sonames = {soname.partition(".so")[0]: soname for soname in needed(mxnet_library())}
    if "libcublas" in sonames:  # it needs cublasLt, and finds it only in its own folder
        sonames["libcublasLt"] = sonames["libcublas"].replace("libcublas", "libcublasLt")
    return [sonames[stem] for stem in _KNOWN if stem in sonames]


def _open(soname: str) -> Tuple[Any, str]:
    """Return a library, loaded for later ones, and ""; or None and the reason, with other versions that exist."""
    try:
        return _dlopen(soname), ""  # this also finds a library that is already loaded
    except OSError as error:
        why = "" if "No such file" in str(error) else f" ({error})"
    for folder in [folder for _, folder in _folders()] if not soname.startswith(f"{_DRIVER}.so") else []:
        path = os.path.join(folder, soname)
        if not os.path.exists(path):
            continue
        try:
            return _dlopen(path), ""
        except OSError as error:
            why = why or f" ({error})"
    return None, f"no {soname}{why or _in_its_place(soname)}"


def _dlopen(name: str) -> Any:
    return ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)


def _in_its_place(soname: str) -> str:
    """Return the other versions of a library that exist, as part of a sentence."""
    pattern = re.escape(soname.partition(".so")[0]) + r"\.so\.\d+[\d.]*"
    names = (os.path.join(folder, name) for _, folder in _folders() for name in sorted(_names_in(folder)))
    others = [name for name in names if re.fullmatch(pattern, os.path.basename(name))]
    return f" (there is {', '.join(others)})" if others else ""


def _names_in(folder: str) -> List[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _missing_parts(cudnn: str) -> List[str]:
    """Return the parts that cuDNN 8 will not find at the first convolution, and the missing dependencies of its parts."""
    found = []
    folders = {os.path.dirname(cudnn), os.path.dirname(os.path.realpath(cudnn))}
    for part in _CUDNN_PARTS:
        soname = f"libcudnn_{part}.so.8"
        present = [path for path in (os.path.join(folder, soname) for folder in folders) if os.path.isfile(path)]
        names = [name for name in needed(present[0]) if not name.startswith("libcudnn")] if present else [soname]
        found += [f"no {name}, which cuDNN needs" for name in names if not _can_open(name)]
    return sorted(set(found))


def _can_open(name: str) -> bool:
    try:
        return bool(_dlopen(name))
    except OSError:
        return False


def _refuse(found: List[str], wanted: Iterable[str]) -> None:
    major = cuda_major(wanted)
    to_do = "Run pip install 'gluon_mgpu[cu112]', which installs those of CUDA 11."
    if major > 11:  # of no wheel from PyPI
        to_do = f"This MXNet was built for CUDA {major}: install that CUDA, or run in the container that it comes from."
    shown = [(source, os.path.dirname(os.path.dirname(folder)) if source == "wheel" else folder) for source, folder in _folders()]
    places = ", ".join(dict.fromkeys(f"{source} {folder}" for source, folder in shown)) or "nothing else"
    hints = [hint for name, hint in _HINTS.items() if any(f" {name}" in line for line in found)]
    raise ImportError(
        f"import mxnet: got {'; '.join(found)}; expected the CUDA libraries that MXNet's library is linked to. Searched "
        f"by the dynamic linker (LD_LIBRARY_PATH={os.environ.get('LD_LIBRARY_PATH', '')}), and in: {places}. "
        + " ".join([*hints, to_do])
    )


def _folders() -> Iterator[Tuple[str, str]]:
    """Yield (origin, folder) of places of CUDA's libraries, in addition to those of the dynamic linker."""
    yield from (("wheel", folder) for folder in _wheel_folders())
    prefixes = [os.environ.get("CONDA_PREFIX", ""), sys.prefix if os.path.isdir(os.path.join(sys.prefix, "conda-meta")) else ""]
    yield from (("conda", os.path.join(prefix, "lib")) for prefix in dict.fromkeys(prefixes) if prefix)
    roots = [os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", ""), *_installed()]
    for root in dict.fromkeys(roots):
        yield from (("system", os.path.join(root, name)) for name in ("lib64", "lib") if root)


def _wheel_folders() -> List[str]:
    try:
        spec = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):  # another module of that name
        spec = None
    packages = list(spec.submodule_search_locations or []) if spec else []
    return [folder for package in packages for folder in sorted(glob.glob(os.path.join(glob.escape(package), "*", "lib")))]


def _installed() -> List[str]:
    """Return the folders of CUDA 11 from NVIDIA's installer, the newest first."""
    roots = glob.glob(os.path.join(glob.escape(_LOCAL), "cuda-11*"))
    return sorted(roots, key=lambda root: [int(number) for number in re.findall(r"\d+", os.path.basename(root))], reverse=True)


def _describe(soname: str) -> CudaLibrary:
    known = _KNOWN[soname.partition(".so")[0]]
    library, _ = _open(soname)
    if library is None:
        return CudaLibrary(known.name, soname, "", "", "missing")
    path = _path_of(library)
    try:
        version = known.version(library)
    except (AttributeError, OSError):  # it has no such function
        version = ""
    return CudaLibrary(known.name, soname, path, version or _version_of_file(path), _source_of(path))


class _LinkMap(ctypes.Structure):
    """The beginning of the result of `dlinfo` for a loaded library."""

    _fields_ = [("address", ctypes.c_void_p), ("name", ctypes.c_char_p)]


def _path_of(library: Any) -> str:
    """Return the file of a loaded library.

    Source: dlinfo(3).
    """
    link_map = ctypes.POINTER(_LinkMap)()
    if ctypes.CDLL(None).dlinfo(ctypes.c_void_p(library._handle), _RTLD_DI_LINKMAP, ctypes.byref(link_map)):
        return ""
    return os.fsdecode(link_map.contents.name or b"")


def _source_of(path: str) -> str:
    folder = os.path.realpath(os.path.dirname(path))
    chosen = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    if folder in [os.path.realpath(one) for one in chosen if one]:
        return "linker"
    return next((source for source, one in _folders() if os.path.realpath(one) == folder), "linker")


def _version_of_file(path: str) -> str:
    """Return the version of a file's wheel, otherwise the version in its name, otherwise ""."""
    package = os.path.basename(os.path.dirname(os.path.dirname(path))).replace("_", "-")
    try:
        return metadata.version(f"nvidia-{package}-cu11") if _source_of(path) == "wheel" else _version_in_name(path)
    except metadata.PackageNotFoundError:
        return _version_in_name(path)


def _version_in_name(path: str) -> str:
    return os.path.basename(os.path.realpath(path)).partition(".so")[2].lstrip(".")


def _ask(library: Any, function: str, *arguments: Any) -> int:
    """Return the int that a function of CUDA writes to its last argument, a pointer."""
    value = ctypes.c_int()
    if getattr(library, function)(*arguments, ctypes.byref(value)):
        raise OSError(f"{function} failed")
    return value.value


def _number(function: str) -> Version:
    """Return a reader of CUDA's versions: 11080 is 11.8."""

    def version(library: Any) -> str:
        number = _ask(library, function)
        return f"{number // 1000}.{number % 1000 // 10}"

    return version


def _properties(prefix: str) -> Version:
    """Return a reader of the versions of CUDA's mathematical libraries: 11, 11 and 3 are 11.11.3.

    Source: library_types.h, `libraryPropertyType`: MAJOR_VERSION, MINOR_VERSION, PATCH_LEVEL are 0, 1, 2.
    """
    return lambda library: ".".join(str(_ask(library, f"{prefix}GetProperty", i)) for i in range(3))


def _nccl(library: Any) -> str:
    """Return NCCL's version: 22105 is 2.21.5, and before 2.9, 2804 was 2.8.4.

    Source: nccl.h, `NCCL_VERSION`.
    """
    number = _ask(library, "ncclGetVersion")
    hundreds = 10000 if number >= 10000 else 1000
    return f"{number // hundreds}.{number % hundreds // 100}.{number % 100}"


def _nvrtc(library: Any) -> str:
    major = ctypes.c_int()
    minor = _ask(library, "nvrtcVersion", ctypes.byref(major))
    return f"{major.value}.{minor}"


@dataclass(frozen=True)
class _Known:
    name: str
    version: Version


# By the beginning of their sonames, each after its dependencies.
_KNOWN: Dict[str, _Known] = {
    _DRIVER: _Known("NVIDIA driver", _number("cuDriverGetVersion")),
    "libcudart": _Known("CUDA runtime", _number("cudaRuntimeGetVersion")),
    "libnvrtc": _Known("NVRTC", _nvrtc),
    "libcublasLt": _Known("cuBLASLt", _properties("cublasLt")),
    "libcublas": _Known("cuBLAS", _properties("cublas")),
    "libcufft": _Known("cuFFT", _properties("cufft")),
    "libcurand": _Known("cuRAND", _properties("curand")),
    "libcusparse": _Known("cuSPARSE", _properties("cusparse")),
    "libcusolver": _Known("cuSOLVER", _properties("cusolver")),
    "libcudnn": _Known("cuDNN", _properties("cudnn")),
    "libnccl": _Known("NCCL", _nccl),
    "libnvToolsExt": _Known("NVTX", lambda library: ""),
}

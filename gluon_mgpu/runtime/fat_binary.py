"""The GPUs for which a compiled library contains code, read from its fat binaries."""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Iterator, List, Set, Tuple

Capability = Tuple[int, int]

SECTION = ".nv_fatbin"  # nvcc's section for fat binaries
_MAGIC = 0xBA55ED50
_PTX, _CUBIN = 1, 2
_KINDS = {_PTX, _CUBIN}
_HEADER = struct.Struct("<IHHQ")  # magic, version, bytes of this header, bytes of the entries after it
_ENTRY = struct.Struct("<HHIQIIHHI")  # kind, version, bytes of header and code; compressed, names, minor, major; architecture
_ELF = struct.Struct("<4sBB10xHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_NO_BITS = 8  # SHT_NOBITS: a section without bytes in the file


class FatBinaryError(ValueError):
    """A file is not a 64-bit little-endian ELF library, or its fat binaries are damaged."""


@dataclass(frozen=True)
class FatBinaries:
    """The GPUs for which a library contains code.

    Attributes
    ----------
    machine_code : tuple of (int, int)
        Compute capabilities of machine code, in ascending order.
    ptx : tuple of (int, int)
        Compute capabilities of PTX, which the driver compiles for newer GPUs.
    num_binaries : int
        The number of fat binaries: 0 in a library without GPU code.
    """

    machine_code: Tuple[Capability, ...]
    ptx: Tuple[Capability, ...]
    num_binaries: int

    def code_for(self, capability: Capability) -> str:
        """Return the code that a GPU of this compute capability runs: `8.6`, `PTX 7.0`, or "" if there is none.

        Machine code runs on GPUs of its major version, from its minor version on; PTX runs on every later GPU.

        Examples
        --------
        >>> wheel = FatBinaries(((7, 0), (8, 0), (8, 6)), (), 1)
        >>> wheel.code_for((8, 9)), wheel.code_for((7, 5)), wheel.code_for((9, 0))
        ('8.6', '7.0', '')
        >>> FatBinaries((), ((7, 0),), 1).code_for((9, 0))
        'PTX 7.0'

        Source: NVIDIA, "CUDA C++ Programming Guide", binary compatibility and PTX compatibility.
        """
        fitting = [own for own in self.machine_code if own[0] == capability[0] and own <= capability]
        if fitting:
            return version_text(max(fitting))
        older = [virtual for virtual in self.ptx if virtual <= capability]
        return f"PTX {version_text(max(older))}" if older else ""


def version_text(capability: Capability) -> str:
    """Return (8, 6) as "8.6"."""
    return f"{capability[0]}.{capability[1]}"


def read_fat_binaries(path: str) -> FatBinaries:
    """Return the GPUs for which a library contains code. A file that does not change is read once per process.

    It reads only headers: of the ELF file, its sections, each fat binary and each entry.

    ```
    libmxnet.so:  ELF header │ ... │ .nv_fatbin │ ... │ section headers
                                     │
                     header ─ entry code entry code ... ─ header ─ entry code ...
    ```

    Parameters
    ----------
    path : str
        A shared library, or another 64-bit little-endian ELF file.

    Raises
    ------
    FatBinaryError
        It is another kind of file, truncated, or damaged.
    OSError
        It cannot be read.

    Source: fatbinary_section.h of the CUDA toolkit for the section. NVIDIA does not document the headers; they are as found in
    libraries of CUDA 10.2 to 13.
    """
    status = os.stat(path)
    return _read(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=None)
def _read(path: str, size: int, _mtime_ns: int) -> FatBinaries:
    if not size:
        raise FatBinaryError(
            f"read_fat_binaries: got {path}, which is empty; expected an ELF library. Install its package again."
        )
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if hasattr(mmap, "MADV_RANDOM"):
            data.madvise(mmap.MADV_RANDOM)  # headers are far apart: do not read ahead between them
        try:
            return _collect(data)
        except (struct.error, IndexError) as error:
            raise FatBinaryError(
                f"read_fat_binaries: got {path}, which ends in the middle of a header; expected a complete "
                "library. Install its package again."
            ) from error
        except FatBinaryError as error:
            raise FatBinaryError(
                f"read_fat_binaries: got {path}, {error}; expected a 64-bit little-endian ELF library. Install its package again."
            ) from error


def _collect(data: mmap.mmap) -> FatBinaries:
    machine_code: Set[Capability] = set()
    ptx: Set[Capability] = set()
    num_binaries = 0
    for start, end in _sections(data):
        for first, last in _binaries(data, start, end):
            num_binaries += 1
            for kind, capability in _entries(data, first, last):
                (machine_code if kind == _CUBIN else ptx).add(capability)
    return FatBinaries(tuple(sorted(machine_code)), tuple(sorted(ptx)), num_binaries)


def _sections(data: mmap.mmap) -> List[Tuple[int, int]]:
    """Return the begin and end in the file of the sections of fat binaries."""
    magic, width, order, *_ = _ELF.unpack_from(data, 0)
    if magic != b"\x7fELF" or (width, order) != (2, 1):
        raise FatBinaryError("another kind of file")
    *_, table, _flags, _header, _size, _num, entry_size, num_sections, names = _ELF.unpack_from(data, 0)
    headers = [_SECTION.unpack_from(data, table + i * entry_size) for i in range(num_sections)]
    if not headers:
        return []
    names_at = headers[names][4]
    wanted = SECTION.encode() + b"\0"
    found = []
    for name, kind, _flag, _address, offset, size, *_ in headers:
        at = names_at + name
        if kind != _NO_BITS and data[at : at + len(wanted)] == wanted:
            found.append((offset, offset + size))
    if any(end > len(data) for _, end in found):
        raise FatBinaryError("which ends before its fat binaries do")
    return found


def _binaries(data: mmap.mmap, start: int, end: int) -> Iterator[Tuple[int, int]]:
    """Yield the begin and end of the entries of each fat binary."""
    at = start
    while at + _HEADER.size <= end:
        magic, _version, header_bytes, num_bytes = _HEADER.unpack_from(data, at)
        if magic == 0:  # the linker aligns each part
            at += 8
            continue
        first = at + header_bytes
        if magic != _MAGIC or header_bytes < _HEADER.size or first + num_bytes > end:
            raise FatBinaryError(f"which has no fat binary at byte {at}")
        yield first, first + num_bytes
        at = -(-(first + num_bytes) // 8) * 8


def _entries(data: mmap.mmap, first: int, last: int) -> Iterator[Tuple[int, Capability]]:
    """Yield kind and compute capability of each entry that is machine code or PTX."""
    at = first
    while at + _ENTRY.size <= last:
        kind, _version, header_bytes, num_bytes, *_, architecture = _ENTRY.unpack_from(data, at)
        if header_bytes < _ENTRY.size or at + header_bytes + num_bytes > last:
            raise FatBinaryError(f"whose fat binary is damaged at byte {at}")
        if kind in _KINDS:
            yield kind, divmod(architecture, 10)
        at += header_bytes + num_bytes

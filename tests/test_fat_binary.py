"""Fat binaries, in libraries that are made here byte by byte."""

import struct

import mxnet as mx
import pytest
from gluon_mgpu.runtime import fat_binary
from gluon_mgpu.runtime.fat_binary import FatBinaries, FatBinaryError, read_fat_binaries

from .conftest import assert_house_style

PTX, CUBIN = 1, 2


def entry(kind, architecture, code=b"code" * 6, header_bytes=64):
    """A header of 64 bytes as nvcc of CUDA 11.2 writes it, with code after it."""
    header = struct.pack("<HHIQIIHHI", kind, 0x101, header_bytes, len(code), len(code), 0, 1, 7, architecture)
    return header.ljust(header_bytes, b"\0") + code


def binary(*entries):
    """A fat binary of these entries."""
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def library(path, content, *, section=".nv_fatbin", kind=1):
    """A file with ELF header, one section, names of sections and section headers, in that order."""
    names = b"\0.shstrtab\0" + section.encode() + b"\0"
    content_at = 64
    names_at = content_at + len(content)
    table_at = names_at + len(names)
    header = struct.pack("<4sBBBxxxxxxxxxHHIQQQIHHHHHH", b"\x7fELF", 2, 1, 1, 3, 62, 1, 0, 0, table_at, 0, 64, 0, 0, 64, 3, 2)
    sections = b"\0" * 64
    sections += struct.pack("<IIQQQQIIQQ", 11, kind, 0, 0, content_at, len(content), 0, 0, 8, 0)
    sections += struct.pack("<IIQQQQIIQQ", 1, 3, 0, 0, names_at, len(names), 0, 0, 1, 0)
    path.write_bytes(header + content + names + sections)
    return str(path)


def test_machine_code_and_ptx_are_told_apart(tmp_path):
    content = binary(entry(CUBIN, 86), entry(CUBIN, 50), entry(PTX, 70)) + binary(entry(CUBIN, 50))
    found = read_fat_binaries(library(tmp_path / "lib.so", content))
    assert found == FatBinaries(((5, 0), (8, 6)), ((7, 0),), 2)


def test_two_digits_of_the_major_version(tmp_path):
    found = read_fat_binaries(library(tmp_path / "lib.so", binary(entry(CUBIN, 100), entry(PTX, 120))))
    assert (found.machine_code, found.ptx) == (((10, 0),), ((12, 0),))


def test_other_entries_and_longer_headers_are_passed_over(tmp_path):
    content = binary(entry(8, 75), entry(CUBIN, 80, header_bytes=96), entry(CUBIN, 70))
    assert read_fat_binaries(library(tmp_path / "lib.so", content)).machine_code == ((7, 0), (8, 0))


def test_padding_between_binaries_is_passed_over(tmp_path):
    content = binary(entry(CUBIN, 60, b"12345")) + b"\0" * 3 + b"\0" * 16 + binary(entry(CUBIN, 70))
    assert read_fat_binaries(library(tmp_path / "lib.so", content)).machine_code == ((6, 0), (7, 0))


def test_a_magic_number_inside_code_is_no_binary(tmp_path):
    inner = binary(entry(CUBIN, 90))
    found = read_fat_binaries(library(tmp_path / "lib.so", binary(entry(CUBIN, 70, inner))))
    assert found == FatBinaries(((7, 0),), (), 1)


@pytest.mark.parametrize("section, kind", [(".rodata", 1), (".nv_fatbin2", 1), (".nv_fatbin", 8)])
def test_only_the_section_itself_counts(tmp_path, section, kind):
    path = library(tmp_path / "lib.so", binary(entry(CUBIN, 70)), section=section, kind=kind)
    assert read_fat_binaries(path) == FatBinaries((), (), 0)


def test_the_library_of_the_cpu_wheel_holds_none():
    if mx.runtime.Features().is_enabled("CUDA"):
        pytest.skip("this is a wheel for GPUs")
    assert read_fat_binaries(mx.libinfo.find_lib_path()[0]) == FatBinaries((), (), 0)


@pytest.mark.gpu
def test_the_library_here_holds_code_for_the_gpus_that_run():
    code = read_fat_binaries(mx.libinfo.find_lib_path()[0])
    assert code.num_binaries > 0 and code.machine_code


def cut(data):
    return data[: len(data) // 2]


@pytest.mark.parametrize(
    "broken, named",
    [
        (lambda data: b"", "empty"),
        (lambda data: b"PK\x03\x04" + data[4:], "another kind of file"),
        (lambda data: data[:4] + b"\x01" + data[5:], "another kind of file"),
        (lambda data: data[:40], "middle of a header"),
        (cut, "middle of a header"),
        (lambda data: data[:64] + b"\x01" + data[65:], "no fat binary at byte 64"),
        (lambda data: data[:72] + b"\xff\xff" + data[74:], "no fat binary at byte 64"),
        (lambda data: data[:84] + struct.pack("<I", 2) + data[88:], "damaged at byte 80"),
        (lambda data: data[:88] + struct.pack("<Q", 10**6) + data[96:], "damaged at byte 80"),
    ],
    ids=["empty", "zip", "32bit", "header", "cut", "magic", "length", "entry-header", "entry-length"],
)
def test_what_is_broken_is_told(tmp_path, broken, named):
    path = tmp_path / "lib.so"
    library(path, binary(entry(CUBIN, 70)))
    path.write_bytes(broken(path.read_bytes()))
    with pytest.raises(FatBinaryError, match=named) as caught:
        read_fat_binaries(str(path))
    assert str(path) in str(caught.value)
    assert_house_style(caught.value)


def test_a_section_beyond_the_file_is_told(tmp_path):
    path = tmp_path / "lib.so"
    library(path, binary(entry(CUBIN, 70)))
    data = bytearray(path.read_bytes())
    table = struct.unpack_from("<Q", data, 40)[0]
    struct.pack_into("<Q", data, table + 64 + 32, 10**6)  # its size
    path.write_bytes(data)
    with pytest.raises(FatBinaryError, match="ends before its fat binaries do"):
        read_fat_binaries(str(path))


def test_a_file_is_read_once_and_again_after_a_change(tmp_path, monkeypatch):
    path = library(tmp_path / "lib.so", binary(entry(CUBIN, 70)))
    assert read_fat_binaries(path).machine_code == ((7, 0),)
    with monkeypatch.context() as patch:
        patch.setattr(fat_binary, "_collect", None)
        assert read_fat_binaries(path).machine_code == ((7, 0),)
    library(tmp_path / "lib.so", binary(entry(CUBIN, 80), entry(CUBIN, 86)))
    assert read_fat_binaries(path).machine_code == ((8, 0), (8, 6))


WHEEL = FatBinaries(((5, 0), (6, 0), (7, 0), (8, 0), (8, 6)), (), 198)


@pytest.mark.parametrize(
    "capability, runs",
    [
        ((3, 7), ""),
        ((5, 2), "5.0"),
        ((6, 1), "6.0"),
        ((7, 5), "7.0"),
        ((8, 0), "8.0"),
        ((8, 6), "8.6"),
        ((8, 9), "8.6"),
        ((9, 0), ""),
        ((10, 0), ""),
        ((12, 0), ""),
    ],
)
def test_machine_code_runs_within_a_major_version_from_its_minor_on(capability, runs):
    assert WHEEL.code_for(capability) == runs


def test_machine_code_of_a_later_minor_version_does_not_run():
    assert FatBinaries(((8, 6),), (), 1).code_for((8, 0)) == ""


def test_ptx_runs_on_what_comes_later_only():
    code = FatBinaries((), ((5, 2), (7, 0)), 1)
    assert [code.code_for(one) for one in ((5, 0), (6, 0), (7, 0), (12, 0))] == ["", "PTX 5.2", "PTX 7.0", "PTX 7.0"]

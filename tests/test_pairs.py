"""Parallel text: what is read, and where a file is wrong."""

import os
import unicodedata

import pytest
from gluon_mgpu.data import SentencePairs, normalise, read_pairs, read_tsv, split_pairs
from gluon_mgpu.errors import DataError

from .conftest import assert_house_style


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def told(error, *parts):
    assert_house_style(error)
    for part in parts:
        assert part in str(error), (part, str(error))


def test_two_files_line_by_line(write):
    pairs = read_pairs(write("k", "하나\n둘  셋 \n"), write("e", "one\n two\tthree"))
    assert list(pairs) == [("하나", "one"), ("둘 셋", "two three")]
    assert (pairs.source, pairs.target) == (("하나", "둘 셋"), ("one", "two three"))
    assert list(pairs.swapped()) == [("one", "하나"), ("two three", "둘 셋")]


def test_a_tsv_gives_two_of_its_columns(write):
    path = write("pairs.tsv", 'one\t하나\tby "me\ntwo "2"\t둘\n')
    assert list(read_tsv(path)) == [("one", "하나"), ('two "2"', "둘")]
    assert read_tsv(path, source_column=1, target_column=0).source == ("하나", "둘")


def test_korean_becomes_nfc(write):
    decomposed = unicodedata.normalize("NFD", "한국어 값")
    assert len(decomposed) > len("한국어 값")
    pairs = read_pairs(write("k", decomposed), write("e", "Korean value"))
    assert pairs.source == ("한국어 값",)


@pytest.mark.parametrize("ending", ["\r\n", "\n"])
def test_windows_files_read_the_same(write, ending):
    lines = ["하나", "둘"]
    path = write("k", b"\xef\xbb\xbf" + (ending.join(lines) + ending).encode())
    assert list(read_pairs(path, path).source) == lines


def test_only_a_line_feed_ends_a_line(write):
    """str.splitlines knows seven more line ends, which would shift every sentence after one."""
    pairs = read_pairs(write("k", "a\u2028b\x0bc\x85d\nz\n"), write("e", "1\n2\n"))
    assert list(pairs) == [("a b c d", "1"), ("z", "2")]


def test_other_numbers_of_lines_are_told(write):
    source, target = write("k", "하나\n둘\n셋\n"), write("e", "one\ntwo\n")
    with pytest.raises(DataError) as caught:
        read_pairs(source, target)
    told(caught.value, f"3 lines in {source}", f"2 in {target}", "line 3")


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_bytes_that_are_not_utf8_are_told_with_their_line(write, mark):
    path = write("k", mark + "하나\n둘\n".encode() + "셋".encode("cp949") + b"\n")
    for read in (lambda: read_pairs(path, path), lambda: read_tsv(path)):
        with pytest.raises(DataError) as caught:
            read()
        told(caught.value, f"byte 0x{'셋'.encode('cp949')[0]:02x}", f"{path} line 3", "UTF-8")


@pytest.mark.parametrize("source, target, side", [("a\n \nc\n", "1\n2\n3\n", "k"), ("a\nb\nc\n", "1\n\t\n3\n", "e")])
def test_an_empty_side_is_told_with_file_and_line(write, source, target, side):
    paths = {"k": write("k", source), "e": write("e", target)}
    with pytest.raises(DataError) as caught:
        read_pairs(paths["k"], paths["e"])
    told(caught.value, f"{paths[side]} line 2", "skip_empty")
    assert list(read_pairs(paths["k"], paths["e"], skip_empty=True)) == [("a", "1"), ("c", "3")]


def test_an_empty_cell_of_a_tsv_is_told_with_column_and_line(write):
    path = write("pairs.tsv", "a\t1\nb\t\n\nc\t3\n")
    with pytest.raises(DataError) as caught:
        read_tsv(path)
    told(caught.value, f"{path} column 1 line 2")
    assert list(read_tsv(path, skip_empty=True)) == [("a", "1"), ("c", "3")]


def test_a_line_with_too_few_columns_is_told(write):
    path = write("pairs.tsv", "a\t1\nb  2\n")
    for skip_empty in (False, True):
        with pytest.raises(DataError) as caught:
            read_tsv(path, skip_empty=skip_empty)
        told(caught.value, "1 columns", f"{path} line 2", "expected 2")


@pytest.mark.parametrize("content", ["", "\n", "\n\n"])
def test_files_without_a_pair_are_told(write, content):
    path = write("k", content)
    with pytest.raises(DataError) as caught:
        read_pairs(path, path, skip_empty=True)
    told(caught.value, "no pair", str(path))


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_tsv(tmp_path / "none.tsv")


@pytest.mark.parametrize("columns", [(0, -1), (True, 0), (0, 1.0)])
def test_bad_columns_are_told(tmp_path, columns):
    with pytest.raises(DataError, match="_column=") as caught:
        read_tsv(tmp_path / "never read", source_column=columns[0], target_column=columns[1])
    assert_house_style(caught.value)


def test_sides_of_other_lengths_are_told():
    with pytest.raises(DataError) as caught:
        SentencePairs(["a"], ["b", "c"])
    told(caught.value, "1 source and 2 target")


@pytest.mark.parametrize("source", ["text", {"a": 1}, 5, ["a", None]])
def test_sides_that_are_no_texts_are_reported(source):
    """The letters of a text, or the keys of a dict, would pass for sentences."""
    with pytest.raises(DataError) as caught:
        SentencePairs(source, ["b"])
    told(caught.value, "SentencePairs: got source=", "expected a list of texts")


def test_normalising_twice_changes_nothing():
    assert normalise("\u3000a\u00a0 b\n") == "a b"
    text = normalise("e\u0301  가")
    assert normalise(text) == text == "\u00e9 가"


@pytest.mark.skipif("GLUON_MGPU_DATA" not in os.environ, reason="GLUON_MGPU_DATA names no folder with tatoeba-eng-kor.tsv")
def test_real_sentences():
    pairs = read_tsv(os.path.join(os.environ["GLUON_MGPU_DATA"], "tatoeba-eng-kor.tsv"))
    assert len(pairs) == 3798
    assert [len(part) for part in split_pairs(pairs, (3400, 200, 198))] == [3400, 200, 198]

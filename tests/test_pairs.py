"""Parallel text: what is read, and where a file is wrong."""

import unicodedata

import pytest
from gluon_mgpu.data import filter_pairs, read_pairs, read_tsv
from gluon_mgpu.errors import DataError


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def told(error, *parts):
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


def test_only_a_line_feed_ends_a_line(write):
    """str.splitlines knows seven more line ends, which would shift every sentence after one."""
    pairs = read_pairs(write("k", "a\u2028b\x0bc\x85d\nz\n"), write("e", "1\n2\n"))
    assert list(pairs) == [("a b c d", "1"), ("z", "2")]


def test_other_numbers_of_lines_are_reported(write):
    source, target = write("k", "하나\n둘\n셋\n"), write("e", "one\ntwo\n")
    with pytest.raises(DataError) as caught:
        read_pairs(source, target)
    told(caught.value, f"3 lines in {source}", f"2 in {target}", "line 3")


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_bytes_that_are_not_utf8_are_reported_with_their_line(write, mark):
    path = write("k", mark + "하나\n둘\n".encode() + "셋".encode("cp949") + b"\n")
    for read in (lambda: read_pairs(path, path), lambda: read_tsv(path)):
        with pytest.raises(DataError) as caught:
            read()
        told(caught.value, f"byte 0x{'셋'.encode('cp949')[0]:02x}", f"{path} line 3", "UTF-8")


@pytest.mark.parametrize(
    "encoding, name", [("utf-16", "UTF-16"), ("utf-16-be", "UTF-16"), ("utf-16-le", "UTF-16"), ("utf-32", "UTF-32")]
)
def test_the_encoding_of_a_file_is_named(write, encoding, name):
    path = write("k", "a 하나\n".encode(encoding))
    with pytest.raises(DataError) as caught:
        read_pairs(path, path)
    told(caught.value, str(path), name, f"iconv -f {name}")
    assert "CP949" not in str(caught.value)


@pytest.mark.parametrize("source, target, side", [("a\n \nc\n", "1\n2\n3\n", "k"), ("a\nb\nc\n", "1\n\t\n3\n", "e")])
def test_an_empty_side_is_reported_with_file_and_line(write, source, target, side):
    paths = {"k": write("k", source), "e": write("e", target)}
    with pytest.raises(DataError) as caught:
        read_pairs(paths["k"], paths["e"])
    told(caught.value, f"{paths[side]} line 2", "keep_empty")
    kept = filter_pairs(read_pairs(paths["k"], paths["e"], keep_empty=True))
    assert (list(kept.pairs), kept.num_empty) == ([("a", "1"), ("c", "3")], 1)


@pytest.mark.parametrize(
    "content, words",
    [("a\t1\nb\t\n", "column 1 line 2"), ("a\t1\nb  2\n", "line 2"), ("", "no pair")],
    ids=["an empty cell", "too few columns", "an empty file"],
)
def test_a_wrong_tsv_is_reported_with_its_place(write, content, words):
    path = write("pairs.tsv", content)
    with pytest.raises(DataError) as caught:
        read_tsv(path)
    told(caught.value, str(path), words)

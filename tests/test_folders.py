"""Folders that are whole or not there, whenever the program is killed."""

import errno
import json
import os
from pathlib import Path

import pytest
from gluon_mgpu.checkpoint import atomic_folder
from gluon_mgpu.checkpoint.atomic_folder import FolderWriter, commit, copy_folder, new_folder, open_folder, recover_path, remove
from gluon_mgpu.errors import StateError


class KilledError(BaseException):
    """Nothing runs after it: not even cleaning up."""


def write(folder, number):
    with new_folder(folder) as new:
        writer = FolderWriter(new)
        writer.text("number", str(number))
        with writer.file("bytes") as file:
            file.write(b"ab")
            file.write(memoryview(b"cd"))
        writer.finish(kind="test")
    commit(folder)


def checked(folder):
    with open_folder(folder, ("manifest.json", "number", "bytes"), "test") as opened:
        return opened.check("test"), int(opened.read("number"))


def number_in(folder):
    return checked(folder)[1]


def test_the_manifest_tells_sizes_and_checksums(tmp_path):
    write(tmp_path / "f", 1)
    manifest, _ = checked(tmp_path / "f")
    assert manifest["kind"] == "test"
    assert manifest["files"]["bytes"] == {
        "bytes": 4,
        "sha256": "88d4266fd4e6338d13b845fcf289579d209c897823b9217da3e161936f031589",  # sha256sum of abcd
    }
    (tmp_path / "f" / "bytes").write_bytes(b"abce")
    with pytest.raises(StateError, match="test: got .*bytes, which is damaged .its checksum differs"):
        checked(tmp_path / "f")


def killed_at(monkeypatch, call, act):
    """Do something, and be killed before the so-and-so-many-th call of the system that changes names or forces to the disk."""
    calls = []

    def counting(function):
        def counted(*arguments, **options):
            calls.append(function)
            if len(calls) == call:
                raise KilledError
            return function(*arguments, **options)

        return counted

    with monkeypatch.context() as patch:
        path_class = type(Path())
        for where, name in ((os, "fsync"), (path_class, "rename"), (path_class, "mkdir")):
            patch.setattr(where, name, counting(getattr(where, name)))
        patch.setattr(atomic_folder.shutil, "rmtree", lambda *arguments, **options: None)  # the cleaning up that is not done
        try:
            act()
        except KilledError:
            return True
    return False


def test_replacing_is_whole_wherever_it_is_killed(tmp_path, monkeypatch):
    found = []
    for call in range(1, 100):
        folder = tmp_path / str(call) / "f"
        write(folder, 1)
        killed = killed_at(monkeypatch, call, lambda folder=folder: write(folder, 2))
        found.append(number_in(folder))
        write(folder, 3)
        assert number_in(folder) == 3 and [path.name for path in folder.parent.iterdir()] == ["f"]
        if not killed:
            break
    assert found == sorted(found) and set(found) == {1, 2}
    assert len(found) > 8


def test_the_first_one_is_there_or_not(tmp_path, monkeypatch):
    there = []
    for call in range(1, 100):
        folder = tmp_path / str(call) / "f"
        folder.parent.mkdir()
        killed = killed_at(monkeypatch, call, lambda folder=folder: write(folder, 2))
        there.append(recover_path(folder).exists())
        assert not there[-1] or number_in(folder) == 2
        if not killed:
            break
    assert there == sorted(there) and set(there) == {False, True}


def test_a_copy_has_files_of_its_own(tmp_path):
    write(tmp_path / "a" / "inner", 1)
    copy_folder(tmp_path / "a", tmp_path / "b")
    (tmp_path / "a" / "inner" / "number").write_text("7")
    assert number_in(tmp_path / "b" / "inner") == 1
    copy_folder(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b" / "inner" / "number").read_text() == "7"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_what_is_half_removed_has_another_name(tmp_path, monkeypatch):
    write(tmp_path / "f", 1)

    def half(path, ignore_errors=False):
        if path.exists():
            (path / "number").unlink()
            raise KilledError

    monkeypatch.setattr(atomic_folder.shutil, "rmtree", half)
    with pytest.raises(KilledError):
        remove(tmp_path / "f")
    assert [path.name for path in tmp_path.iterdir()] == [".f.gone"]


def test_a_file_name_that_leads_elsewhere_is_refused(tmp_path):
    write(tmp_path / "f", 1)
    path = tmp_path / "f" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"]["../x"] = manifest["files"]["bytes"]
    path.write_text(json.dumps(manifest))
    with pytest.raises(StateError, match="which is not a checkpoint"):
        checked(tmp_path / "f")


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path):
    """Opening a pipe for reading waits for a writer, and none may ever come."""
    write(tmp_path / "f", 1)
    (tmp_path / "f" / "number").unlink()
    os.mkfifo(tmp_path / "f" / "number")
    with open_folder(tmp_path / "f", ("manifest.json", "number", "bytes"), "test") as opened:
        assert "number" not in opened and "bytes" in opened
        with pytest.raises(StateError, match="number"):
            opened.check("test")


def test_a_new_folder_with_a_file_cut_short_does_not_replace_the_old_one(tmp_path):
    """A power failure may keep names and lose data: the manifest is there, and a file has another size."""
    write(tmp_path / "f", 1)
    (tmp_path / "f").rename(tmp_path / ".f.old")
    write(tmp_path / "g", 2)
    (tmp_path / "g").rename(tmp_path / ".f.new")
    assert recover_path(tmp_path / "f") == tmp_path / ".f.new"
    (tmp_path / ".f.new" / "bytes").write_bytes(b"abc")
    assert recover_path(tmp_path / "f") == tmp_path / ".f.old"


def test_a_folder_that_cannot_be_removed_is_reported_and_ends_nothing(tmp_path, monkeypatch, caplog):
    def busy(path, ignore_errors=False):
        raise OSError(errno.EBUSY, "Device or resource busy")

    write(tmp_path / "f", 1)
    monkeypatch.setattr(atomic_folder.shutil, "rmtree", busy)
    remove(tmp_path / "f")
    assert "could not remove the unused folder" in caplog.text and "Device or resource busy" in caplog.text
    assert not (tmp_path / "f").exists()


def test_two_processes_may_remove_the_same_folder(tmp_path, monkeypatch):
    """A file that the other one removes first is no error; what is left is removed all the same."""
    real = atomic_folder.shutil.rmtree

    def raced(path, ignore_errors=False):
        if not ignore_errors:
            (path / "number").unlink()
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", "number")
        real(path, ignore_errors=True)

    write(tmp_path / "f", 1)
    monkeypatch.setattr(atomic_folder.shutil, "rmtree", raced)
    remove(tmp_path / "f")
    assert list(tmp_path.iterdir()) == []

"""Folders that are complete or absent, whenever the program is killed, and whose files agree with their manifest."""

import errno
import os
import shutil
import threading
from itertools import count
from pathlib import Path

import pytest
from gluon_mgpu.checkpoint import replace_folder
from gluon_mgpu.checkpoint.manifest import FolderWriter
from gluon_mgpu.checkpoint.replace_folder import copy_files, explained, new_folder, read_files, recover_path, remove
from gluon_mgpu.errors import SaveError
from gluon_mgpu.loop.history import History

FILES = {"manifest.json": 999, "number": 9, "bytes": 9}


class KilledError(BaseException):
    """Nothing runs after it, no cleaning up either."""


def write(folder, number):
    with new_folder(folder) as new:
        writer = FolderWriter(new)
        writer.text("number", str(number))
        with writer.file("bytes") as file:
            file.write(b"ab")
            file.write(memoryview(b"cd"))
        writer.finish(kind="test")


def number_in(folder):
    files = read_files(folder, FILES, "test")
    assert files.check("test")["kind"] == "test"
    return int(files.contents["number"])


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def killed_at(monkeypatch, call, act):
    """Do something, and be killed before a given system call among those that change names or sync."""
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
        patch.setattr(replace_folder.shutil, "rmtree", lambda *arguments, **options: None)  # the clean-up that does not run
        try:
            act()
        except KilledError:
            return True
    return False


@pytest.mark.parametrize("before", [1, None])
def test_a_folder_is_complete_wherever_its_replacement_is_killed(tmp_path, monkeypatch, before):
    found = []
    for call in count(1):
        folder = tmp_path / str(call) / "f"
        folder.parent.mkdir()
        if before is not None:
            write(folder, before)
        killed = killed_at(monkeypatch, call, lambda folder=folder: write(folder, 2))
        found.append(number_in(folder) if recover_path(folder).exists() else 0)
        write(folder, 3)
        assert number_in(folder) == 3 and names(folder.parent) == ["f"]
        if not killed:
            break
    assert found == sorted(found) and set(found) == {before or 0, 2} and len(found) > 8


def test_a_folder_is_read_while_it_is_replaced(tmp_path):
    """All files are of one version, and there always is one."""
    done = threading.Event()

    def replace():
        for number in count(2):
            write(tmp_path / "f", number)
            if done.is_set():
                return

    write(tmp_path / "f", 1)
    thread = threading.Thread(target=replace)
    thread.start()
    try:
        found = [number_in(tmp_path / "f")]
        while found[-1] < 8:
            found.append(number_in(tmp_path / "f"))
    finally:
        done.set()
        thread.join()
    assert found == sorted(found)


@pytest.mark.parametrize("target", ["nowhere", "folder", "file"])
def test_a_link_is_replaced_and_its_target_stays(tmp_path, target):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "f").symlink_to(target)
    write(tmp_path / "f", 1)
    assert number_in(tmp_path / "f") == 1 and not (tmp_path / "f").is_symlink()
    assert (tmp_path / "file").read_text() == "mine" and list((tmp_path / "folder").iterdir()) == []


@pytest.mark.parametrize("error", [None, errno.EBUSY], ids=["killed", "busy"])
def test_a_folder_that_is_partly_removed_has_a_hidden_name(tmp_path, monkeypatch, caplog, error):
    write(tmp_path / "f", 1)

    def half(path, ignore_errors=False):
        (path / "number").unlink()
        raise KilledError if error is None else OSError(error, "Device or resource busy")

    with monkeypatch.context() as patch:
        patch.setattr(replace_folder.shutil, "rmtree", half)
        try:
            remove(tmp_path / "f")
        except KilledError:
            assert error is None
        else:
            assert "could not remove the unused folder" in caplog.text
    assert [name[:7] for name in names(tmp_path)] == [".f.gone"]
    write(tmp_path / "f", 2)
    assert names(tmp_path) == ["f"]


def test_a_copy_holds_no_links(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    write(tmp_path / "f", 1)
    (tmp_path / "f" / "link").symlink_to(tmp_path / "mine")
    os.mkfifo(tmp_path / "f" / "pipe")
    (tmp_path / "new").mkdir()
    copy_files(tmp_path / "f", tmp_path / "new")
    assert number_in(tmp_path / "new") == 1 and names(tmp_path / "new") == sorted(FILES)


def test_a_new_file_is_not_written_through_a_link(tmp_path, monkeypatch):
    """The name that it has while it is written can be foreseen."""
    monkeypatch.delenv("GLUON_MGPU_RANK", raising=False)
    (tmp_path / "mine").write_text("mine")
    for name in (f".new-{os.getpid()}.history.csv", "history.csv", "history.json", "curves.png"):
        (tmp_path / name).symlink_to("mine")
    History([{"epoch": 1, "train_loss": 0.5}]).save(tmp_path)
    assert (tmp_path / "mine").read_text() == "mine"
    assert names(tmp_path) == ["curves.png", "history.csv", "history.json", "mine"]


def test_a_copy_that_fails_is_reported_in_one_sentence(tmp_path):
    failed = shutil.Error([("a", "b", "[Errno 28] No space left on device: 'a' -> 'b'")])
    told = r"cannot be written \(\[Errno 28\] No space left on device: 'a' -> 'b'\); expected"
    with pytest.raises(SaveError, match=told), explained("Checkpoint", tmp_path):
        raise failed

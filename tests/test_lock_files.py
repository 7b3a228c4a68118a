"""One run at a time uses a folder, and what holds it is named."""

import errno
import fcntl
import os
import subprocess
import sys

import gluon_mgpu as mgpu
import pytest
from gluon_mgpu.errors import SaveError
from gluon_mgpu.loop.callbacks import Checkpoint
from gluon_mgpu.runtime.file_locks import LOCK, FolderLock, open_lock, signature

from .conftest import assert_house_style
from .test_crash_images import fit, names

HOLDER = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("process 4711 on elsewhere", file=file, flush=True)
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / LOCK)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "locked\n"
    yield process
    process.kill()
    process.communicate(timeout=240)


@pytest.mark.parametrize("resume", [None, "auto"])
def test_a_second_run_is_refused_and_the_first_one_named(tmp_path, holder, resume):
    """It removed what the first was writing: one of them ended with a FileNotFoundError."""
    with pytest.raises(
        SaveError, match="Checkpoint: got .*, which process 4711 on elsewhere has locked; expected a folder that"
    ) as caught:
        fit(tmp_path, resume=resume)
    assert_house_style(caught.value)
    assert names(tmp_path) == [LOCK]
    holder.kill()
    holder.wait(timeout=240)
    fit(tmp_path, resume=resume, epochs=1)  # the kernel has let go
    assert names(tmp_path) == ["best", "last"]


def test_a_run_within_a_run_needs_its_own_folder(tmp_path):
    class Nested(mgpu.Callback):
        def on_epoch_end(self, state):
            fit(tmp_path / "two", epochs=1)
            with pytest.raises(SaveError, match=f"which process {os.getpid()} on .* has locked"):
                Checkpoint(tmp_path).hold()

    saves = Checkpoint(tmp_path, None)
    mgpu.fit(*made(), epochs=1, callbacks=[saves, Nested()])
    assert names(tmp_path) == ["last", "two"] and names(tmp_path / "two") == ["best", "last"]


def made():
    import mxnet as mx

    net = mx.gluon.nn.Dense(1, in_units=2)
    net.initialize(ctx=mx.cpu(0))
    loss = mx.gluon.loss.L2Loss()
    return net, loss, mgpu.Trainer(net, "sgd"), [(mx.nd.ones((2, 2)), mx.nd.ones((2,)))]


def test_an_error_lets_go_of_the_folder(tmp_path):
    class Broken(mgpu.Callback):
        def on_epoch_begin(self, state):
            raise KeyError("broken")

    saves = Checkpoint(tmp_path, None)
    with pytest.raises(KeyError):
        mgpu.fit(*made(), epochs=1, callbacks=[saves, Broken()])
    mgpu.fit(*made(), epochs=1, callbacks=[Checkpoint(tmp_path, None)])


def test_a_forked_process_does_not_hold_the_lock(tmp_path):
    """A worker that outlives its killed program would keep the folder from every later run."""
    lock, (read, write), (begun, begin) = FolderLock(tmp_path, "test"), os.pipe(), os.pipe()
    lock.acquire()
    child = os.fork()
    if not child:
        os.close(write)
        os.write(begin, b"x")
        os.read(read, 1)  # until this process closes it
        os._exit(0)
    os.read(begun, 1)
    for number in (read, begun, begin):
        os.close(number)
    os.close(lock._file)  # as the end of the program does, without unlocking
    lock._file = None
    try:
        other = FolderLock(tmp_path, "test")
        other.acquire()
        other.release()
    finally:
        os.close(write)
        os.waitpid(child, 0)


@pytest.mark.parametrize("kind", ["link", "name", "folder", "pipe"])
def test_a_lock_file_that_is_something_else_is_left_alone(tmp_path, kind):
    precious = tmp_path / "precious"
    precious.write_text("kept")
    path = tmp_path / LOCK
    {"link": path.symlink_to, "name": path.hardlink_to, "folder": lambda _: path.mkdir(), "pipe": lambda _: os.mkfifo(path)}[
        kind
    ](precious)
    with pytest.raises(SaveError, match="which is not a plain file; expected") as caught:
        Checkpoint(tmp_path).hold()
    assert_house_style(caught.value)
    assert precious.read_text() == "kept"


def test_without_locks_a_run_goes_on_and_says_so(tmp_path, monkeypatch, caplog):
    def unsupported(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    fit(tmp_path, epochs=1)
    assert "Checkpoint: cannot lock" in caplog.text and "(No locks available)" in caplog.text
    assert names(tmp_path) == ["best", "last"]


def test_a_lock_file_that_another_process_creates_meanwhile_is_opened(tmp_path, monkeypatch):
    """Two first runs of a folder: neither finds the file, and one creates it. A file that always vanishes is an error."""
    path, real, created = tmp_path / LOCK, os.open, []

    def late(name, flags, *mode):
        if flags & os.O_CREAT:
            created.append(name)
            path.write_text("theirs")
        return real(name, flags, *mode)

    monkeypatch.setattr(os, "open", late)
    file = open_lock(path)
    assert signature(file) == "theirs" and created == [path]
    os.close(file)

    def vanishing(name, flags, *mode):
        raise FileExistsError if flags & os.O_CREAT else FileNotFoundError

    monkeypatch.setattr(os, "open", vanishing)
    with pytest.raises(FileNotFoundError, match="is created and removed repeatedly") as caught:
        open_lock(path)
    assert caught.value.errno == errno.ENOENT and caught.value.filename == str(path)


def test_a_lock_holds_without_the_name_of_its_holder(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    monkeypatch.setattr(os, "pread", full)
    lock = FolderLock(tmp_path, "first")
    lock.acquire()
    with pytest.raises(SaveError, match="second: got .*, which another process has locked; expected"):
        FolderLock(tmp_path, "second").acquire()
    lock.release()
    assert names(tmp_path) == []


def test_a_holder_does_not_remove_the_lock_file_of_the_next_one(tmp_path):
    """Its own file was removed, by hand or by a clean-up, and another run has locked a new one."""
    first, second = FolderLock(tmp_path, "first"), FolderLock(tmp_path, "second")
    first.acquire()
    (tmp_path / LOCK).unlink()
    second.acquire()
    first.release()
    with pytest.raises(SaveError, match=f"third: got .*, which process {os.getpid()} on"):
        FolderLock(tmp_path, "third").acquire()
    second.release()
    assert names(tmp_path) == []


def test_a_lock_on_a_file_that_the_holder_has_removed_is_not_one(tmp_path, monkeypatch):
    """Between opening and locking, the holder ended and removed its file: a lock on it would keep no other process out."""
    from gluon_mgpu.runtime import file_locks

    opened, path = [], tmp_path / LOCK

    def slow(name):
        opened.append(open_lock(name))
        if len(opened) == 1:
            path.unlink()
        return opened[-1]

    monkeypatch.setattr(file_locks, "open_lock", slow)
    lock = FolderLock(tmp_path, "test")
    lock.acquire(patience_s=240.0)
    assert len(opened) == 2 and os.path.samestat(path.stat(), os.fstat(lock._file))
    lock.release()


def test_a_fork_forgets_its_locks_and_the_parent_keeps_them(tmp_path):
    from gluon_mgpu.runtime import file_locks

    lock = FolderLock(tmp_path, "test")
    lock.acquire()
    held = os.dup(lock._file)  # as the parent's own descriptor: the lock stays while one is open
    file_locks._forget_all()
    assert lock._file is None
    lock.release()  # the child's clean-up does nothing
    with pytest.raises(SaveError, match="has locked"):
        FolderLock(tmp_path, "other").acquire()
    os.close(held)
    FolderLock(tmp_path, "other").acquire()


def test_a_folder_that_cannot_be_written_to_is_an_error_of_the_system(tmp_path):
    with pytest.raises(FileNotFoundError):
        FolderLock(tmp_path / "gone", "test").acquire()


def test_a_job_that_is_started_again_waits_for_the_process_before(tmp_path, holder, monkeypatch):
    import gluon_mgpu.loop.callbacks as callbacks
    from gluon_mgpu.distributed.process import Process

    monkeypatch.setattr(callbacks, "this_process", lambda: Process(0, 1, 0, 1, 0, 1, 1))
    waits = []

    def ended(seconds):
        waits.append(seconds)
        holder.kill()
        holder.wait()  # with a timeout, it would sleep

    monkeypatch.setattr("gluon_mgpu.runtime.file_locks.time.sleep", ended)
    saves = Checkpoint(tmp_path)
    saves.hold()
    saves.release()
    assert len(waits) == 1 and names(tmp_path) == []


@pytest.mark.parametrize(
    "number, told",
    [
        (errno.ENOSPC, r"No space left on device, 12 bytes needed, .* free.; expected enough disk space. Free disk space"),
        (errno.EDQUOT, r"Disk quota exceeded, 12 bytes needed, .* free.; expected enough disk space. Free disk space"),
        (
            errno.EROFS,
            r"Read-only file system, 12 bytes needed.; expected a folder that this process may write to. Check its perm",
        ),
        (errno.EIO, r"Input/output error, 12 bytes needed.; expected a folder that can be written. Check the path and its disk"),
    ],
)
@pytest.mark.parametrize("background", [False, True])
def test_a_disk_that_fails_is_told_with_the_folder_and_what_is_left(tmp_path, monkeypatch, number, told, background):
    class Fails(mgpu.Callback):
        def on_epoch_begin(self, state):
            def failing(file):
                raise OSError(number, os.strerror(number))

            if state.epoch == 2:
                saves._rotation.wait()
                monkeypatch.setattr(os, "fsync", failing)

    saves = Checkpoint(tmp_path, None, background=background)
    net, loss, trainer, data = made()
    with pytest.raises(SaveError, match=f"Checkpoint: got .*last, which cannot be written .{told}") as caught:
        mgpu.fit(net, loss, trainer, data, epochs=2, callbacks=[saves, Fails()])
    monkeypatch.undo()
    assert_house_style(caught.value)
    assert "\n" not in str(caught.value) and "Saved and kept: last of step 1; resume='auto' resumes" in str(caught.value)
    assert caught.value.errno == number
    assert names(tmp_path) == ["last"]
    assert mgpu.load_checkpoint(tmp_path / "last", net, trainer)["epoch"] == 1

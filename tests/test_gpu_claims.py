import errno
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from gluon_mgpu.runtime.file_locks import signature
from gluon_mgpu.runtime.nvidia import locks
from gluon_mgpu.runtime.nvidia.locks import choosing, claim, folder, is_ours, release

# Takes GPU-1, and then what it is told on standard input. The package comes without MXNet, whose import takes seconds.
OTHER = """
import os, sys, tempfile, time, types
package = types.ModuleType("gluon_mgpu")
package.__path__, tempfile.tempdir = [sys.argv[1]], sys.argv[2]
sys.modules["gluon_mgpu"] = package
from gluon_mgpu.runtime.nvidia import locks
sys.argv[0] = "/somewhere/train.py"
print(repr(locks.claim("GPU-1")), flush=True)
if sys.stdin.readline() == "fork and release\\n":
    child = os.fork()
    if not child:
        time.sleep(10_000)
    locks.release("GPU-1")
    print(child, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path):
    """Locks of this test alone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(locks, "_held", {})
    yield tmp_path
    for uuid in list(locks._held):
        release(uuid)


@pytest.fixture
def other(own_folder):
    """Start a process that takes GPU-1 and holds it; returns it and what it was told."""
    started = []

    def start():
        command = [sys.executable, "-c", OTHER, str(Path(locks.__file__).parents[2]), str(own_folder)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process, process.stdout.readline().strip()

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=240)


def test_a_gpu_is_taken_once(other):
    assert claim("GPU-1") == ""
    assert claim("GPU-1") == ""  # this process may ask again
    assert claim("GPU-2") == ""
    assert is_ours("GPU-1")
    _, told = other()
    assert told == repr(f"taken by process {os.getpid()} ({os.path.basename(sys.argv[0])})")
    release("GPU-1")
    assert not is_ours("GPU-1")
    assert is_ours("GPU-2")
    release("GPU-3")


def test_a_killed_process_lets_go(other):
    process, told = other()
    assert told == "''"
    assert claim("GPU-1") == f"taken by process {process.pid} (train.py)"
    assert not is_ours("GPU-1")
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=240)
    assert claim("GPU-1") == ""


def test_released_while_a_child_lives(other):
    """A child that was forked has the open file, too: without LOCK_UN it would hold the lock."""
    process, _ = other()
    process.stdin.write("fork and release\n")
    process.stdin.flush()
    child = int(process.stdout.readline())
    try:
        assert claim("GPU-1") == ""
    finally:
        os.kill(child, signal.SIGKILL)


def test_one_process_after_the_other_chooses(monkeypatch):
    def is_locked():
        file = os.open(folder() / "choosing.lock", os.O_RDWR)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(file)
        return False

    with choosing():
        assert is_locked()
        monkeypatch.setattr(locks, "_PATIENCE_S", 0.05)
        begin = time.monotonic()
        with choosing():  # as another process, while this one is stopped
            assert time.monotonic() - begin >= 0.05
        assert is_locked()
    assert not is_locked()


def test_every_user_may_lock():
    before = os.umask(0o077)
    try:
        claim("GPU-1")
    finally:
        os.umask(before)
    assert folder().stat().st_mode & 0o7777 == 0o1777
    assert (folder() / "GPU-1.lock").stat().st_mode & 0o777 == 0o666


def test_odd_names_stay_in_the_folder():
    assert claim("MIG-GPU-1/2/0") == ""
    assert [path.name for path in folder().iterdir()] == ["MIG-GPU-1_2_0.lock"]


def test_links_are_not_followed(own_folder, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("kept", encoding="utf-8")
    (folder() / "GPU-1.lock").symlink_to(precious)
    assert claim("GPU-1") == ""  # nothing is claimed, and training goes on
    assert not is_ours("GPU-1")
    assert precious.read_text(encoding="utf-8") == "kept"


def test_a_file_with_another_name_is_not_truncated(own_folder, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("kept", encoding="utf-8")
    (folder() / "GPU-1.lock").hardlink_to(precious)
    assert claim("GPU-1") == ""  # nothing is claimed, and training goes on
    assert not is_ours("GPU-1")
    assert precious.read_text(encoding="utf-8") == "kept"


def test_a_folder_that_is_a_link_is_not_used(own_folder, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (own_folder / "gluon_mgpu_gpus").symlink_to(tmp_path / "elsewhere")
    assert claim("GPU-1") == ""
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_no_folder_claims_nothing(monkeypatch, caplog):
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nowhere")
    with caplog.at_level("DEBUG", "gluon_mgpu"):
        assert claim("GPU-1") == ""
        with choosing():
            pass
    assert "could not lock GPU-1" in caplog.text
    assert not is_ours("GPU-1")


def test_what_stands_in_a_lock_is_printable(own_folder):
    claim("GPU-1")
    (folder() / "GPU-1.lock").write_bytes(b"\x1b[31mprocess 7\n\xff")
    assert signature(locks._held["GPU-1"]) == "[31mprocess 7\ufffd"


def test_a_folder_without_locks_reserves_nothing(monkeypatch, caplog):
    """A network file system may have files and no locks: jobs run there as they did before."""

    def unsupported(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    files = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(fcntl, "flock", unsupported)
    monkeypatch.setattr(locks, "_PATIENCE_S", 0.02)
    with caplog.at_level("DEBUG", "gluon_mgpu"):
        assert claim("GPU-1") == "" and not is_ours("GPU-1")
    assert "could not lock GPU-1" in caplog.text
    with choosing():
        pass
    assert len(os.listdir("/proc/self/fd")) == files


def test_a_lock_file_of_another_user_is_used_as_it_is(monkeypatch):
    """Only its owner may change who may open it."""
    changed = []
    monkeypatch.setattr(os, "fchmod", lambda file, mode: changed.append(mode))
    assert claim("GPU-1") == "" and changed == [0o666]
    release("GPU-1")
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    assert claim("GPU-1") == "" and is_ours("GPU-1") and changed == [0o666]

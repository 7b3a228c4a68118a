"""One run at a time uses a folder, and what holds it is named."""

import errno
import fcntl
import os
import subprocess
import sys
import threading

import pytest
from gluon_mgpu.errors import SaveError
from gluon_mgpu.loop.save_checkpoints import Checkpoint
from gluon_mgpu.runtime.file_locks import LOCK

from .test_crash_images import fit, names

HOLDER = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
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
    with pytest.raises(SaveError, match="which another run has locked"):
        fit(tmp_path, resume=resume)
    assert names(tmp_path) == [LOCK]
    holder.kill()
    holder.wait(timeout=240)
    fit(tmp_path, resume=resume, epochs=1)  # the kernel has let go
    assert names(tmp_path) == ["best", "last"]


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_lock_file_that_is_a_link_is_refused(tmp_path, link):
    precious = tmp_path / "precious"
    precious.write_text("kept")
    link(precious, tmp_path / LOCK)
    with pytest.raises(OSError, match="Is a link"):
        Checkpoint(tmp_path).hold()
    assert precious.read_text() == "kept"


@pytest.mark.skipif(sys.version_info < (3, 10), reason="filelock there takes it for a lock that is held")
def test_without_locks_a_run_goes_on_and_says_so(tmp_path, failing, caplog):
    failing(fcntl, "flock", error=OSError(errno.ENOLCK, "No locks available"))
    fit(tmp_path, epochs=1)
    assert "Checkpoint: cannot lock" in caplog.text and "No locks available" in caplog.text
    assert names(tmp_path) == ["best", "last"]


def test_a_job_that_is_started_again_waits_for_the_process_before(tmp_path, holder, become):
    become(num_processes=1, restart=1)
    threading.Timer(0.5, holder.kill).start()
    saves = Checkpoint(tmp_path)
    saves.hold()
    saves.release()
    assert names(tmp_path) == []

"""The end of a process: what is queued is done, and an operation that failed makes the process fail."""

import os
import subprocess
import sys

import pytest

from .versions import without_log

PENDING = """
import atexit, sys
file = open(sys.argv[1], "w")
file.write("written")
atexit.register(print, "the first handler")
import gluon_mgpu
import mxnet as mx
gluon_mgpu.seed_everything(0)
atexit.register(lambda: print("the last handler", mx.nd.ones((2,)).sum().asscalar()))
failing = mx.nd.linalg.potrf(-mx.nd.ones((2, 2))) * 2
"""


@pytest.mark.parametrize(
    ("end", "code", "told"),
    [
        ("", 1, "An operation failed after the program had last waited for its devices:"),
        ("try:\n    failing.wait_to_read()\nexcept mx.MXNetError:\n    pass", 0, ""),
    ],
)
def test_an_error_that_no_read_has_shown_fails_the_program(tmp_path, end, code, told):
    """The program exited with 0, and said nothing. Other exit handlers run, and files are closed."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PENDING + end, str(tmp_path / "file")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240)
    assert done.returncode == code, done.stderr
    assert done.stdout == "the last handler 2.0\nthe first handler\n"
    assert told in done.stderr and bool(without_log(done.stderr)) == bool(told)
    assert (tmp_path / "file").read_text() == "written"

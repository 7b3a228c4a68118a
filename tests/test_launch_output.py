"""The output of a job's processes: what a terminal shows, and what the logs keep."""

import errno
import io

import pytest
from gluon_mgpu.distributed.launcher.output import Log, Output


class Stream(io.BytesIO):
    """A stream whose reader has ended."""

    def write(self, data):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


@pytest.fixture
def log(tmp_path):
    """A log of rank 7, and a list of what it shows."""
    shown = []
    log = Log(tmp_path / "rank-7.log", b"[7] ", lambda data, stream: shown.append((data, stream)))
    yield log, shown
    log.close()


def test_a_closed_terminal_ends_nothing(tmp_path):
    output = Output(tmp_path, Stream(), Stream())
    log = output.log("0", restart=2)
    log.write(b"line\n", 0)
    log.close()
    output.report("the end")
    assert (tmp_path / "restart-2" / "rank-0.log").read_bytes() == b"line\n"
    assert (tmp_path / "launcher.log").read_bytes() == b"gluon-mgpu launch: the end\n"


def test_a_report_that_cannot_be_written_ends_nothing(tmp_path):
    (tmp_path / "file").touch()
    shown = io.BytesIO()
    Output(tmp_path / "file" / "logs", shown, shown).report("the end")
    assert shown.getvalue() == b"gluon-mgpu launch: the end\n"


def test_the_output_is_shown_when_the_disk_is_full(tmp_path):
    (tmp_path / "rank-7.log").symlink_to("/dev/full")
    shown = []
    log = Log(tmp_path / "rank-7.log", b"[7] ", lambda data, stream: shown.append((data, stream)))
    log.write(b"one\n", 0)
    log.write(b"two\n", 1)
    assert shown[1:] == [(b"[7] one\n", 0), (b"[7] two\n", 1)]
    assert b"rank-7.log is incomplete: [Errno 28] No space left on device" in shown[0][0]  # once
    log.close()


def test_a_long_traceback_keeps_its_end(log):
    log, _ = log
    lines = ["Traceback (most recent call last):", *(f"  frame {i}" for i in range(100)), "ValueError: " + "x" * 1000]
    log.write("\n".join(["before", *lines]).encode(), 1)  # the last line is not complete
    log.close()
    found = log.last_lines()
    assert len(found) == 40
    assert found[:39] == lines[-40:-1]
    assert found[39] == lines[-1][:500]


def test_without_a_traceback_the_last_lines_are_shown(log):
    log, _ = log
    log.write(b"".join(b"%d\n" % i for i in range(30)), 1)
    log.write(b"not an error\n", 0)
    assert log.last_lines() == [str(i) for i in range(20, 30)]


def test_a_line_without_an_end_is_shown_at_last(log):
    log, shown = log
    log.write(b"x" * 70_000, 0)
    assert [(len(data), stream) for data, stream in shown] == [(4 + 70_000 + 1, 0)]

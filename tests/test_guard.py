"""The guard of a program, alone: its reports, the signals that it passes on, and what it ends."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
from gluon_mgpu.distributed.launcher import guard

PYTHON = (sys.executable, "-I", "-S", "-c")
FORKED = """
import os, signal, time
child = os.fork()
if not child:
    signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"the fork got it\\n"))
    os.write(1, b"ready\\n")
    time.sleep(600)
def end(*_):
    time.sleep(0.1)  # a fork that got it would have written so by then
    os.kill(child, signal.SIGKILL)
    os._exit(5)
signal.signal(signal.SIGTERM, end)
os.write(1, b"ready\\n")
time.sleep(600)
"""
STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"asked\\n"))
os.write(1, b"ready\\n")
while True:
    time.sleep(600)
"""
LAUNCHER = """
import os, subprocess, sys
subprocess.Popen([word.replace("PARENT", str(os.getpid())) for word in sys.argv[1:]], close_fds=False)
input()
"""


class Guarded:
    """A guard with its pipes."""

    def __init__(self, process, report):
        self.process, self.report = process, report

    def pid(self):
        """The number of the program, once it runs."""
        while True:
            for pid, stat in guard.processes().items():
                if stat.group == pid and pid in guard.descendants(self.process.pid, guard.processes()):
                    return pid

    def ended(self):
        """The wait status of the program."""
        before = time.monotonic()
        at, status = self.report.read().split()
        assert before - 240 < float(at) <= time.monotonic()
        return int(status)


@contextmanager
def guarded(*program, parent=None, through=()):
    """Start a guard, by default as a child of this process, or below a launcher of its own."""
    report, end = os.pipe()
    parent = parent or ("PARENT" if through else os.getpid())
    command = [*through, sys.executable, guard.__file__, str(parent), str(end), *program]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, pass_fds=[end], **pipes) as process, open(report, "rb", buffering=0) as file:
        os.close(end)
        yield Guarded(process, file)
        process.kill()


def is_gone(pid):
    deadline = time.monotonic() + 240
    while pid in guard.processes() and time.monotonic() < deadline:
        time.sleep(0.01)
    return pid not in guard.processes()


@pytest.mark.parametrize("command, status", [("exit 0", 0), ("exit 3", 3 << 8), ("kill -9 $$", signal.SIGKILL)])
def test_it_reports_how_the_program_ended(command, status):
    with guarded("sh", "-c", command) as one:
        assert one.ended() == status
        assert one.process.wait(timeout=240) == 0


def test_a_program_that_cannot_be_run():
    with guarded("/no/such program") as one:
        assert one.process.wait(timeout=240) == 1
        assert one.process.stderr.read().endswith(b"FileNotFoundError: [Errno 2] No such file or directory: '/no/such program'\n")


def test_the_program_gets_its_session_and_its_signals_back():
    """The guard blocks signals, and Python ignores SIGPIPE: a program that inherits both cannot be ended."""
    said = "import os, signal; print(os.getsid(0) == os.getpid(), signal.pthread_sigmask(0, []))"
    with guarded(*PYTHON, said) as one:
        assert one.process.stdout.read() == b"True set()\n"
    with guarded("sh", "-c", "kill -PIPE $$") as one:
        assert one.ended() == signal.SIGPIPE


def test_signals_go_to_the_program_and_not_to_its_forks():
    with guarded(*PYTHON, FORKED) as one:
        pid = one.pid()
        assert [one.process.stdout.readline() for _ in range(2)] == [b"ready\n"] * 2
        one.process.send_signal(signal.SIGTERM)
        assert os.WEXITSTATUS(one.ended()) == 5
        assert one.process.wait(timeout=240) == 0
        assert one.process.stdout.read() == b"" and is_gone(pid)


def test_orphans_end_with_the_program():
    with guarded("sh", "-c", "setsid sleep 600 & echo $!") as one:
        orphan = int(one.process.stdout.readline())
        assert one.ended() == 0
        assert one.process.wait(timeout=240) == 0 and is_gone(orphan)


def test_without_its_launcher_it_kills_everything():
    with guarded(*PYTHON, STUBBORN, through=(*PYTHON, LAUNCHER)) as one:
        pid = one.pid()
        assert one.process.stdout.readline() == b"ready\n"
        one.process.stdin.close()  # the launcher ends
        assert is_gone(pid)


def test_it_starts_nothing_for_a_launcher_that_has_ended_before():
    with guarded("sh", "-c", "echo started", parent=1) as one:
        assert one.process.wait(timeout=240) == 1
        assert one.process.stdout.read() == one.report.read() == b""


def test_a_whole_tree_is_found_and_spared():
    stats = {pid: guard.Stat(parent, 0) for pid, parent in {2: 1, 3: 2, 4: 3, 5: 1, 6: 9}.items()}
    assert guard.descendants(1, stats) == {2, 3, 4, 5}
    assert guard.descendants(2, stats) == {3, 4}
    assert guard.descendants(4, stats) == set()
    assert guard.processes()[os.getpid()] == (os.getppid(), os.getpgrp())

"""Runs one program and stops everything it started. It is a script, run by its path between the launcher and the program.

    launcher ──► guard ──► program ──► its children, and their orphans
       ▲           │  ◄────────────────────────────────┘ orphans become the guard's children
       └── pipe ───┘  "51283.5 9": when the program ended, and its wait status

The guard passes SIGINT, SIGTERM and SIGUSR1 on; the launcher decides how long to wait, and kills. When the launcher ends for any
reason, the kernel wakes the guard with a SIGCONT, and the guard kills everything. When the guard ends, the kernel kills the
program, and the launcher inherits the remaining processes.
It imports nothing of this package, so that it starts in milliseconds and holds few bytes.

Source: Linux' prctl(2), PR_SET_PDEATHSIG and PR_SET_CHILD_SUBREAPER; proc_pid_stat(5).
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Set

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
PASSED_ON = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}
_SIGNALS = PASSED_ON | {signal.SIGCHLD, signal.SIGCONT}
_WORKER = "gluon_mgpu.distributed.launcher.worker"


class Stat(NamedTuple):
    """A line of the kernel's list of processes."""

    parent: int
    group: int


def processes() -> Dict[int, Stat]:
    """Return every process that `/proc` shows, by its number."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:  # it may have ended meanwhile
            fields = file.read().rpartition(b")")[2].split()  # the name before ")" may hold blanks and brackets
            found[int(name)] = Stat(int(fields[1]), int(fields[2]))
    return found


def descendants(pid: int, among: Dict[int, Stat]) -> Set[int]:
    """Return the children of a process, their children, and so on."""
    children: Dict[int, List[int]] = {}
    for child, stat in among.items():
        children.setdefault(stat.parent, []).append(child)
    found: Set[int] = set()
    new = [pid]
    while new:
        new = [child for parent in new for child in children.get(parent, []) if child not in found]
        found.update(new)
    return found


def kill_descendants(*, timeout_s: float = 5.0) -> None:
    """Kill and reap all descendants of this process."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        left = descendants(os.getpid(), processes())
        if not left:
            return
        for pid in left:
            _kill(pid, signal.SIGKILL)
        for pid in left:
            with suppress(ChildProcessError):  # not a child of this process
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.005)


def adopt_orphans() -> None:
    """Let orphans among the descendants become children of this process."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(signum: int, parent: int) -> None:
    """Request a signal from the kernel for when the parent ends; exit if it has already ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def main(arguments: Sequence[str]) -> None:
    """Run `PARENT REPORT PROGRAM...`: the launcher, a file descriptor, and the program."""
    parent, report, *command = arguments
    die_with_parent(signal.SIGCONT, int(parent))  # it also wakes a stopped guard
    adopt_orphans()
    os.set_inheritable(int(report), False)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        child = _start(command)
        status = _wait(child.pid, int(parent))
        with suppress(BrokenPipeError):  # the launcher has gone
            os.write(int(report), b"%.6f %d" % (time.monotonic(), status))
    finally:
        kill_descendants()
        remove_socket(os.environ)


def remove_socket(environ: Mapping[str, str]) -> None:
    """Remove the Unix socket of a program with these variables, once it has ended."""
    if "DMLC_LOCAL" in environ:
        with suppress(OSError):  # ps-lite has removed it, or the program has opened none
            os.unlink(f"/tmp/{environ['PORT']}")


def _start(command: List[str]) -> subprocess.Popen:
    """Start the program in a new session. A worker of ours unblocks the signals itself, when it can end without a traceback."""
    guard, held = os.getpid(), PASSED_ON if _WORKER in command else set()

    def prepare() -> None:
        die_with_parent(signal.SIGKILL, guard)
        for signum in PASSED_ON:  # a shell's & ignores some of them
            signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS - held)

    return subprocess.Popen(command, preexec_fn=prepare, start_new_session=True)


def _wait(child: int, parent: int) -> int:
    """Pass signals on until the child has ended, or the launcher has; return the child's wait status."""
    while os.getppid() == parent:
        signum = signal.sigwait(_SIGNALS)
        status = _reap_all(child)
        if status is not None:
            return status
        if signum in PASSED_ON:
            _pass_on(child, signum)
    return int(signal.SIGKILL)


def _reap_all(child: int) -> Optional[int]:
    """Reap all processes that have ended, including orphans; return the child's wait status if it is among them."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return None
        if pid in (0, child):
            return status if pid else None


def _pass_on(child: int, signum: int) -> None:
    """Send a signal to the child's group as a terminal does, except to forks of a process that gets it.

    That process ends its forks itself. For example, a process needs the data of its DataLoader's workers to end its batch.
    """
    group = {pid: stat for pid, stat in processes().items() if stat.group == child} or {child: Stat(os.getpid(), child)}
    programs = {pid: _program(pid) for pid in group}  # all, before any of them ends by the signal
    for pid, stat in group.items():
        if stat.parent not in group or programs[pid] != programs[stat.parent]:
            _kill(pid, signum)


def _program(pid: int) -> bytes:
    with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:  # it may have ended meanwhile
        return file.read() + os.fsencode(os.readlink(f"/proc/{pid}/exe"))
    return b""


def _kill(pid: int, signum: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)


if __name__ == "__main__":
    main(sys.argv[1:])

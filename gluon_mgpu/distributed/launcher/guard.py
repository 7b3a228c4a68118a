"""Runs one program and stops everything it started. It is a script, run by its path between the launcher and the program.

    launcher ──► guard ──► program ──► its children, and their orphans
       ▲           │  ◄────────────────────────────────┘ orphans become the guard's children
       └── pipe ───┘  "pid 71", "ended 51283.5 9": the program's number; when it ended and its wait status

The guard passes SIGINT, SIGTERM and SIGUSR1 on; the launcher decides how long to wait, and kills. When the launcher ends for any
reason, the kernel wakes the guard with a SIGCONT. The guard then stops the program itself: SIGTERM, a grace time, SIGKILL. When
the guard ends, the kernel kills the program, and the launcher inherits the remaining processes.
It imports nothing of this package, so that it starts in milliseconds and holds few bytes.

Source: Linux' prctl(2), PR_SET_PDEATHSIG and PR_SET_CHILD_SUBREAPER; proc_pid_stat(5).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from typing import Dict, List, NamedTuple, Optional, Sequence, Set

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 1, 36, 37
PASSED_ON = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}
_SIGNALS = PASSED_ON | {signal.SIGCHLD, signal.SIGCONT}
_RESTORED = PASSED_ON | {signal.SIGPIPE, signal.SIGXFSZ}  # Python, or a shell's &, ignores some of them
_NOT_FOUND = 127  # the exit status that shells use


class Stat(NamedTuple):
    """A line of the kernel's list of processes."""

    parent: int
    state: str  # R, S, D, Z, T: stopped
    cpu_s: float
    group: int = 0


def processes() -> Dict[int, Stat]:
    """Return every process that `/proc` shows, by its number."""
    found = {}
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()  # the name before ")" may hold blanks and brackets
            except OSError:  # the process has ended meanwhile
                continue
            cpu_s = (int(fields[11]) + int(fields[12])) * tick_s
            found[int(name)] = Stat(int(fields[1]), fields[0].decode(), cpu_s, int(fields[2]))
    return found


def descendants(pid: int, among: Optional[Dict[int, Stat]] = None) -> Set[int]:
    """Return the children of a process, their children, and so on."""
    among = processes() if among is None else among
    children: Dict[int, List[int]] = {}
    for child, stat in among.items():
        children.setdefault(stat.parent, []).append(child)
    found: Set[int] = set()
    new = [pid]
    while new:
        new = [child for parent in new for child in children.get(parent, []) if child not in found]
        found.update(new)
    return found


def kill_descendants(spare: Sequence[int] = (), *, timeout_s: float = 5.0) -> None:
    """Kill and reap all descendants of this process, except for the trees of `spare`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        stats = processes()
        spared = set(spare).union(*(descendants(pid, stats) for pid in spare))
        left = descendants(os.getpid(), stats) - spared
        if not left:
            return
        for pid in left:
            _kill(pid)
        for pid in left:
            _reap(pid)
        time.sleep(0.005)


def adopt_orphans(adopt: bool) -> bool:
    """Set whether orphans among the descendants become children of this process; return the previous setting."""
    before = ctypes.c_int()
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)
    return bool(before.value)


def main(arguments: Sequence[str]) -> int:
    """Run `PARENT REPORT GRACE CORES PROGRAM...`: the launcher, a file descriptor, seconds, "0,1" or "-", and the program."""
    parent, report, grace_s, cores, *command = arguments
    _die_with_parent(signal.SIGCONT, int(parent))  # it also wakes a stopped guard
    adopt_orphans(True)
    os.set_inheritable(int(report), False)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    child = _start(command, [] if cores == "-" else [int(core) for core in cores.split(",")])
    try:
        _report(int(report), b"pid %d\n" % child)
        status = _wait(child, int(parent), float(grace_s))
        _report(int(report), b"ended %.6f %d\n" % (time.monotonic(), status))
    finally:
        kill_descendants()
    return 0


def _report(descriptor: int, line: bytes) -> None:
    with suppress(BrokenPipeError):  # the launcher has gone
        os.write(descriptor, line)


def _start(command: List[str], cores: Sequence[int]) -> int:
    """Fork and execute in a new session; return the child's number once it runs the program."""
    executed, execute = os.pipe()  # closed by the kernel when the program starts
    guard = os.getpid()
    child = os.fork()
    if not child:
        try:
            os.setsid()
            _die_with_parent(signal.SIGKILL, guard)
            if cores:
                os.sched_setaffinity(0, cores)
            for signum in _RESTORED:
                signal.signal(signum, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            os.execvp(command[0], command)
        except OSError as error:
            os.write(
                2, f"gluon-mgpu launch: got {command[0]!r}: {error.strerror}; expected a program that can be run.\n".encode()
            )
        finally:
            os._exit(_NOT_FOUND)
    os.close(execute)
    os.read(executed, 1)
    os.close(executed)
    return child


def _wait(child: int, parent: int, grace_s: float) -> int:
    """Pass signals on until the child has ended; stop it when the launcher is gone. Return its wait status."""
    deadline: Optional[float] = None
    while True:
        left_s = 3600.0 if deadline is None else max(0.0, deadline - time.monotonic())
        received = signal.sigtimedwait(_SIGNALS, left_s)
        status = _reap_all(child)
        if status is not None:
            return status
        signum = received.si_signo if received is not None else 0
        if signum == signal.SIGCONT and os.getppid() != parent:
            signum = signal.SIGTERM
            deadline = deadline or time.monotonic() + grace_s
        if signum in PASSED_ON:
            _pass_on(child, signum)
        elif deadline is not None and time.monotonic() >= deadline:
            _kill_group(child, signal.SIGKILL)
            return os.waitpid(child, 0)[1]


def _reap_all(child: int) -> Optional[int]:
    """Reap all processes that have ended, including orphans; return the child's wait status if it is among them."""
    status = None
    while True:
        try:
            pid, ended = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == 0:
            return status
        if pid == child:
            status = ended


def _pass_on(child: int, signum: int) -> None:
    """Send a signal to the child's group as a terminal does, except to forks of a process that gets it.

    That process ends its forks itself. For example, a process needs the data of its DataLoader's workers to end its batch.
    """
    group = {pid: stat for pid, stat in processes().items() if stat.group == child} or {child: Stat(os.getpid(), "", 0.0)}
    for pid, stat in group.items():
        if stat.parent not in group or _program(pid) != _program(stat.parent):
            _kill(pid, signum)


def _program(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read() + os.fsencode(os.readlink(f"/proc/{pid}/exe"))
    except OSError:  # the process has ended meanwhile
        return b""


def _kill_group(pid: int, signum: int) -> None:
    try:
        os.killpg(pid, signum)
    except ProcessLookupError:
        _kill(pid, signum)  # the process has left its group, which is empty now


def _kill(pid: int, signum: int = signal.SIGKILL) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)


def _reap(pid: int) -> None:
    with suppress(ChildProcessError):  # not a child of this process
        os.waitpid(pid, os.WNOHANG)


def _die_with_parent(signum: int, parent: int) -> None:
    """Request a signal from the kernel for when the parent ends; exit if it has already ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

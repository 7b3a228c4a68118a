"""Garbage on the ports of MXNet's store: the process that gets it aborts, and the job recovers with the same bits.

Each trial launches two processes with --max-restarts 1, waits for a random step, and sends random bytes to the ports of the
scheduler, the server or a worker: as they are, or as a message behind a greeting of ZeroMQ, which ps-lite then parses.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import List

from signals import NUM_STEPS, _bits, _command, _environment, _marked, _undisturbed

BOUND_S = 300.0


def trial(seed: int) -> str:
    """Send garbage to one kind of process, once; return the error, "" if there is none."""
    rng = random.Random(seed)
    role, greets, step = rng.choice(["scheduler", "server", "worker"]), rng.random() < 0.75, rng.randint(1, 2 * NUM_STEPS - 2)
    label = f"seed {seed}: {role}, {'a message' if greets else 'bytes'}, after step {step}"
    folder = Path(tempfile.mkdtemp(prefix="trial-garbage-"))
    mark = f"{folder.name}-{os.getpid()}"
    command = _command(folder, True, 1.0, "data")
    command[command.index("-n") : command.index("-n")] = ["--max-restarts", "1"]
    log = folder / "logs" / "rank-0.log"
    try:
        with open(folder / "output", "wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=_environment(mark), cwd=folder)
        deadline = time.monotonic() + BOUND_S
        while not (log.exists() and f"step {step}\n" in log.read_text()) and time.monotonic() < deadline:
            time.sleep(0.02)
        for port in _ports(mark, role):
            _send(rng, port, greets=greets)
        try:
            code = process.wait(timeout=BOUND_S)
        except subprocess.TimeoutExpired:
            code = 1000
        left = _marked(mark)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        process.wait()
        text = (folder / "output").read_text(errors="replace")
        wrong = f"left processes {left}" if left else f"ended with {code}" if code else ""
        if not wrong and greets and "1 restarts after garbage on ps-lite's ports" not in text:
            wrong = "no restart after garbage is reported"
        if not wrong and _bits(folder) != _undisturbed(True):
            wrong = "the job has other bits"
        return f"{label}: {wrong}\n{text[-3000:]}" if wrong else ""
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _ports(mark: str, role: str) -> List[int]:
    """Return the ports at which the processes of a role listen."""
    found = []
    for pid in _marked(mark):
        folder = Path(f"/proc/{pid}")
        with suppress(OSError):
            if f"DMLC_ROLE={role}".encode() in (folder / "environ").read_bytes():
                sockets = {os.readlink(descriptor) for descriptor in (folder / "fd").iterdir()}
                for line in (folder / "net" / "tcp").read_text().splitlines()[1:]:
                    row = line.split()
                    if row[3] == "0A" and f"socket:[{row[9]}]" in sockets:
                        found.append(int(row[1].rpartition(":")[2], 16))
    return found


def _send(rng: random.Random, port: int, *, greets: bool) -> None:
    data = bytes(rng.randrange(256) for _ in range(rng.randint(8, 200)))
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=2) as stranger:
        if greets:  # ZMTP 3.0: signature, version, mechanism; READY as a DEALER; one message of two frames
            stranger.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
            time.sleep(0.1)
            ready = (
                b"\x05READY\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER\x08Identity" + (5).to_bytes(4, "big") + b"ps123"
            )
            stranger.sendall(b"\x04" + bytes([len(ready)]) + ready)
            time.sleep(0.1)
            stranger.sendall(b"\x00" + bytes([len(data)]) + data)
        else:
            stranger.sendall(data)
        time.sleep(0.3)

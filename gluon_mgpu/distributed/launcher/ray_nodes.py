"""Machines by Ray: it finds and places them, and notices their loss. An actor on each runs that machine's launcher.

this process ──► Ray ──► actor on node 0 ──► gluon-mgpu launch --node-rank 0 ──► its guards and workers
      ▲              └─► actor on node 1 ──► gluon-mgpu launch --node-rank 1 ──► ...
      └── output, exit codes, lost machines ──┘

After a failure the launchers of all machines are stopped, and the job starts again on the machines that are there.
"""

from __future__ import annotations

import ctypes
import logging
import os
import random
import selectors
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from ...errors import last_line
from ...runtime.environment import require
from ..process import REQUEUE, LaunchError, exit_code_of
from . import guard
from .network import parse_master, reserve_port
from .output import Output
from .run import make_log_dir
from .supervisor import Signals

_PORTS = (20_000, 32_000)  # above Ray's own, below those that Linux gives to clients
_TRIES = 20  # to find free ports
_POLL_S = 0.5
_SHOWN_S = 5.0  # a longer wait is reported
_RETURN_S = 10.0  # for a lost machine to return, if the job may continue without it
_START_S = 60.0  # for a machine that Ray knows to start an actor, and for Ray to notice that the machine is lost
_GUARDS_S = 10.0  # for the guards of a killed launcher to stop their programs
_CONNECT_S = 10.0
_PR_SET_PDEATHSIG = 1
_PASSED_ON = ("GLUON_MGPU_", "HOROVOD_", "MXNET_", "OMP_", "PS_", "PYTHON")  # variables that reach the other machines
_SAVED = {exit_code_of(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
Polled = Tuple[List[Tuple[int, bytes]], Optional[int]]  # output for standard output (0) and error (1), the exit code at the end


@dataclass(frozen=True)
class RayJob:
    """A job on machines of a Ray cluster.

    Attributes
    ----------
    address : str
        Host and port of the cluster's head, or "auto": `RAY_ADDRESS`, or the cluster of this machine.
    arguments : tuple of str
        Of each machine's launcher: options that do not place it, and the program.
    num_nodes, min_nodes : int
        The number of machines, and the smallest one with which the job may continue.
    num_cpus, num_gpus : int
        What Ray reserves on each machine.
    max_restarts : int
    join_s : float, seconds
        How long to wait for machines.
    log_dir : pathlib.Path, optional
        Holds a folder of logs for each machine; by default a new one in `runs/launch`, named after the time.
    """

    address: str
    arguments: Tuple[str, ...]
    num_nodes: int
    min_nodes: int
    num_cpus: int
    num_gpus: int
    max_restarts: int
    join_s: float
    log_dir: Optional[Path] = None


class Actor:
    """Runs a machine's launcher as a child of the main thread, in which Ray calls an actor with one thread.

    The kernel kills the launcher with the thread that started it: this thread lives as long as the actor.
    """

    def address(self, num_ports: int) -> Tuple[str, int]:
        """Return the address of this machine in the cluster, and the first of `num_ports` free ports."""
        host = str(require("ray.util", "ray", "launch").get_node_ip_address())
        for _ in range(_TRIES):
            first = random.randrange(_PORTS[0], _PORTS[1] - num_ports)
            with ExitStack() as stack, suppress(LaunchError):
                for port in range(first, first + num_ports):
                    stack.enter_context(reserve_port(host, port))
                return host, first
        raise LaunchError(f"launch: got {host} from Ray; expected an address of this machine with {num_ports} free ports.")

    def start(self, arguments: Sequence[str], environ: Dict[str, str], folder: str) -> Polled:
        """Start the launcher; return its first output."""
        guard.adopt_orphans(True)  # the guards of a launcher that is killed become children of this process
        own = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}  # Ray has set it
        prctl = ctypes.CDLL(None).prctl

        def prepare() -> None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])  # Ray blocks SIGINT

        self._child = subprocess.Popen(
            [sys.executable, "-m", "gluon_mgpu", "launch", *arguments],
            env={**own, **environ},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=prepare,
        )
        self._selector, self._begun = selectors.DefaultSelector(), [b"", b""]  # incomplete lines
        for stream, pipe in enumerate((self._child.stdout, self._child.stderr)):
            assert pipe is not None
            self._selector.register(pipe, selectors.EVENT_READ, stream)
        return self.poll()

    def poll(self) -> Polled:
        """Wait a little; return the launcher's output since the last call, and its exit code if it has ended."""
        output = []
        for key, _ in self._selector.select(_POLL_S):
            data = os.read(key.fd, 1 << 16)
            if not data:
                self._selector.unregister(key.fileobj)
            lines, newline, self._begun[key.data] = (self._begun[key.data] + data).rpartition(b"\n")
            output.append((key.data, lines + newline))
        if self._selector.get_map():
            return output, None
        code = self._child.wait()
        self._wait_for_guards()
        return output, code if code >= 0 else 128 - code

    def signal(self, signum: int) -> None:
        """Pass a signal to the launcher. Ray runs calls in their order, so the launcher has been started."""
        self._child.send_signal(signum)

    def _wait_for_guards(self) -> None:
        """Wait until nothing is left of a launcher that was killed; then the job may start again."""
        deadline = time.monotonic() + _GUARDS_S
        while guard.descendants(os.getpid()) and time.monotonic() < deadline:
            with suppress(ChildProcessError):
                os.waitpid(-1, os.WNOHANG)
            time.sleep(0.05)
        guard.kill_descendants()


class RayMachines:
    """Runs a job on the machines of the cluster to which Ray is connected."""

    def __init__(self, job: RayJob, ray: Any, output: Output, signals: Signals) -> None:
        self._job, self._ray, self._output, self._signals = job, ray, output, signals
        self._groups = require("ray.util.placement_group", "ray", "launch")
        self._actor = ray.remote(num_cpus=job.num_cpus, num_gpus=job.num_gpus)(Actor)

    def run(self) -> Tuple[int, str]:
        """Run the job; return the exit code, and its cause if the code is not 0."""
        restart = 0
        while True:
            with ExitStack() as stack:
                try:
                    code, cause = self._poll_until_end(*self._gather(restart, stack), restart)
                except self._ray.exceptions.RayError as error:
                    code, cause = 1, f"lost a machine at the start: {last_line(error)}"
            if self._signals.first:
                return exit_code_of(self._signals.first), f"ended by {signal.Signals(self._signals.first).name}"
            if code in (0, REQUEUE) or restart == self._job.max_restarts:
                return code, cause
            restart += 1
            self._output.report(f"{cause}. Restart {restart} of {self._job.max_restarts}")

    def _gather(self, restart: int, stack: ExitStack) -> Tuple[List[Any], List[Tuple[str, int]]]:
        """Start an actor on as many machines as there are; return the actors and their addresses, none after a signal."""
        job = self._job
        bundle = {"CPU": job.num_cpus, "GPU": job.num_gpus}
        for count in range(job.num_nodes, job.min_nodes - 1, -1):
            group = self._groups.placement_group([bundle] * count, strategy="STRICT_SPREAD")  # each on another machine
            stack.callback(self._groups.remove_placement_group, group)
            places = [{"placement_group": group, "placement_group_bundle_index": rank} for rank in range(count)]
            actors = [self._actor.options(**place).remote() for place in places]
            addresses = [actor.address.remote(count + 2) for actor in actors]  # as many ports as Job.ports counts
            since, is_shown = time.monotonic(), False
            while time.monotonic() - since < self._patience_s(count, restart):
                ready, _ = self._ray.wait(addresses, num_returns=count, timeout=_POLL_S)
                if self._signals.first:
                    return [], []
                if len(ready) == count:
                    return actors, self._ray.get(addresses)
                if not is_shown and time.monotonic() - since > _SHOWN_S:
                    is_shown = True
                    self._output.report(f"waiting for {count} machines of Ray with {bundle} free")
            stack.close()
        raise LaunchError(
            f"launch: got fewer than {job.min_nodes} machines of Ray with {bundle} free for {job.join_s:.0f} s; expected "
            f"{job.num_nodes}. Compare with ray status; start Ray on more machines, or pass a smaller -n or --min-nodes."
        )

    def _patience_s(self, count: int, restart: int) -> float:
        """Return how long to wait for so many machines: not long if Ray knows fewer and the job may continue with them."""
        if count == (self._job.min_nodes if restart else self._job.num_nodes):
            return self._job.join_s
        known = sum(node["Alive"] and node["Resources"].get("CPU", 0) >= self._job.num_cpus for node in self._ray.nodes())
        return min(self._job.join_s, _START_S if known >= count else _RETURN_S)

    def _poll_until_end(self, actors: List[Any], addresses: List[Tuple[str, int]], restart: int) -> Tuple[int, str]:
        """Run the job once; return the exit code of the first machine that fails, and the cause."""
        code, cause, polls = 0, "", {}
        environ = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
        if 0 < len(actors) < self._job.num_nodes:
            self._output.report(f"continuing with {len(actors)} of {self._job.num_nodes} machines")
        for rank, actor in enumerate(actors):
            polls[actor.start.remote(self._arguments(rank, addresses, restart), environ, os.getcwd())] = rank
        while polls:
            ended, _ = self._ray.wait(list(polls), timeout=_POLL_S)
            signals = self._signals.take()
            for poll in ended:
                rank = polls.pop(poll)
                name = f"node {rank} ({addresses[rank][0]})"
                try:
                    (output, status), failure = self._ray.get(poll), f"the launcher of {name} failed"
                except self._ray.exceptions.RayError as error:
                    output, status, failure = [], 1, f"lost {name}: {last_line(error)}"
                for stream, data in output:
                    self._output.show(data, stream)
                if status is None:
                    polls[actors[rank].poll.remote()] = rank
                elif status and not code:
                    code, cause = status, failure
                    if code not in _SAVED and not self._signals.first:
                        signals.append(signal.SIGKILL)  # the guards of the other launchers stop their programs
            for signum in signals:
                for rank in polls.values():
                    actors[rank].signal.remote(signum)
        return code, cause

    def _arguments(self, rank: int, addresses: List[Tuple[str, int]], restart: int) -> List[str]:
        """Return the arguments of a machine's launcher."""
        placed = ["--nodes", len(addresses), "--node-rank", rank, "--master", "{}:{}".format(*addresses[0])]
        placed += ["--interface", addresses[rank][0], "--restart", restart, "--log-dir", self._output.folder / f"node{rank}"]
        return [*map(str, placed), *self._job.arguments]


def run_with_ray(job: RayJob) -> int:
    """Run a job on machines of a Ray cluster, from the main thread; return the exit code as `run_job` does on one machine.

    Raises
    ------
    MissingExtraError
        Ray is not installed.
    LaunchError
        There is no such cluster, or it has too few machines.
    """
    ray = require("ray", "ray", "launch")
    try:
        if job.address != "auto":  # where nothing listens, Ray would try for minutes
            socket.create_connection(parse_master(job.address), _CONNECT_S).close()
        ray.init(address=job.address, log_to_driver=False, logging_level=logging.WARNING)
    except (OSError, RuntimeError, ValueError) as error:
        raise LaunchError(
            f"launch: got --ray {job.address} ({last_line(error)}); expected a Ray cluster. Run ray start --head on one machine, "
            "and ray start --address HOST:PORT on the others."
        ) from error
    output = Output(job.log_dir or make_log_dir(), sys.stdout.buffer, sys.stderr.buffer)
    try:
        with Signals() as signals, redirect_stdout(sys.stderr):  # now: Ray has set its handlers; it prints its own messages
            code, cause = RayMachines(job, ray, output, signals).run()
    finally:
        ray.shutdown()
    if code:
        output.report(f"{cause}.\nThe logs are in {output.folder}.")
    return code

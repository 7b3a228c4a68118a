"""Machines by Ray: it finds and places them, and notices their loss. An actor on each runs that machine's launcher.

this process ──► Ray ──► actor on node 0 ──► gluon-mgpu launch --node-rank 0 ──► its guards and workers
      ▲              └─► actor on node 1 ──► gluon-mgpu launch --node-rank 1 ──► ...
      └── output, exit codes, lost machines ──┘

After a failure the launchers of all machines are stopped, and the job starts again on the machines that are there.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from ...errors import last_line
from ...runtime.environment import require
from ..process import LaunchError
from . import guard
from .network import parse_master
from .output import Output
from .started import ASKED, Failure
from .supervisor import Signals, job_output, restart_on_failure

_PORTS = (20_000, 32_000)  # above Ray's own, below those that Linux gives to clients
_POLL_S = 0.2
_RETURN_S = 10.0  # for a lost machine to return, if the job may continue without it
_CONNECT_S = 10.0
_READ = 1 << 24
_PASSED_ON = ("GLUON_MGPU_", "HOROVOD_", "MXNET_", "OMP_", "PS_", "PYTHON")  # variables that reach the other machines
_Polled = Tuple[List[bytes], Optional[int]]  # new standard output and error, and the exit code at the end


class Actor:
    """Runs a machine's launcher as a child of the main thread, in which Ray calls an actor with one thread.

    The kernel kills the launcher with the thread that started it: this thread lives as long as the actor.
    """

    def address(self) -> Tuple[str, int]:
        """Return the address of this machine in the cluster, and a port that is probably free like those after it."""
        return str(require("ray.util", "ray", "launch").get_node_ip_address()), random.randrange(*_PORTS)

    def start(self, arguments: Sequence[str], environ: Dict[str, str], folder: str) -> _Polled:
        """Start the launcher; return its first output."""
        guard.adopt_orphans()  # the guards of a launcher that is killed become children of this process
        actor, own = os.getpid(), {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}  # Ray's

        def prepare() -> None:
            guard.die_with_parent(signal.SIGKILL, actor)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])  # Ray blocks SIGINT

        self._files = out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115  (until the actor ends)
        self._read = [0, 0]
        command = [sys.executable, "-m", "gluon_mgpu", "launch", *arguments]
        options: Dict[str, Any] = {"cwd": folder, "env": {**own, **environ}, "stdin": subprocess.DEVNULL}
        self._child = subprocess.Popen(command, **options, stdout=out, stderr=err, start_new_session=True, preexec_fn=prepare)
        return self.poll()

    def poll(self) -> _Polled:
        """Wait a moment; return the new output, in whole lines, and the exit code once all output is read."""
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(_POLL_S)
        code, output = self._child.returncode, []
        for stream, file in enumerate(self._files):
            data = os.pread(file.fileno(), _READ, self._read[stream])
            data = data if code is not None else data[: data.rfind(b"\n") + 1]
            self._read[stream] += len(data)
            output.append(data)
        if code is None or any(output):
            return output, None
        guard.kill_descendants()  # what is left of a launcher that was killed; then the job may start again
        return output, code if code >= 0 else 128 - code

    def signal(self, signum: int) -> None:
        """Pass a signal to the launcher. Ray runs calls in their order, so the launcher has been started."""
        self._child.send_signal(signum)


@dataclass
class RayJob:
    """A job on machines of a Ray cluster.

    Attributes
    ----------
    arguments : tuple of str
        Of each machine's launcher: options that do not place it, and the program.
    num_nodes, min_nodes : int
        The number of machines, and the smallest one with which the job may continue.
    num_cpus, num_gpus : int
        What Ray reserves on each machine.
    max_restarts : int
    join_s : float, seconds
        How long to wait for machines.
    """

    arguments: Tuple[str, ...]
    num_nodes: int
    min_nodes: int
    num_cpus: int
    num_gpus: int
    max_restarts: int
    join_s: float

    def run(self, address: str, log_dir: Optional[Path]) -> int:
        """Run the job, from the main thread; return the exit code as `run_job` does on one machine.

        Parameters
        ----------
        address : str
            Host and port of the cluster's head, or "auto": `RAY_ADDRESS`, or the cluster of this machine.
        log_dir : pathlib.Path, optional
            Holds a folder of logs for each machine; by default a new one in `runs/launch`, named after the time.

        Raises
        ------
        MissingExtraError
            Ray is not installed.
        LaunchError
            There is no such cluster, or it has too few machines.
        """
        self._ray = require("ray", "ray", "launch")
        try:
            if address != "auto":  # where nothing listens, Ray would try for minutes
                socket.create_connection(parse_master(address), _CONNECT_S).close()
            self._ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
        except (OSError, RuntimeError, ValueError) as error:
            raise LaunchError(
                f"launch: got --ray {address} ({last_line(error)}); expected a Ray cluster. Run ray start --head on one machine, "
                "and ray start --address HOST:PORT on the others, with the same ~/.ray/auth_token if it asks for one."
            ) from error
        self._output: Output = job_output(log_dir)
        try:
            with Signals() as self._signals, redirect_stdout(sys.stderr):  # now: Ray has set its handlers; it prints messages
                return restart_on_failure(self._attempt, self.max_restarts, self._signals, self._output)
        finally:
            self._ray.shutdown()

    def _attempt(self, restart: int) -> Optional[Failure]:
        """Run the job once; return the failure of the first machine that failed."""
        with ExitStack() as stack:
            try:
                return self._poll_until_end(*self._gather(restart, stack), restart)
            except self._ray.exceptions.RayError as error:
                return Failure(f"lost a machine at the start: {last_line(error)}.", 1)

    def _gather(self, restart: int, stack: ExitStack) -> Tuple[List[Any], List[Tuple[str, int]]]:
        """Start an actor on as many machines as there are; return the actors and their addresses, none after a signal."""
        groups = require("ray.util.placement_group", "ray", "launch")
        actor_type = self._ray.remote(num_cpus=self.num_cpus, num_gpus=self.num_gpus)(Actor)
        bundle = {"CPU": self.num_cpus, "GPU": self.num_gpus}
        since, count = time.monotonic(), 0
        actors: List[Any] = []
        while time.monotonic() - since < self.join_s:
            known = sum(node["Alive"] and node["Resources"].get("CPU", 0) >= self.num_cpus for node in self._ray.nodes())
            may_shrink = restart and time.monotonic() - since > _RETURN_S
            wanted = max(self.min_nodes, min(known, self.num_nodes)) if may_shrink else self.num_nodes
            if wanted != count:
                stack.close()
                count = wanted
                self._output.report(f"waiting for {count} of {self.num_nodes} machines of Ray with {bundle} free")
                group = groups.placement_group([bundle] * count, strategy="STRICT_SPREAD")  # each on another machine
                stack.callback(groups.remove_placement_group, group)
                places = [{"placement_group": group, "placement_group_bundle_index": rank} for rank in range(count)]
                actors = [actor_type.options(**place).remote() for place in places]
                addresses = [actor.address.remote() for actor in actors]
            ready, _ = self._ray.wait(addresses, num_returns=count, timeout=_POLL_S)
            if self._signals.first:
                return [], []
            if len(ready) == count:
                return actors, self._ray.get(addresses)
        raise LaunchError(
            f"launch: got fewer than {count} machines of Ray with {bundle} free for {self.join_s:.0f} s; expected "
            f"{self.num_nodes}. Compare with ray status; start Ray on more machines, or pass a smaller -n or --min-nodes."
        )

    def _poll_until_end(self, actors: List[Any], addresses: List[Tuple[str, int]], restart: int) -> Optional[Failure]:
        first: Optional[Failure] = None
        polls = {}
        environ = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
        for rank, (actor, (host, _)) in enumerate(zip(actors, addresses)):
            placed = ["--nodes", len(addresses), "--node-rank", rank, "--master", "{}:{}".format(*addresses[0])]
            placed += ["--interface", host, "--restart", restart, "--log-dir", self._output.folder / f"node{rank}"]
            polls[actor.start.remote([*map(str, placed), *self.arguments], environ, os.getcwd())] = rank
        while polls:
            ended, _ = self._ray.wait(list(polls), timeout=_POLL_S)
            signals = self._signals.take()
            for poll in ended:
                rank = polls.pop(poll)
                name = f"node {rank} ({addresses[rank][0]})"
                try:
                    (output, status), what = self._ray.get(poll), f"the launcher of {name} failed."
                except self._ray.exceptions.RayError as error:
                    output, status, what = [], 1, f"lost {name}: {last_line(error)}."
                for stream, data in enumerate(output):
                    self._output.show(data, stream)
                if status is None:
                    polls[actors[rank].poll.remote()] = rank
                elif status and first is None:
                    first = Failure(what, status, can_restart=status not in ASKED)
                    if first.can_restart and not self._signals.first:
                        signals.append(signal.SIGKILL)  # the guards of the other launchers stop their programs
            for signum in signals:
                for rank in polls.values():
                    actors[rank].signal.remote(signum)
        return first

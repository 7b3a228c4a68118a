"""gluon-mgpu launch: a program in several processes, on one machine or on several."""

from __future__ import annotations

import os
import re
import sys
from itertools import takewhile
from typing import Any, Dict, Optional, Tuple

import click

from ..distributed.launcher.job import BACKENDS, Job
from ..distributed.launcher.network import parse_master
from ..distributed.launcher.placement import placement
from ..distributed.launcher.program import program_command
from ..distributed.launcher.ray_nodes import RayJob
from ..distributed.launcher.supervisor import run_job
from ..mxnet_internals.library import num_gpus
from ._options import FOLDER, Whole, count, positive

_OF_JOB = ("num_processes", "servers", "backend", "interface", "log_dir", "max_restarts", "restart")  # named as there
_NOT_WITH_RAY = ("node_rank", "master", "interface", "min_processes")  # Ray places the machines


def _ray_address(_context: click.Context, _parameter: click.Parameter, text: Optional[str]) -> Optional[str]:
    if text not in (None, "auto") and not re.fullmatch(r"[^:]+:[0-9]{1,5}", text or ""):
        raise click.BadParameter(f"got {text!r}; expected HOST:PORT or auto. Write --ray auto before the program.")
    return text


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("-n", "--num-processes", type=Whole(1, 1024), default=1, help="Processes on each machine.")
@click.option(
    "--servers",
    type=Whole(1, 1024),
    help="Number of parameter servers of MXNet's store. By default two on one machine, one per machine on several; none for one "
    "process.",
)
@click.option(
    "--backend",
    type=click.Choice(BACKENDS),
    default="dist_sync",
    help="How the processes communicate: MXNet's own store with parameter servers, or Horovod, if it is installed.",
)
@count(
    "--devices-per-process", help="GPUs of each process (CUDA_VISIBLE_DEVICES). By default the machine's GPUs are divided evenly."
)
@click.option(
    "--accept-optimizers",
    is_flag=True,
    help="Let servers unpickle what KVStore.set_optimizer sends, which can run any program. For gluon.Trainer with dist_sync.",
)
@click.option("-m", "--module", is_flag=True, help="PROGRAM is a Python module, as after python -m.")
@click.option(
    "--max-restarts",
    type=Whole(0),
    default=0,
    help="After a failure, stop all processes and start them again, at most this many times. The program resumes from its "
    "checkpoint.",
)
@count(
    "--min-processes",
    help="Restart with one process fewer if the same one fails twice in a row, but never with fewer than this. One machine only.",
)
@count(
    "--nodes",
    help="Number of machines. Run the same command on each, with its --node-rank. Under srun and mpirun: those of the job.",
)
@click.option("--node-rank", type=Whole(0), help="Number of this machine, from 0. Known under srun and mpirun.")
@click.option(
    "--master", metavar="HOST:PORT", help="Address of node 0, and a port there, free like those after it. Known under srun."
)
@click.option(
    "--ray",
    metavar="[ADDRESS]",
    is_flag=False,
    flag_value="auto",
    callback=_ray_address,
    help="Run on machines of a Ray cluster, HOST:PORT; auto, or nothing before another option, is that of this machine. Ray "
    "finds the machines and runs this command on each.",
)
@count("--min-nodes", help="Restart without the machines that Ray has lost, but never with fewer than this. With --ray only.")
@click.option(
    "--interface", help="Network interface or address for TCP. By default loopback; on several machines, the one to node 0."
)
@positive(
    "--grace",
    default=120.0,
    help="After Ctrl-C or SIGTERM: seconds in which processes may finish their batch and save, before they are killed. A second "
    "signal kills immediately.",
)
@positive("--join-timeout", default=300.0, help="Seconds that machines wait for each other at the start.")
@click.option("--log-dir", type=FOLDER, help="Folder for the logs, one per process.")
@click.option("--restart", type=Whole(0), default=0, hidden=True, help="Restarts before this one, as Ray has counted them.")
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
def launch(program: Tuple[str, ...], **options: Any) -> None:
    """Run a program in several processes that train together.

    PROGRAM is a script that ends in .py, a module after -m, or a command such as gluon-mgpu train resnet18, and its arguments.
    Each line of output begins with the process's rank. When a process fails, the launcher stops the others and returns its
    exit code. Ctrl-C, SIGTERM and SIGUSR1 are forwarded: fit finishes its batch and saves, and the launcher exits with 130, 143
    or 85.
    """
    if options["ray"]:
        sys.exit(_run_with_ray(program, options))
    if options["min_nodes"]:
        raise click.UsageError("got --min-nodes; expected --ray with it. On one machine, see --min-processes.")
    nodes, node_rank, master = placement(os.environ) if options["nodes"] is options["node_rank"] is None else _place(options)
    job = Job(
        program_command(program, module=options["module"]),
        num_nodes=nodes,
        node_rank=node_rank,
        master=parse_master(options["master"]) if options["master"] else master,
        gpus=_gpus(),
        gpus_per_process=options["devices_per_process"] or 0,
        min_processes=options["min_processes"] or 0,
        grace_s=options["grace"],
        join_s=options["join_timeout"],
        accept_optimizers=options["accept_optimizers"],
        **{name: options[name] for name in _OF_JOB},
    )
    sys.exit(run_job(job))


def _place(options: Dict[str, Any]) -> Tuple[int, int, None]:
    nodes, node_rank = options["nodes"] or 1, options["node_rank"]
    if node_rank is None and nodes > 1:
        raise click.UsageError(f"got --nodes {nodes}; expected --node-rank, the number of this machine, 0 to {nodes - 1}.")
    return nodes, node_rank or 0, None


def _run_with_ray(program: Tuple[str, ...], options: Dict[str, Any]) -> int:
    wrong = [f"--{name.replace('_', '-')}" for name in _NOT_WITH_RAY if options[name] is not None]
    nodes, num_processes = options["nodes"] or 1, options["num_processes"]
    fewest = options["min_nodes"] or nodes
    if wrong or fewest > nodes:
        raise click.UsageError(
            f"got --ray with {' and '.join(wrong) or f'--nodes {nodes} --min-nodes {fewest}'}; expected --nodes, and --min-nodes "
            "if it may shrink. Ray places the machines."
        )
    program_command(program, module=options["module"])  # raises if there is no such program
    names = ("num_processes", "servers", "backend", "devices_per_process", "join_timeout", "grace")
    words = [f"--{name.replace('_', '-')}={options[name]}" for name in names if options[name] is not None]
    words += [*(["--accept-optimizers"] if options["accept_optimizers"] else [])]
    words += [*(["-m"] if options["module"] else []), *program]
    gpus = num_processes * (options["devices_per_process"] or 0)
    own = tuple(words), nodes, fewest, num_processes, gpus, options["max_restarts"], options["join_timeout"]
    return RayJob(*own).run(options["ray"], options["log_dir"])


def _gpus() -> Tuple[str, ...]:
    """Return the names of this machine's GPUs, as in `CUDA_VISIBLE_DEVICES`."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = (name.strip() for name in visible.split(","))
        return tuple(takewhile(lambda name: name != "-1", filter(None, names)))  # CUDA sees none from there on
    return tuple(map(str, range(num_gpus())))

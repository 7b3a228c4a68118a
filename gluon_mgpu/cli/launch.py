"""gluon-mgpu launch: a program in several processes, on one machine or on many."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import click
import mxnet as mx

from ..distributed.launcher.hosts import PORT, SshHosts, parse_hosts, slurm_nodes
from ..distributed.launcher.job import Job, run_job, run_over_ssh
from ..distributed.launcher.plan import BACKENDS, program_command
from ..distributed.launcher.rendezvous import parse_rendezvous
from ..distributed.launcher.supervisor import Limits
from ..distributed.launcher.tokens import TOKEN, make_token_file, new_token, read_token, token_in_environment
from ..distributed.process import LaunchError

_LOCAL = {
    "num_processes",
    "nodes",
    "node_rank",
    "rendezvous",
    "hostfile",
    "token_file",
    "end_with_input",
    "program",
    "module",
}  # options that each host gets in another way, or not at all


_PLACEHOLDER = "to-be-made-when-the-job-is-checked"  # for the token


def _elastic(_context: click.Context, _parameter: click.Parameter, text: Optional[str]) -> Optional[Tuple[int, int]]:
    if text is None:
        return None
    fewest, colon, most = text.partition(":")
    are_numbers = all(number.isascii() and number.isdigit() and len(number) < 10 for number in (fewest, most))
    if not colon or not are_numbers or not 0 < int(fewest) <= int(most):
        raise click.BadParameter(f"got {text!r}; expected MIN:MAX, such as 2:4.")
    return int(fewest), int(most)


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "-n",
    "--num-processes",
    type=click.IntRange(1),
    help="Processes on this machine; 1 by default, and MAX with --elastic.",
)
@click.option(
    "--servers",
    type=click.IntRange(1),
    help="Number of parameter servers of MXNet's store. By default two on one machine, one per machine on several; none for one "
    "process.",
)
@click.option(
    "--backend",
    type=click.Choice(BACKENDS),
    default="dist_sync",
    show_default=True,
    help="How the processes communicate: MXNet's own store with parameter servers, or Horovod, if it is installed.",
)
@click.option(
    "--devices-per-process",
    type=click.IntRange(1),
    help="GPUs of each process (CUDA_VISIBLE_DEVICES). By default the machine's GPUs are divided evenly.",
)
@click.option("-m", "--module", is_flag=True, help="PROGRAM is a Python module, as after python -m.")
@click.option(
    "--max-restarts",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="After a failure, stop all processes and start them again, at most this many times. The program resumes from its "
    "checkpoint.",
)
@click.option(
    "--elastic",
    callback=_elastic,
    metavar="MIN:MAX",
    help="Restart with one process fewer if the same one fails twice in a row, and without a machine that does not return.",
)
@click.option("--nodes", type=click.IntRange(1), help="Number of machines. Run the same command on each, with its --node-rank.")
@click.option("--node-rank", type=click.IntRange(0), help="Number of this machine, from 0.")
@click.option("--rendezvous", metavar="HOST:PORT", help="Address of node 0, and a port that is free there.")
@click.option(
    "--hostfile",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Start on these machines by ssh: one per line, such as node1 slots=4. Their folder and Python must be the same.",
)
@click.option(
    "--token-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File with the secret that the machines share, readable only by you. Node 0 writes a new one if it is missing. Without "
    "this option, GLUON_MGPU_TOKEN is read; if that is not set, node 0 prints a new token.",
)
@click.option(
    "--end-with-input", is_flag=True, hidden=True, help="End when standard input does, as --hostfile asks of each host."
)
@click.option(
    "--interface",
    help="Network interface, or address, to bind to. By default loopback on one machine, and that of the rendezvous on several.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(0),
    default=300.0,
    show_default=True,
    help="Seconds for which a process may be stopped, and for which all may be idle (a tenth of it once one has finished), "
    "before they count as hung. 0: no limit.",
)
@click.option(
    "--grace",
    type=click.FloatRange(0, min_open=True),
    default=60.0,
    show_default=True,
    help="After Ctrl-C or SIGTERM: seconds for which processes may be idle (a tenth of it once one has finished) before they are "
    "killed. They may take ten times as long in total, to finish their batch and save. A second signal kills immediately.",
)
@click.option(
    "--node-timeout",
    type=click.FloatRange(0, min_open=True),
    default=10.0,
    show_default=True,
    help="Seconds without a message after which a machine counts as lost.",
)
@click.option(
    "--join-timeout",
    type=click.FloatRange(0, min_open=True),
    default=300.0,
    show_default=True,
    help="Seconds that machines wait for each other at the start.",
)
@click.option(
    "--bind/--no-bind",
    default=True,
    show_default=True,
    help="Bind each process to its own cores, if there are at least as many cores as processes.",
)
@click.option("--log-dir", type=click.Path(file_okay=False, path_type=Path), help="Folder for the logs, one per process.")
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def launch(context: click.Context, /, program: Tuple[str, ...], **options: Any) -> None:
    """Run PROGRAM in several processes that train one network together.

    PROGRAM is a script that ends in .py, a module after -m, or a command such as gluon-mgpu train resnet18, and its arguments.
    Each line of output begins with the process's rank. When a process fails, the launcher stops the others and returns its
    exit code. Ctrl-C, SIGTERM and SIGUSR1 are forwarded: fit finishes its batch and saves, and the launcher exits with 130, 143
    or 85.
    """
    if options["hostfile"]:
        sys.exit(run_over_ssh(*_over_ssh(context, program, options)))
    job, invitation = _job(context, program, options)
    if invitation:
        click.echo(invitation, err=True)  # to the user only: a token does not belong in logs
    sys.exit(run_job(job))


def _job(context: click.Context, program: Tuple[str, ...], options: Dict[str, Any]) -> Tuple[Job, str]:
    """Return the job, and the message that explains how to start it on the other machines."""
    nodes, node_rank = options["nodes"], options["node_rank"]
    rendezvous = parse_rendezvous(options["rendezvous"]) if options["rendezvous"] else None
    slurm = slurm_nodes(os.environ) if nodes is None and node_rank is None else None
    if slurm is not None:
        nodes, node_rank, first = slurm
        rendezvous = rendezvous or first
    if node_rank is None and (nodes or 1) > 1:
        raise click.UsageError(f"got --nodes {nodes}; expected --node-rank, the number of this machine, 0 to {nodes - 1}.")
    elastic = options["elastic"]
    job = Job(
        program_command(program, module=options["module"]),
        num_processes=options["num_processes"] or (elastic[1] if elastic else 1),
        servers=options["servers"],
        backend=options["backend"],
        num_nodes=nodes or 1,
        node_rank=node_rank or 0,
        rendezvous=rendezvous,
        interface=options["interface"],
        token=_PLACEHOLDER,
        end_with_input=options["end_with_input"],
        silence_s=options["node_timeout"],
        bind=options["bind"],
        gpus=_gpus(),
        gpus_per_process=options["devices_per_process"] or 0,
        log_dir=options["log_dir"],
        limits=_limits(options),
    )
    if job.num_nodes == 1:
        return job, ""
    token, source = _token(options["token_file"], leads=not job.node_rank, in_slurm=slurm is not None)
    return replace(job, token=token), _invitation(context, job, token, source) if source else ""


def _token(path: Optional[Path], *, leads: bool, in_slurm: bool) -> Tuple[str, str]:
    """Return the secret of the machines, "" if there is none, and its source if it is new: "file", or "here"."""
    if path is not None:
        made = leads and not in_slurm and make_token_file(path)
        return read_token(path), "file" if made else ""
    token = token_in_environment()
    if in_slurm and not token:
        raise LaunchError(
            f"launch: got no token for the nodes of Slurm; expected one that all share and other users do not know. "
            f"Write export {TOKEN}=$(openssl rand -hex 32) before srun, or pass --token-file."
        )
    return (token, "") if token or not leads else (new_token(), "here")


def _invitation(context: click.Context, job: Job, token: str, source: str) -> str:
    """Return the message with the command that starts the other machines."""
    path = context.params["token_file"]
    ranks = "1" if job.num_nodes == 2 else f"1 to {job.num_nodes - 1}"
    where = job.rendezvous or ("", 0)
    placed = ["--nodes", str(job.num_nodes), "--node-rank", "1", "--rendezvous", f"{where[0]}:{where[1]}"]
    counted = ["-n", str(context.params["num_processes"])] if context.params["num_processes"] else []
    secret = ["--token-file", str(path)] if source == "file" else []
    module = ["-m"] if context.params["module"] else []
    words = [*placed, *secret, *counted, *_options_passed(context), *module, *context.params["program"]]
    command = "gluon-mgpu launch " + " ".join(map(shlex.quote, words))
    if source == "file":
        return (
            f"gluon-mgpu launch: wrote a new token to {path}. Copy the file to the other machines, with mode 600, and run there "
            f"with --node-rank {ranks}:\n  {command}"
        )
    return (
        f"gluon-mgpu launch: whoever knows this token can join. Run on the other machines, with --node-rank {ranks}:\n"
        f"  {TOKEN}={token} {command}\n"
        "To keep the token out of the history of shells, pass --token-file PATH here and there."
    )


def _over_ssh(context: click.Context, program: Tuple[str, ...], options: Dict[str, Any]) -> Tuple[Job, SshHosts]:
    if options["nodes"] or options["node_rank"] is not None:
        raise click.UsageError("got --hostfile with --nodes or --node-rank; expected one or the other.")
    hosts = parse_hosts(options["hostfile"].read_text(encoding="utf-8"), slots=options["num_processes"] or 1)
    rendezvous = parse_rendezvous(options["rendezvous"]) if options["rendezvous"] else (hosts[0].name.rpartition("@")[2], PORT)
    arguments = [*_options_passed(context), *(["-m"] if options["module"] else []), *program]
    grace_s = options["grace"] + options["node_timeout"]  # the launchers there end their processes first
    job = Job(
        program,
        len(hosts),
        servers=0,
        limits=Limits(grace_s=grace_s, timeout_s=0),
        log_dir=options["log_dir"],
    )
    token = read_token(options["token_file"]) if options["token_file"] else token_in_environment() or new_token()
    return job, SshHosts(tuple(hosts), rendezvous, tuple(arguments), token)


def _options_passed(context: click.Context) -> List[str]:
    """Return the options of the command line, for the launchers of other hosts."""
    words: List[str] = []
    for parameter in context.command.params:
        name = parameter.name or ""
        if name in _LOCAL or context.get_parameter_source(name) is not click.core.ParameterSource.COMMANDLINE:
            continue
        value = context.params[name]
        if isinstance(parameter, click.Option) and parameter.is_flag:
            words.append((parameter.opts if value else parameter.secondary_opts)[0])
        else:
            words += [parameter.opts[-1], ":".join(map(str, value)) if isinstance(value, tuple) else str(value)]
    return words


def _limits(options: Dict[str, Any]) -> Limits:
    fewest, most = options["elastic"] or (0, 0)
    return Limits(options["max_restarts"], fewest, most, options["grace"], options["timeout"], options["join_timeout"])


def _gpus() -> Tuple[str, ...]:
    """Return the names of this machine's GPUs, as in `CUDA_VISIBLE_DEVICES`."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = (name.strip() for name in visible.split(","))
        return tuple(takewhile(lambda name: name != "-1", filter(None, names)))  # CUDA sees none from there on
    return tuple(map(str, range(mx.context.num_gpus())))

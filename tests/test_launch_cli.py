"""The command gluon-mgpu launch: its options, modules and commands as programs, and several machines by srun and mpirun."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from click.testing import CliRunner
from gluon_mgpu.cli.launch import launch
from gluon_mgpu.distributed import LaunchError
from gluon_mgpu.distributed.launcher.tasks import tasks

from .conftest import assert_house_style
from .test_launch import TELL, quiet_port

pytestmark = pytest.mark.timeout(100)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder with a program, outside Slurm."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "PMI_"))]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "train.py").write_text(TELL)
    return tmp_path


def invoke(*arguments):
    return CliRunner().invoke(launch, [str(argument) for argument in arguments], prog_name="gluon-mgpu launch")


def logs(folder):
    return {path.name: path.read_text() for path in sorted(folder.rglob("rank-*.log"))}


def test_a_script_and_its_arguments(here):
    result = invoke("-n", 2, "--servers", 1, "--log-dir", "logs", "--grace", 9, "train.py", "-n", 7, "--servers", "x", "--", "-y")
    assert result.exit_code == 0, result.output
    told = [json.loads(text) for text in logs(here / "logs").values()]
    assert [one["GLUON_MGPU_RANK"] for one in told] == ["0", "1"]
    assert told[0]["arguments"] == told[1]["arguments"] == ["-n", "7", "--servers", "x", "--", "-y"]
    assert {one["DMLC_NUM_SERVER"] for one in told} == {"1"}
    assert (here / "logs" / "server-0.log").exists() and (here / "logs" / "scheduler.log").exists()


def test_modules_and_commands(here, monkeypatch):
    assert invoke("--log-dir", "module", "-m", "train", "-x").exit_code == 0
    assert json.loads(logs(here / "module")["rank-0.log"])["arguments"] == ["-x"]
    (here / "tool").write_text("#!/bin/sh\necho tool $GLUON_MGPU_RANK $@\nexit 9\n")
    (here / "tool").chmod(0o755)
    monkeypatch.setenv("PATH", str(here), prepend=os.pathsep)
    result = invoke("--log-dir", "command", "tool", "-x")
    assert result.exit_code == 9
    assert "[0] tool 0 -x\n" in result.output and "rank 0 exited with status 9" in result.output


def test_logs_have_a_folder_of_their_own(here):
    assert invoke("train.py").exit_code == 0
    (folder,) = (here / "runs" / "launch").iterdir()
    assert [path.name for path in folder.iterdir()] == ["rank-0.log"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "PROGRAM"),
        (["--no-such-option", "train.py"], "--no-such-option"),
        (["-n", "0", "train.py"], "-n"),
        (["--min-processes", "0", "train.py"], "--min-processes"),
        (["--nodes", "2", "--master", "h:1", "train.py"], "expected --node-rank"),
    ],
)
def test_wrong_options(words, told):
    result = invoke(*words)
    assert result.exit_code == 2 and told in result.output and "Traceback" not in result.output


@pytest.mark.parametrize(
    "words",
    [
        ["missing.py"],
        ["--master", "nowhere", "train.py"],
        ["--devices-per-process", "1", "train.py"],
        ["-n", "1", "--min-processes", "2", "train.py"],
        ["--nodes", "2", "--node-rank", "0", "train.py"],
        ["--interface", "no-such-interface.invalid", "train.py"],
    ],
)
def test_what_cannot_be_launched(here, words):
    error = invoke(*words).exception
    assert isinstance(error, LaunchError), error
    assert_house_style(error)
    assert not (here / "runs").exists()


@pytest.fixture
def jobs(monkeypatch):
    """The jobs that the command would have run."""
    found = []
    for runner in ("run_job", "RayJob.run"):
        monkeypatch.setattr(f"gluon_mgpu.cli.launch.{runner}", lambda job, *_: found.append(job))
    return found


@pytest.mark.parametrize("words", [[], ["--accept-optimizers"]])
def test_servers_accept_optimizers_only_if_asked(jobs, words):
    """On this machine, and on those of Ray."""
    for more in ([], ["--ray", "auto"]):
        assert invoke("-n", 2, *more, *words, "train.py").exit_code == 0
    job, ray_job = jobs
    scheduler, *servers, _, _ = tasks(job, "127.0.0.1", ("127.0.0.1", 1))
    assert [list(one.command[3:]) for one in servers] == 2 * [words]
    assert [word for word in ray_job.arguments if "accept" in word] == words


SRUN = """#!/bin/sh
# srun PROGRAM...: run it on two machines, which are this one
export SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=localhost,127.0.0.1
SLURM_PROCID=1 "$@" &
SLURM_PROCID=0 "$@" && wait $!
"""


def test_srun(here, monkeypatch):
    (here / "srun").write_text(SRUN)
    (here / "srun").chmod(0o755)
    launcher = [sys.executable, "-X", "importtime", "-m", "gluon_mgpu", "launch"]
    command = ["./srun", *launcher, "-n", "2", "--master", f"localhost:{quiet_port()}"]
    done = subprocess.run([*command, "--log-dir", "logs", sys.executable, "-S", "train.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert " mxnet\n" not in done.stderr and " click\n" in done.stderr  # whose import takes seconds
    assert_two_machines(done.stdout)


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI is not installed")
def test_mpirun(here):
    mpirun = ["mpirun", "-n", "2", "--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
    command = [*mpirun, sys.executable, "-m", "gluon_mgpu", "launch", "-n", "2", "--master", f"127.0.0.1:{quiet_port()}"]
    done = subprocess.run([*command, sys.executable, "-S", "train.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert_two_machines(done.stdout)


def assert_two_machines(output):
    told = [json.loads(line.partition(" ")[2]) for line in sorted(output.splitlines())]
    places = [(one["GLUON_MGPU_RANK"], one["GLUON_MGPU_NODE_RANK"]) for one in told]
    assert places == [("0", "0"), ("1", "0"), ("2", "1"), ("3", "1")]
    assert {one["GLUON_MGPU_NUM_PROCESSES"] for one in told} == {"4"}


def test_slurm_without_srun(here, monkeypatch):
    monkeypatch.setenv("SLURM_NNODES", "2")
    error = invoke("train.py").exception
    assert isinstance(error, LaunchError) and "srun --ntasks-per-node=1" in str(error)
    assert invoke("--nodes", 1, "--log-dir", "logs", "train.py").exit_code == 0


@pytest.mark.parametrize(("said", "seen"), [("0, 3", ("0", "3")), ("1,-1,2", ("1",)), ("", ()), ("GPU-1a,", ("GPU-1a",))])
def test_gpus_are_those_that_cuda_sees(monkeypatch, jobs, said, seen):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", said)
    invoke("train.py")
    assert jobs[0].gpus == seen

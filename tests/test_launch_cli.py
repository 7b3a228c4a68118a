"""The command gluon-mgpu launch: its options, modules and commands as programs, Slurm, and hosts that ssh reaches."""

import json
import os
import shlex
import socket
import sys

import pytest
from click.testing import CliRunner
from gluon_mgpu.cli.launch import _gpus, launch
from gluon_mgpu.distributed import LaunchError

from .conftest import assert_house_style
from .test_launch import TELL, mark, marked

__all__ = ["mark"]  # a fixture
TOKEN = "the-token-of-these-tests"
pytestmark = pytest.mark.timeout(100)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder with a program, outside Slurm."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("GLUON_MGPU_TOKEN", raising=False)
    (tmp_path / "train.py").write_text(TELL)
    return tmp_path


def invoke(*arguments):
    return CliRunner().invoke(launch, [str(argument) for argument in arguments], prog_name="gluon-mgpu launch")


def logs(folder):
    return {path.name: path.read_text() for path in sorted(folder.rglob("rank-*.log"))}


def test_a_script_and_its_arguments(here):
    result = invoke(
        "-n", 2, "--servers", 1, "--log-dir", "logs", "--timeout", 30, "train.py", "-n", 7, "--servers", "x", "--", "-y"
    )
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
        (["--elastic", "2", "train.py"], "expected MIN:MAX"),
        (["--elastic", "3:2", "train.py"], "expected MIN:MAX"),
        (["--elastic", "0:2", "train.py"], "expected MIN:MAX"),
        (["--elastic", "\u00b2:\u00b3", "train.py"], "expected MIN:MAX"),
        (["--elastic", "1:" + "9" * 5000, "train.py"], "expected MIN:MAX"),
        (["--nodes", "2", "--rendezvous", "h:1", "train.py"], "expected --node-rank"),
        (["--hostfile", "missing", "train.py"], "missing"),
        (["--hostfile", "train.py", "--nodes", "2", "train.py"], "expected one or the other"),
    ],
)
def test_wrong_options(words, told):
    result = invoke(*words)
    assert result.exit_code == 2 and told in result.output and "Traceback" not in result.output


@pytest.mark.parametrize(
    "words",
    [
        ["missing.py"],
        ["--rendezvous", "nowhere", "train.py"],
        ["--devices-per-process", "1", "train.py"],
        ["-n", "4", "--elastic", "1:2", "train.py"],
        ["--nodes", "2", "--node-rank", "0", "train.py"],
        ["--interface", "no-such-interface.invalid", "train.py"],
    ],
)
def test_what_cannot_be_launched(here, words):
    error = invoke(*words).exception
    assert isinstance(error, LaunchError), error
    assert_house_style(error)
    assert not (here / "runs").exists()


def test_elastic_starts_with_the_most(here):
    assert invoke("--elastic", "1:3", "--servers", 1, "--log-dir", "logs", sys.executable, "-S", "train.py").exit_code == 0
    assert len(logs(here / "logs")) == 3


def test_slurm(here, monkeypatch):
    for name, value in {"SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_LOCALID": "0"}.items():
        monkeypatch.setenv(name, value)
    error = invoke("train.py").exception
    assert isinstance(error, LaunchError) and "srun --ntasks-per-node=1" in str(error)
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    error = invoke("--rendezvous", "127.0.0.1:9", "train.py").exception
    assert isinstance(error, LaunchError) and "before srun" in str(error)
    assert_house_style(error)
    monkeypatch.setenv("GLUON_MGPU_TOKEN", TOKEN)  # srun passes it on
    error = invoke("--rendezvous", "127.0.0.1:9", "--join-timeout", 0.1, "train.py").exception  # nobody listens there
    assert isinstance(error, LaunchError) and "got no node 0 at 127.0.0.1:9" in str(error)
    assert invoke("--nodes", 1, "--log-dir", "logs", "train.py").exit_code == 0


def free_address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def test_node_0_shows_how_others_join(here):
    where = free_address()
    alone = ["--nodes", 3, "--node-rank", 0, "--rendezvous", where, "--join-timeout", 0.1, "--log-dir", "logs"]
    result = invoke("-n", 2, *alone, "--no-bind", "train.py", "it's")
    (line,) = [line for line in result.output.splitlines() if "GLUON_MGPU_TOKEN=" in line]
    token, _, command = line.strip().partition(" ")
    assert len(token.partition("=")[2]) >= 43
    placed = f"gluon-mgpu launch --nodes 3 --node-rank 1 --rendezvous {where} -n 2 --join-timeout 0.1 --no-bind --log-dir logs"
    assert shlex.split(command) == [*placed.split(), "train.py", "it's"]
    assert "with --node-rank 1 to 2" in result.output
    assert token.partition("=")[2] not in (here / "logs" / "launcher.log").read_text()
    assert "got no node 1, 2" in (here / "logs" / "launcher.log").read_text()
    with_file = invoke(*alone, "--token-file", "secret", "train.py").output
    assert "wrote a new token to secret" in with_file and "--token-file secret" in with_file
    assert (here / "secret").read_text().strip() not in with_file
    assert "token" not in invoke(*alone, "--token-file", "secret", "train.py").output  # it is known already
    assert "GLUON_MGPU_TOKEN" not in invoke("--log-dir", "logs", "train.py").output


def test_a_node_without_the_token_says_what_it_needs(here, monkeypatch):
    other = ["--nodes", 2, "--node-rank", 1, "--rendezvous", free_address(), "--join-timeout", 0.1]
    for words in ([], ["--token-file", "missing"]):
        error = invoke(*other, *words, "train.py").exception
        assert isinstance(error, LaunchError) and "node 0" in str(error)
        assert_house_style(error)
    assert not (here / "missing").exists()
    monkeypatch.setenv("GLUON_MGPU_TOKEN", "short")
    error = invoke(*other, "train.py").exception
    assert isinstance(error, LaunchError) and "got a token of 5 characters in GLUON_MGPU_TOKEN" in str(error)
    assert_house_style(error)


SSH = """#!/bin/sh
echo "$@" >> ssh.log
while [ "$1" != one ] && [ "$1" != two ]; do shift; done
if [ "$1" = two ] && [ -n "$TWO_IS_AWAY" ]; then
    echo "ssh: connect to host two: No route to host" >&2
    exit 255
fi
exec sh -c "$2"
"""


@pytest.fixture
def hostfile(here, monkeypatch):
    """Two hosts, and an ssh that runs what it is told here."""
    (here / "bin").mkdir()
    (here / "bin" / "ssh").write_text(SSH)
    (here / "bin" / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", str(here / "bin"), prepend=os.pathsep)
    monkeypatch.setenv("MXNET_TEST_ONLY", "a 'b' $c")
    (here / "hosts").write_text("one slots=1\ntwo slots=2\n")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return ["--hostfile", "hosts", "--rendezvous", f"127.0.0.1:{probe.getsockname()[1]}", "--log-dir", "my logs"]


def test_over_ssh(here, hostfile, mark):
    (here / "train.py").write_text(TELL.replace('"arguments":', '"passed": os.environ["MXNET_TEST_ONLY"], "arguments":'))
    result = invoke(*hostfile, "--servers", 1, "--no-bind", "--max-restarts", 1, "train.py", "it's", "$HOME", "--nodes")
    assert result.exit_code == 0, result.output
    told = [json.loads(text) for text in logs(here / "my logs").values()]
    assert [(one["GLUON_MGPU_NODE_RANK"], one["GLUON_MGPU_LOCAL_RANK"]) for one in told] == [("0", "0"), ("1", "0"), ("1", "1")]
    assert {tuple(one["arguments"]) for one in told} == {("it's", "$HOME", "--nodes")}
    assert {one["passed"] for one in told} == {"a 'b' $c"}
    assert "[node two] [2] " in result.output
    assert "a 'b' $c" not in (here / "ssh.log").read_text() and "TOKEN" not in (here / "ssh.log").read_text()
    assert "gluon_mgpu launch --nodes 2 --node-rank 1" in (here / "ssh.log").read_text()
    assert "-n 2 --servers 1 --max-restarts 1 --no-bind --log-dir 'my logs' train.py" in (here / "ssh.log").read_text()
    assert marked(mark) == []


def test_a_host_that_ssh_does_not_reach(hostfile, mark, monkeypatch):
    monkeypatch.setenv("TWO_IS_AWAY", "1")
    result = invoke(*hostfile, "train.py")
    assert result.exit_code == 255
    assert "node two exited with status 255" in result.output and "  ssh: connect to host two: No route to host" in result.output
    assert marked(mark) == []


@pytest.mark.parametrize(("said", "seen"), [("0, 3", ("0", "3")), ("1,-1,2", ("1",)), ("", ()), ("GPU-1a,", ("GPU-1a",))])
def test_gpus_are_those_that_cuda_sees(monkeypatch, said, seen):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", said)
    assert _gpus() == seen

"""Launching on one machine: what workers are told, the first failure as the cause, and that nothing is left behind."""

import json
import os
import resource
import secrets
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from gluon_mgpu.distributed import LaunchError
from gluon_mgpu.distributed.launcher import supervisor
from gluon_mgpu.distributed.launcher.job import Job
from gluon_mgpu.distributed.launcher.network import find_addresses
from gluon_mgpu.distributed.launcher.program import program_command
from gluon_mgpu.distributed.launcher.supervisor import Signals, run_job
from gluon_mgpu.distributed.launcher.tasks import tasks
from gluon_mgpu.runtime import num_cores

from .conftest import assert_house_style
from .worlds import until

PYTHON = (sys.executable, "-S")  # workers that need no packages
FAST = {"grace_s": 0.5}
PACKAGE = Path(__file__).parent.parent / "gluon_mgpu"
LAUNCHER = f"""
import json, sys, types
for name, folder in (("gluon_mgpu", {str(PACKAGE)!r}), ("gluon_mgpu.distributed", {str(PACKAGE / "distributed")!r})):
    package = sys.modules[name] = types.ModuleType(name)  # without MXNet, so that it starts at once
    package.__path__ = [folder]
from pathlib import Path
from gluon_mgpu.distributed.launcher.job import Job
from gluon_mgpu.distributed.launcher.supervisor import run_job
said = json.loads(sys.argv[1])
said["program"], said["log_dir"] = tuple(said["program"]), Path(said["log_dir"])
said["master"] = tuple(said["master"]) if "master" in said else None
sys.exit(run_job(Job(**said)))
"""


@pytest.fixture
def mark(monkeypatch):
    """A variable that every process of the test's jobs has in its environment, however it was started."""
    name = f"launch-{uuid.uuid4()}"
    monkeypatch.setenv("GLUON_MGPU_TEST_MARK", name)
    yield name
    for pid in marked(name):
        os.kill(pid, signal.SIGKILL)


def quiet_port():
    """A port for several machines; it and the next ones are below those that the kernel gives to connections."""
    return 10_000 + 16 * secrets.randbelow(1_300)


def marked(name):
    """The numbers of the living processes with this mark, but for this one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environ = (folder / "environ").read_bytes()
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if f"GLUON_MGPU_TEST_MARK={name}".encode() in environ and state != "Z" and int(folder.name) != os.getpid():
            found.append(int(folder.name))
    return found


def launch_command(program, log_dir, **options):
    """The command of a launcher that starts a Python program with a store, and does not import MXNet itself."""
    said = {"program": [sys.executable, *map(str, program)], "num_processes": 2, "servers": 1, "log_dir": str(log_dir), **options}
    return [sys.executable, "-c", LAUNCHER, json.dumps(said)]


class Runner:
    """Runs jobs of small programs in a folder."""

    def __init__(self, folder, capture, python=PYTHON):
        self.folder, self.capture, self.python = folder, capture, python
        self.logs, self.started = folder / "logs", []

    def __call__(self, program, *arguments, **options):
        path = self.folder / "program.py"
        path.write_text(program, encoding="utf-8")
        options = {"num_processes": 2, "servers": 0, **FAST, **options}
        code = run_job(Job((*self.python, str(path), *map(str, arguments)), log_dir=self.logs, **options))
        self.out, self.err = (part.decode("utf-8", "replace") for part in self.capture.readouterr())
        return code

    def start(self, program, **options):
        """Start a launcher of its own."""
        path = self.folder / "program.py"
        path.write_text(program, encoding="utf-8")
        options = {"num_processes": 2, "servers": 0, **FAST, **options}
        options.setdefault("log_dir", str(self.logs))
        said = {"program": [*self.python, str(path)], **options}
        command = [sys.executable, "-c", LAUNCHER, json.dumps(said)]
        self.started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=self.folder))
        return self.started[-1]

    def log(self, rank, restart=0):
        folder = self.logs / f"restart-{restart}" if restart else self.logs
        path = folder / f"rank-{rank}.log"
        return path.read_text("utf-8", "replace") if path.exists() else ""


@pytest.fixture
def run(tmp_path, capfdbinary):
    runner = Runner(tmp_path, capfdbinary)
    yield runner
    reap(runner.started)


def reap(launchers):
    for process in launchers:
        if process.poll() is None:
            process.kill()
        process.stdout.close()
        process.wait()


TELL = """
import json, os, sys
names = [name for name in os.environ if name.startswith(("GLUON_MGPU_", "DMLC_")) and not name.endswith(("MARK", "COLLECTIVES"))]
print(json.dumps({**{name: os.environ[name] for name in names}, "arguments": sys.argv[1:]}))
"""


def test_workers_are_told_who_they_are(run, monkeypatch):
    monkeypatch.setenv("GLUON_MGPU_RANK", "17")  # of a launcher around this one
    monkeypatch.setenv("DMLC_ROLE", "server")
    assert run(TELL, "--lr", "0.1", num_processes=3) == 0
    same = {"NUM_PROCESSES": "3", "LOCAL_PROCESSES": "3", "NODE_RANK": "0", "NUM_NODES": "1", "RESTART": "0"}
    for rank in range(3):
        place = {**same, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        told = {f"GLUON_MGPU_{name}": value for name, value in place.items()}
        assert json.loads(run.log(rank)) == {**told, "arguments": ["--lr", "0.1"]}
    assert sorted(line[:4] for line in run.out.splitlines()) == ["[0] ", "[1] ", "[2] "]
    assert run.err == ""


def test_workers_of_a_store_are_told_where_it_is(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/mine")
    job = Job(("prog",), 2, servers=4, num_nodes=2, node_rank=1, master=("10.0.0.1", 9000), restart=1)
    watch, *found = tasks(job, "10.0.0.2", ("10.0.0.1", 9000))
    assert [task.name for task in found] == ["server 1", "server 3", "2", "3"]  # the scheduler is on node 0
    assert watch.name == "machines" and watch.command[-6:] == ("10.0.0.1", "9001", "10.0.0.2", "1", "2", "2")
    for task in found:
        assert {name: value for name, value in task.environ.items() if name.startswith("DMLC_")} == {
            "DMLC_ROLE": "worker" if task.slot >= 0 else "server",
            "DMLC_PS_ROOT_URI": "10.0.0.1",
            "DMLC_PS_ROOT_PORT": "9000",
            "DMLC_NUM_WORKER": "4",
            "DMLC_NUM_SERVER": "4",
            "DMLC_NODE_HOST": "10.0.0.2",
        }
        assert task.environ["PYTHONPATH"] == "/mine"
    assert found[2].environ["GLUON_MGPU_LOCAL_RANK"] == "0" and found[3].environ["GLUON_MGPU_RANK"] == "3"
    assert found[2].environ["GLUON_MGPU_RESTART"] == "1"


def test_one_process_has_no_store(run):
    assert run(TELL, num_processes=1, servers=None) == 0
    told = json.loads(run.log(0))
    assert told["GLUON_MGPU_NUM_PROCESSES"] == "1"
    assert not [name for name in told if name.startswith("DMLC_")]
    assert sorted(path.name for path in run.logs.iterdir()) == ["rank-0.log"]


RAISE = """
import os, time
if os.environ["GLUON_MGPU_RANK"] == "1":
    raise ValueError("the data are bad")
time.sleep(10_000)
"""


def test_an_exception_ends_all_and_is_the_cause(run, mark):
    assert run(RAISE, num_processes=3) == 1
    assert marked(mark) == []
    told = run.err[run.err.index("gluon-mgpu launch: ") :]
    assert told.startswith("gluon-mgpu launch: rank 1 exited with status 1, the first of 3 processes to fail.")
    assert "Traceback (most recent call last):" in told and told.count("ValueError: the data are bad") == 1
    assert str(run.logs / "rank-1.log") in told


@pytest.mark.parametrize(
    ("how", "code", "told"),
    [
        ("sys.exit(3)", 3, "exited with status 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was killed by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "was killed by SIGSEGV"),
        ("os.kill(os.getpid(), 40)", 168, "was killed by signal 40"),
        (
            "os.kill(os.getppid(), signal.SIGKILL)\n    time.sleep(10_000)",
            137,
            "was killed by SIGKILL",
        ),  # its guard, and so itself
    ],
)
def test_exit_codes(run, mark, how, code, told):
    program = f"import os, signal, sys, time\nif os.environ['GLUON_MGPU_RANK'] == '0':\n    {how}\ntime.sleep(10_000)\n"
    assert run(program) == code
    assert f"rank 0 {told}, the first of 2" in run.err
    assert marked(mark) == []


def test_what_fails_because_of_it_is_not_the_cause(run):
    program = """
import os, signal, sys, time
rank = int(os.environ["GLUON_MGPU_RANK"])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
if rank == 2:
    with open(sys.argv[1] + ".part", "w") as file:
        file.write(f"/proc/{os.getppid()}")
    os.rename(sys.argv[1] + ".part", sys.argv[1])
    os._exit(5)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
guard = open(sys.argv[1]).read()
while os.path.exists(guard) and ") Z " not in open(guard + "/stat").read():
    time.sleep(0.01)
raise ConnectionError("rank 2 is gone")  # as others fail soon after when one is missing
"""
    assert run(program, run.folder / "gone", num_processes=3) == 5
    assert "rank 2 exited with status 5, the first of 3" in run.err
    assert run.err.count("the first of") == 1


def test_who_ignores_sigterm_is_killed(run, mark):
    program = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.environ["GLUON_MGPU_RANK"] == "0":
    open(sys.argv[1], "w").close()
    time.sleep(10_000)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
sys.exit(3)
"""
    began = time.monotonic()
    assert run(program, run.folder / "ready") == 3
    assert time.monotonic() - began > 0.5  # the grace
    assert marked(mark) == []


GRANDCHILDREN = """
import os, subprocess, sys, time
child = [sys.executable, "-S", "-c", "import time, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(10_000)"]
subprocess.Popen(child)
if os.fork() == 0:  # a daemon: a session of its own, its parent gone
    os.setsid()
    if os.fork() == 0:
        os.execv(child[0], child)
    os._exit(0)
os.wait()
print("ready", flush=True)
"""


@pytest.mark.parametrize("end", ["", "sys.exit(4)", "time.sleep(0.5)\nos.kill(os.getpid(), 9)"])
def test_grandchildren_end_with_their_worker(run, mark, end):
    assert run(GRANDCHILDREN + end) == {"": 0, "sys.exit(4)": 4}.get(end, 137)
    assert marked(mark) == []


@pytest.mark.parametrize("killed", ["launcher", "launcher, one guard being stopped", "guard"])
def test_nothing_is_left_when_the_launcher_or_a_guard_is_killed(run, mark, killed):
    launcher = run.start(GRANDCHILDREN + "time.sleep(10_000)", grace_s=0.5)
    assert until(lambda: "ready" in run.log(0) and "ready" in run.log(1))
    assert until(lambda: len(marked(mark)) == 1 + 2 * 4)  # the launcher; guards, workers, children, daemons
    guards = [pid for pid in marked(mark) if b"guard.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(guards) == 2
    if "stopped" in killed:
        os.kill(guards[0], signal.SIGSTOP)
    os.kill(guards[0] if killed == "guard" else launcher.pid, signal.SIGKILL)
    assert launcher.wait(timeout=240) == (137 if killed == "guard" else -9)
    assert until(lambda: marked(mark) == []), marked(mark)


CATCH = """
import os, signal, sys, time
def caught(signum, frame):
    print("caught", signal.Signals(signum).name, flush=True)
    time.sleep(float(sys.argv[1]) if sys.argv[1:] else 0)
    sys.exit(0)
signal.signal(signal.SIGINT, caught)
signal.signal(signal.SIGTERM, caught)
signal.signal(signal.SIGUSR1, caught)
print("ready", flush=True)
time.sleep(10_000)
"""


@pytest.mark.parametrize(
    ("signum", "caught", "code"),
    [("SIGINT",) * 2 + (130,), ("SIGTERM",) * 2 + (143,), ("SIGHUP", "SIGINT", 129), ("SIGUSR1",) * 2 + (85,)],
)
def test_signals_are_passed_on(run, mark, signum, caught, code):
    launcher = run.start(CATCH, grace_s=1000)
    assert until(lambda: "ready" in run.log(0) and "ready" in run.log(1))
    launcher.send_signal(getattr(signal, signum))
    assert launcher.wait(timeout=240) == code
    output = launcher.stdout.read().decode()
    assert f"[0] caught {caught}" in output and f"[1] caught {caught}" in output
    assert f"ended by {signum}" in output
    assert marked(mark) == []


def test_the_end_of_a_terminal_does_not_stop_what_nohup_started():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.take() == []
    finally:
        signal.signal(signal.SIGHUP, before)


def test_workers_that_ask_to_be_started_again_end_the_job(run, mark):
    """Slurm may send SIGUSR1 to the workers only. A restart on the same machines would be cut off at the time limit."""
    assert run("import sys; print('started'); sys.exit(85)", max_restarts=3) == 85
    assert "exited with status 85: a signal has asked it to stop. Start the job again." in run.err
    assert run.log(0).count("started") <= 1 and "restart 1" not in run.err
    assert marked(mark) == []


FORK = """
import os, signal, sys, time
def caught(signum, frame):
    os.write(1, b"caught by %s\\n" % name)
    if name != b"fork":
        sys.exit(0)
signal.signal(signal.SIGTERM, caught)
name = b"program"
if os.fork() == 0:
    name = b"fork"
    if len(sys.argv) > 1:
        os.execv(sys.executable, [sys.executable, "-S", "-c", "import time\\nprint('other', flush=True)\\ntime.sleep(10_000)"])
os.write(1, b"ready\\n")
time.sleep(10_000)
"""


def test_forks_do_not_get_the_signals_of_their_program(run, mark):
    """A DataLoader's workers ended by the SIGTERM for the program, which then had no data to end its batch with."""
    launcher = run.start(FORK, num_processes=1)
    assert until(lambda: run.log(0).count("ready") == 2)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(timeout=240) == 143
    assert run.log(0).count("caught by program") == 1 and "caught by fork" not in run.log(0)
    assert marked(mark) == []


def test_a_program_that_a_shell_started_gets_its_signals(run, mark):
    (run.folder / "catch.py").write_text(CATCH)
    launcher = run.start(f"import os\nos.execvp('sh', ['sh', '-c', '{sys.executable} -S catch.py; true'])", num_processes=1)
    assert until(lambda: "ready" in run.log(0))
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(timeout=240) == 130
    assert "caught SIGINT" in run.log(0)
    assert marked(mark) == []


def test_a_second_ctrl_c_does_not_wait(run, mark):
    launcher = run.start(CATCH.replace("sys.exit(0)", "time.sleep(10_000)"), grace_s=1000)
    assert until(lambda: "ready" in run.log(0) and "ready" in run.log(1))
    launcher.send_signal(signal.SIGINT)
    assert until(lambda: "caught" in run.log(0))
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(timeout=240) == 130
    assert marked(mark) == []


def test_who_ends_well_while_others_run_on_is_named(run, monkeypatch):
    monkeypatch.setattr("gluon_mgpu.distributed.launcher.supervisor._LONG_S", 0.3)
    assert run("import os, time\ntime.sleep(2 if os.environ['GLUON_MGPU_RANK'] == '0' else 0)") == 0
    assert run.err.count("rank 1 ended with status 0 0 s ago, and others run on") == 1


@pytest.mark.parametrize("others_calls, code", [(3, 0), (4, 1)])
def test_who_waits_for_one_that_has_ended_ends_the_job(run, others_calls, code):
    """Workers note their collective calls: one has begun a fourth, which the other one never will."""
    program = f"""
import os, time
rank = int(os.environ["GLUON_MGPU_RANK"])
with open(os.environ["GLUON_MGPU_COLLECTIVES"], "r+b") as file:
    file.seek(8 * 65 * rank)
    file.write((3 if rank else {others_calls}).to_bytes(8, "little"))
time.sleep(1 if not rank else 0)
"""
    assert run(program, max_restarts=2) == code
    assert ("rank 0 waits for rank 1, which has ended with status 0. Give every process the same" in run.err) is bool(code)
    assert "restart 1" not in run.err


@pytest.mark.parametrize("others_kind, code", [(7, 0), (8, 1)])
def test_processes_in_different_calls_end_the_job(run, others_kind, code):
    """Behind the number of calls come checksums of their kinds, of which the third is another one."""
    program = f"""
import os, time
rank = int(os.environ["GLUON_MGPU_RANK"])
with open(os.environ["GLUON_MGPU_COLLECTIVES"], "r+b") as file:
    for at, number in reversed([*enumerate((3, 7, 7, 7 if rank else {others_kind}))]):
        file.seek(8 * (at + 1 - (at == 0) + 65 * rank))
        file.write(number.to_bytes(8, "little"))
time.sleep({2 * code})
"""
    assert run(program, max_restarts=2) == code


def test_output_comes_whole(run):
    program = r"""
import os, sys
if os.environ["GLUON_MGPU_RANK"] == "0":
    os.write(1, b"caf\xe9\nkept\n10%\r50%\r100%\nwith windows' end\r\n")
    os.write(2, b"y" * 200_000 + b"\n")
    os.write(1, b"no end")
"""
    assert run(program) == 0
    assert b"caf\xe9\nkept\n10%\r50%\r100%\nwith windows' end\r\n" in (run.logs / "rank-0.log").read_bytes()  # of two pipes
    assert run.out.splitlines() == ["[0] caf\ufffd", "[0] kept", "[0] 100%", "[0] with windows' end", "[0] no end"]
    assert run.err.replace("[0] ", "").replace("\n", "") == "y" * 200_000
    assert (run.logs / "rank-1.log").read_bytes() == b""


def test_what_a_killed_worker_has_printed_is_there(run):
    assert run("import os\nprint('loss 0.1')\nos.kill(os.getpid(), 9)\n") == 137
    assert "[0] loss 0.1\n" in run.out or "[1] loss 0.1\n" in run.out


RESTART = """
import os, sys
restart, rank = int(os.environ["GLUON_MGPU_RESTART"]), os.environ["GLUON_MGPU_RANK"]
print("attempt", restart, "of", os.environ["GLUON_MGPU_NUM_PROCESSES"])
sys.exit(6 if rank == "1" and restart < 2 else 0)
"""


def test_restarts(run):
    assert run(RESTART, max_restarts=3) == 0
    assert [run.log(1, restart) for restart in range(4)] == [f"attempt {i} of 2\n" if i < 3 else "" for i in range(4)]
    assert run.err.count("rank 1 exited with status 6") == 2
    assert "restart 2 of 3" in run.err and "restart 3" not in run.err


def test_elastic_leaves_out_who_keeps_failing(run):
    program = RESTART.replace('rank == "1" and restart < 2', 'rank == "2"')
    assert run(program, num_processes=3, max_restarts=3, min_processes=2) == 0
    assert [run.log(2, restart) for restart in range(4)] == ["attempt 0 of 3\n", "attempt 1 of 3\n", "", ""]
    assert run.log(0, 2) == run.log(1, 2) == "attempt 2 of 2\n"


THREADS = "import os\nprint(os.environ['OMP_NUM_THREADS'])"


def test_processes_divide_the_threads(run, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert run(THREADS) == 0
    assert run.log(0) == run.log(1) == f"{max(1, num_cores() // 2)}\n"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert run(THREADS) == 0
    assert run.log(0) == run.log(1) == "7\n"


@pytest.mark.parametrize(
    ("gpus", "each", "seen"),
    [("0123", 0, ["0,1", "2,3"]), ("012", 0, ["0", "1"]), ("0123", 1, ["0", "1"]), ("5", 0, ["5", "5"]), ("", 0, [None, None])],
)
def test_gpus_are_shared_out(gpus, each, seen, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    job = Job(("prog",), 2, servers=0, gpus=tuple(gpus), gpus_per_process=each)
    assert [task.environ.get("CUDA_VISIBLE_DEVICES") for task in tasks(job, "127.0.0.1", ("127.0.0.1", 1))] == seen


HANG_AT_EXIT = """
import os, sys, time, threading, types
from types import SimpleNamespace
class KVStore:
    handle = SimpleNamespace(value=1)
    def __del__(self):
        if not freed:
            time.sleep(10_000)  # as MXNet's store, until the other workers end
freed = []
def free(handle, barrier):
    print("freed without waiting", barrier)
    freed.append(handle)
mxnet = sys.modules["mxnet"] = types.ModuleType("mxnet")
mxnet.MXNetError, mxnet.nd = RuntimeError, SimpleNamespace(waitall=lambda: print("waited"))
mxnet.kvstore = SimpleNamespace(kvstore=SimpleNamespace(KVStore=KVStore))
mxnet.base = SimpleNamespace(_LIB=SimpleNamespace(MXKVStoreSetBarrierBeforeExit=free))
store = KVStore()
def train():
    kept = store
"""
END_WELL = "waited\nfreed without waiting 0\n"
THREAD = """
thread = threading.Thread(target={}, args=({!r},))
thread.start()
"""
FOREVER = "threading.Thread(target=time.sleep, args=(10_000,)).start()\n"


@pytest.mark.parametrize(
    ("end", "code", "errors"),
    [
        ("raise ValueError('bad')", 1, "ValueError: bad"),
        (FOREVER + "raise ValueError('bad')", 1, "ValueError: bad"),
        (FOREVER + "sys.exit(3)", 3, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('no data')", 1, "no data"),
        ("raise SystemExit(3)", 3, ""),
        ("exit(5)", 5, ""),
        ("class End(SystemExit):\n    pass\nraise End(6)", 6, ""),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
        ("try:\n    sys.exit(4)\nexcept SystemExit as error:\n    assert error.code == 4", 0, ""),
        ("sys.exit()", 0, ""),
        ("raise SystemExit", 0, ""),
        ("def failing():\n    raise mxnet.MXNetError('failed')\nmxnet.nd.waitall = failing", 1, "RuntimeError: failed"),
        (THREAD.format("sys.exit", 4), 0, ""),
        (THREAD.format("int", "x"), 0, "ValueError: invalid literal for int() with base 10: 'x'"),
        ("from concurrent.futures import ThreadPoolExecutor\npool = ThreadPoolExecutor(1)\npool.submit(int)", 0, ""),
    ],
)
def test_a_worker_that_has_failed_waits_for_nothing(end, code, errors, tmp_path):
    """Not for other workers, nor for its own threads; one that ends well waits for its devices and threads."""
    (tmp_path / "program.py").write_text(HANG_AT_EXIT + end)
    command = program_command([str(tmp_path / "program.py")])
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert done.stdout == ("" if code else END_WELL)
    assert done.stderr.strip().splitlines()[-1:] == ([errors] if errors else [])


@pytest.mark.parametrize(("signum", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_while_a_worker_starts(run, monkeypatch, signum, code):
    """Python printed the traceback of an import, and the job failed with status 1."""
    (run.folder / "sitecustomize.py").write_text(
        f"import os, signal\nif 'GLUON_MGPU_RANK' in os.environ:\n    os.kill(os.getpid(), signal.{signum})\n    number = 1\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(run.folder))
    run.python = program_command(["timeit"], module=True)[:3]
    assert run("print('ran')", num_processes=1) == code
    assert run.log(0) == ""


def test_a_worker_runs_a_program_as_python_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "beside.py").write_text("found = 7")
    (tmp_path / "sub" / "program.py").write_text(
        "import sys, pickle, beside\nclass Mine:\n    pass\n"
        "print(__name__, sys.argv, beside.found, type(pickle.loads(pickle.dumps(Mine()))).__module__)\n"
        "print(sys.modules['__main__'].Mine is Mine)\nimport atexit\natexit.register(print, 'the last')\n"
        "1 / 0 if sys.argv[1:] else 0\n"
    )
    script, failing = (program_command([os.path.join("sub", "program.py"), *more]) for more in ([], ["x"]))
    module = program_command(["sub.program"], module=True)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "sub"))
    for command, name in ((script, os.path.join("sub", "program.py")), (module, str(tmp_path / "sub" / "program.py"))):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.stdout == f"__main__ [{name!r}] 7 __main__\nTrue\nthe last\n", done.stderr
    told = subprocess.run(failing, capture_output=True, text=True, timeout=60).stderr.splitlines()
    assert told[0].startswith("Traceback") and "program.py" in told[1] and told[-1] == "ZeroDivisionError: division by zero"


def test_programs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    worker = (sys.executable, "-m", "gluon_mgpu.distributed.launcher.worker")
    assert program_command(["train.py", "-x"]) == (*worker, "train.py", "-x")
    assert program_command(["pkg.train", "-x"], module=True) == (*worker, "-m", "pkg.train", "-x")
    assert program_command([sys.executable, "train.py"]) == (*worker, "train.py")
    assert program_command([sys.executable, "-c", "pass"]) == (sys.executable, "-c", "pass")
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    command = shutil.which("gluon-mgpu")
    if command:
        assert program_command(["gluon-mgpu", "devices"]) == (*worker, command, "devices")
    assert program_command(["sh", "-c", "true"]) == (shutil.which("sh"), "-c", "true")
    (tmp_path / "text").touch()
    (tmp_path / "folder.py").mkdir()
    missing, folder, text = "which does not exist", "a folder", "a file that cannot be executed"
    wrong = {"missing.py": missing, "no-such-program": missing, "folder.py": folder, "./folder.py": folder, "./text": text}
    for name, told in wrong.items():
        with pytest.raises(LaunchError, match=f"got '{name}', {told}; expected") as raised:
            program_command([name])
        assert_house_style(raised.value)


def test_a_program_that_cannot_be_run(run, tmp_path):
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x7fELFnot really")
    broken.chmod(0o755)
    assert run_job(Job((str(broken),), log_dir=run.logs)) == 1
    assert b"Exec format error" in run.capture.readouterr().err


@pytest.mark.parametrize(
    "named, interface, is_told",
    [("node0", None, True), ("node0", "lo", False), ("localhost", None, False), ("127.0.0.2", None, False)],
)
def test_a_master_that_no_other_machine_reaches_is_an_error(monkeypatch, named, interface, is_told):
    """As Debian's /etc/hosts has a machine's own name."""
    monkeypatch.setattr("gluon_mgpu.distributed.launcher.network.address_of", lambda name: "127.0.1.1")
    job = Job(("true",), num_nodes=2, master=(named, 9000), interface=interface)
    if not is_told:
        assert find_addresses(job) == ("127.0.1.1", "127.0.1.1")
        return
    with pytest.raises(LaunchError, match="node0, which is 127.0.1.1 on this machine") as raised:
        find_addresses(job)
    assert_house_style(raised.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_nodes": 2},
        {"num_nodes": 2, "node_rank": 2, "master": ("127.0.0.1", 1)},
        {"num_nodes": 2, "master": ("127.0.0.1", 9000), "min_processes": 1},
        {"num_nodes": 2, "node_rank": 1, "master": ("no-such-host.invalid", 9000)},
        {"gpus_per_process": 1},
        {"min_processes": 2},
        {"interface": "no-such-interface.invalid"},
        {"interface": "192.0.2.1"},
        {"num_nodes": 2, "node_rank": 1, "master": ("127.0.0.1", 9000), "interface": "192.0.2.1"},
        {"num_nodes": 2, "master": ("127.0.0.1", 65535)},  # and the next one
    ],
)
def test_wrong_jobs(wrong, tmp_path):
    with pytest.raises(LaunchError) as raised:
        run_job(Job(**{"program": ("true",), "log_dir": tmp_path / "logs", **wrong}))
    assert_house_style(raised.value)
    assert not (tmp_path / "logs").exists()


def test_a_limit_of_open_files(monkeypatch, tmp_path):
    """It said: launch: got an output (Too many open files)."""
    job = Job(("true",), 8, servers=0, log_dir=tmp_path / "logs")
    limits = [40, 4096]
    monkeypatch.setattr(resource, "getrlimit", lambda which: tuple(limits))
    with pytest.raises(LaunchError, match="a limit of 40 open files for 8 processes.*ulimit -n") as raised:
        run_job(job)
    assert_house_style(raised.value)
    limits[:] = [resource.RLIM_INFINITY] * 2
    assert run_job(job) == 0


@pytest.mark.parametrize(
    "error", [BlockingIOError(11, "Resource temporarily unavailable"), RuntimeError("can't start new thread")]
)
def test_a_limit_of_processes(failing, tmp_path, error):
    started = failing(supervisor, "Started", error=error)
    with pytest.raises(LaunchError, match="after 0 of 2; expected .* ulimit -u") as raised:
        run_job(Job(("true",), 2, servers=0, log_dir=tmp_path))
    assert_house_style(raised.value)
    assert len(started) == 1

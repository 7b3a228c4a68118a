"""Launching on the machines of a Ray cluster, two raylets on this machine. Skipped without Ray: `sh scripts/test_ray.sh`."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from gluon_mgpu.cli.main import main
from gluon_mgpu.distributed.launcher import ray_nodes

from .test_launch import marked, until

with_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: sh scripts/test_ray.sh")
TRAIN = """
import json, os, signal, sys, time

import gluon_mgpu as mgpu
import numpy as np
from gluon_mgpu.distributed import this_process
from mxnet import gluon, init

folder, num_devices, action = sys.argv[1], int(sys.argv[2]), sys.argv[3]
me = this_process()


class Act(mgpu.Callback):
    def on_fit_begin(self, state):
        print("begins after step", state.step, "on", me.num_processes, "at restart", me.restart, flush=True)

    def on_batch_end(self, state):
        print("step", state.step, flush=True)
        if action == "slow":
            time.sleep(1)
        if action == "kill" and me.rank == 1 and me.restart == 0 and state.step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        if action == "wait" and (me.restart, state.step) in {(0, 5), (1, 8)}:
            while not os.path.exists(f"{folder}/go{me.restart}"):
                time.sleep(0.02)
            os._exit(7)


rng = np.random.RandomState(0)
X, y = rng.normal(size=(48, 5)).astype("float32"), rng.randint(0, 4, 48)
ctx = mgpu.devices.resolve_devices(f"cpu*{num_devices}")
net = gluon.nn.HybridSequential()
net.add(gluon.nn.Dense(16, activation="tanh", in_units=5), gluon.nn.Dense(4, in_units=16))
net.initialize(init.Constant(0.1), ctx=ctx)
for param in net.collect_params().values():
    param.set_data(rng.normal(0, 0.5, param.shape))
trainer = mgpu.Trainer(net, "adam", {"learning_rate": 0.01})
batches = mgpu.data.ArrayLoader(X, y, 12, shuffle=True, seed=2)
saves = mgpu.Checkpoint(f"{folder}/saved", monitor=None, every=2)
loss = gluon.loss.SoftmaxCrossEntropyLoss()
mgpu.fit(net, loss, trainer, batches, [(X, y)], epochs=3, callbacks=[saves, Act()], resume="auto", metrics=())
weights = {name: param.data(ctx[0]).asnumpy().tolist() for name, param in net._collect_params_with_prefix().items()}
with open(f"{folder}/{me.rank}.json", "w") as file:
    json.dump(weights, file)
"""


@pytest.fixture(scope="module")
def cluster():
    """Two machines of one CPU each: two raylets here; the first one has the head."""
    from ray.cluster_utils import Cluster

    options = {"num_cpus": 1, "num_gpus": 2, "object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={**options, "include_dashboard": False})
    cluster.options = options
    cluster.other = cluster.add_node(**options)
    cluster.wait_for_nodes()
    yield cluster
    cluster.shutdown()


def listening():
    """The ports of the launcher's range on which a process listens."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    ports = [int(line.split()[1].rpartition(":")[2], 16) for line in lines if line.split()[3] == "0A"]
    return {port for port in ports if ray_nodes._PORTS[0] <= port < ray_nodes._PORTS[1]}


class Jobs:
    """Starts jobs on the cluster in a folder, each with a process on each machine."""

    def __init__(self, cluster, folder):
        self.cluster, self.folder, self.started = cluster, folder, []
        self.mark = f"ray-{uuid.uuid4()}"  # in the environment of all processes of the jobs, but not of Ray's

    def start(self, program, *arguments, options=(), prefix=()):
        (self.folder / "program.py").write_text(program, encoding="utf-8")
        placed = ["--ray", self.cluster.address, "--nodes=2", "--log-dir=logs", *options]
        command = [sys.executable, "-m", "gluon_mgpu", "launch", *placed, "program.py", *map(str, arguments)]
        environ = {**os.environ, "GLUON_MGPU_TEST_MARK": self.mark}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen([*prefix, *command], text=True, cwd=self.folder, env=environ, **pipes)
        self.started.append(process)
        return process

    def end(self, process):
        self.out, self.err = process.communicate(timeout=240)
        return process.returncode

    def run(self, *program, **options):
        return self.end(self.start(*program, **options))

    def train(self, action, *options):
        return self.start(TRAIN, self.folder, 1, action, options=options)

    def weights(self, rank=0):
        return json.loads((self.folder / f"{rank}.json").read_text())

    def wait_for(self, text, count=1):
        """Wait until so many logs of workers have this line."""
        assert until(lambda: sum(text in path.read_text().splitlines() for path in self.folder.rglob("rank-*.log")) >= count)

    def lose_machine(self):
        self.cluster.remove_node(self.cluster.other, allow_graceful=False)  # SIGKILL to the raylet
        self.cluster.other = None

    def return_machine(self):
        self.cluster.other = self.cluster.add_node(**self.cluster.options)


@pytest.fixture
def jobs(cluster, tmp_path):
    """Jobs that leave no process and no open port."""
    ports = listening()
    jobs = Jobs(cluster, tmp_path)
    yield jobs
    for process in jobs.started:
        process.kill()
        process.stdout.close()
        process.stderr.close()
        process.wait()
    if cluster.other is None:
        jobs.return_machine()
    assert until(lambda: marked(jobs.mark) == [], 30)
    assert until(lambda: listening() <= ports, 30)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The weights of one process with two devices."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "program.py").write_text(TRAIN, encoding="utf-8")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GLUON_MGPU_")}
    subprocess.run([sys.executable, "program.py", folder, "2", "none"], cwd=folder, env=environ, check=True, timeout=240)
    return json.loads((folder / "0.json").read_text())


PLACE = """
import os, signal, sys, time
names = ("RANK", "NUM_PROCESSES", "LOCAL_RANK", "NODE_RANK", "NUM_NODES", "RESTART")
print("place", *(os.environ["GLUON_MGPU_" + name] for name in names), flush=True)
print("gpus", os.environ.get("CUDA_VISIBLE_DEVICES"), "threads", os.environ.get("OMP_NUM_THREADS"), file=sys.stderr)
"""
rank_1 = "if os.environ['GLUON_MGPU_RANK'] == '1':\n    "


@with_ray
def test_the_output_and_the_place_of_each_process(jobs, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # Ray sets it for its actors
    options = ["--devices-per-process=2", "--servers=1"]
    assert jobs.run(PLACE + "print(sys.argv[1:])", "--lr", "0.1", options=options) == 0, jobs.err
    places = [f"[{rank}] place {rank} 2 0 {rank} 2 0" for rank in range(2)]
    assert sorted(jobs.out.splitlines()) == sorted([*places, *(f"[{rank}] ['--lr', '0.1']" for rank in range(2))])
    errors = [line for line in jobs.err.splitlines() if line.startswith(("[0]", "[1]"))]
    assert sorted(errors) == [f"[{rank}] gpus 0,1 threads None" for rank in range(2)]
    assert "place 1 2" in (jobs.folder / "logs" / "node1" / "rank-1.log").read_text()


@with_ray
def test_the_bits_of_one_process(jobs, alone):
    assert jobs.end(jobs.train("none")) == 0, jobs.err
    assert jobs.weights(0) == jobs.weights(1) == alone


@with_ray
def test_a_killed_worker_resumes_with_the_same_bits(jobs, alone):
    assert jobs.end(jobs.train("kill", "--max-restarts=1")) == 0, jobs.err
    assert "[1] begins after step 4 on 2 at restart 1" in jobs.out
    assert "rank 1 on node 1" in jobs.err and "was killed by SIGKILL" in jobs.err
    assert jobs.weights(0) == jobs.weights(1) == alone


@with_ray
def test_a_machine_that_returns_resumes_with_the_same_bits(jobs, alone):
    launcher = jobs.train("wait", "--max-restarts=1")
    jobs.wait_for("step 5", 2)
    (jobs.folder / "go1").touch()
    jobs.lose_machine()
    jobs.return_machine()
    jobs.wait_for("begins after step 4 on 2 at restart 1", 2)
    assert jobs.end(launcher) == 7  # at step 8
    assert "lost node" in jobs.err
    assert jobs.end(jobs.train("none")) == 0, jobs.err
    assert jobs.weights(0) == jobs.weights(1) == alone


@with_ray
def test_the_job_continues_without_a_lost_machine_and_takes_it_when_it_returns(jobs, alone):
    launcher = jobs.train("wait", "--max-restarts=2", "--min-nodes=1")
    jobs.wait_for("step 5", 2)
    jobs.lose_machine()
    jobs.wait_for("begins after step 4 on 1 at restart 1")
    jobs.wait_for("step 8")
    jobs.return_machine()
    (jobs.folder / "go1").touch()
    assert jobs.end(launcher) == 0, jobs.err
    assert "[1] begins after step 6 on 2 at restart 2" in jobs.out
    assert "waiting for 1 of 2 machines" in jobs.err
    assert jobs.weights(0) == jobs.weights(1)
    for name, weight in jobs.weights().items():
        np.testing.assert_allclose(weight, alone[name], rtol=0, atol=1e-5)


@with_ray
@pytest.mark.parametrize("signum, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 85)])
def test_a_signal_saves_on_all_machines(jobs, alone, signum, code):
    launcher = jobs.train("slow", "--max-restarts=1")
    jobs.wait_for("step 3", 2)
    launcher.send_signal(signum)
    assert jobs.end(launcher) == code, jobs.err
    steps = [int(step) for step in re.findall(r"\[1\] step (\d+)", jobs.out)]
    assert steps[-1] < 12
    assert jobs.end(jobs.train("none")) == 0, jobs.err
    assert f"begins after step {steps[-1]} on 2 at restart 0" in jobs.out
    assert jobs.weights(0) == jobs.weights(1) == alone


@with_ray
@pytest.mark.parametrize("code", [3, 130])
def test_the_exit_code_of_a_worker(jobs, code):
    program = PLACE + rank_1 + f"sys.exit({code})\ntime.sleep(10_000)"
    assert jobs.run(program, options=["--grace=2", "--servers=1"]) == code, jobs.err
    assert f"exited with status {code}" in jobs.err


@with_ray
def test_a_second_ctrl_c_kills(jobs):
    launcher = jobs.start(PLACE + "signal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('ready', flush=True)\ntime.sleep(10_000)")
    jobs.wait_for("ready", 2)
    launcher.send_signal(signal.SIGINT)
    time.sleep(1)
    assert launcher.poll() is None
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(timeout=30) == 130


@with_ray
def test_a_killed_launcher_leaves_nothing(jobs):
    launcher = jobs.start(PLACE + "print('ready', flush=True)\ntime.sleep(10_000)")
    jobs.wait_for("ready", 2)
    launcher.kill()
    assert until(lambda: marked(jobs.mark) == [], 30)


@with_ray
def test_too_few_machines(jobs):
    assert jobs.run(PLACE, options=["--nodes=3", "--join-timeout=3"]) == 1
    assert "fewer than 3 machines" in jobs.err
    (jobs.folder / "logs" / "launcher.log").unlink()
    launcher = jobs.start(PLACE, options=["--nodes=3"])
    assert until((jobs.folder / "logs" / "launcher.log").exists)
    launcher.terminate()
    assert jobs.end(launcher) == 143, jobs.err


def launch(*options):
    return CliRunner().invoke(main, ["launch", *options, "-m", "timeit"])


def test_without_ray_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "Run pip install 'ray" in launch("--ray", "auto").output


@pytest.mark.parametrize(
    "options, words",
    [
        (["--ray", "train.py"], "Write --ray auto before the program"),
        (["--ray", "--nodes=2", "--min-nodes=3"], "--nodes 2 --min-nodes 3"),
        (["--ray", "--node-rank=0"], "got --ray with --node-rank"),
        (["--min-nodes=2"], "expected --ray"),
    ],
)
def test_options_that_do_not_fit(options, words):
    result = launch(*options)
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())


@with_ray
def test_an_address_without_ray():
    result = launch("--ray", "127.0.0.1:1")
    assert result.exit_code == 1
    assert "Connection refused" in result.output

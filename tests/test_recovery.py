"""A job whose process is killed goes on from its last checkpoint, and ends with the weights of one that nobody disturbed."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import textwrap

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.checkpoint.rng import random_state, set_random_state
from mxnet import gluon

from .test_processes import BEGIN

pytestmark = pytest.mark.timeout(600)
PROGRAM = """
    import os, random, signal
    kills = dict(kill.split(":") for kill in sys.argv[3].split())  # restart: network, rank, step
    class Kill(mgpu.Callback):
        def __init__(self, name):
            self.name = name
        def on_batch_end(self, state):
            if f"{self.name},{me.rank},{state.step}" == kills.get(str(me.restart)):
                os.kill(os.getpid(), signal.SIGKILL)
    loss = gluon.loss.SoftmaxCrossEntropyLoss()

    mx.random.seed(1)
    np.random.seed(1)
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(8, activation="tanh", in_units=5), gluon.nn.BatchNorm(), gluon.nn.Dropout(0.3), gluon.nn.Dense(4))
    net.initialize(init.Xavier(), ctx=ctx)
    net.hybridize()
    trainer = mgpu.Trainer(net, "adam", {"learning_rate": 0.01}, clip_norm=1.0)
    rng = np.random.RandomState(0)
    X, y = rng.normal(size=(45, 5)).astype("float32"), rng.randint(0, 4, 45)
    batches = mgpu.data.ArrayLoader(X, y, 9, shuffle=True, seed=2)  # 5 and 4: their generators part
    saves = mgpu.Checkpoint(f"{folder}/shared", monitor=None, every=2, keep=2, background=True)
    mgpu.fit(net, loss, trainer, batches, [(X, y)], epochs=3, callbacks=[saves, Kill("shared")], resume="auto")

    class Noisy:
        def __iter__(self):
            for X, y in gluon.data.DataLoader(gluon.data.ArrayDataset(inputs, labels), batch_sampler=sampler):
                yield X + np.float32(random.gauss(0, 1)) + mx.nd.array(np.random.normal(size=X.shape)), y
        def __len__(self):
            return len(sampler)
    random.seed(me.rank)
    np.random.seed(7 + me.rank)  # each process draws its own
    sampler = mgpu.data.ShardedSampler(40, 10, shuffle=False)
    generator = np.random.RandomState(0)
    inputs, labels = generator.normal(size=(40, 5)).astype("float32"), generator.randint(0, 4, 40)
    net = gluon.nn.Dense(4, in_units=5)
    net.initialize(init.Constant(0.1), ctx=ctx)
    trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1, "momentum": 0.9}, sharded_data=True)
    saves = mgpu.Checkpoint(f"{folder}/own", monitor=None, every=1)
    mgpu.fit(net, loss, trainer, Noisy(), epochs=3, callbacks=[saves, Kill("own")], resume="auto")
    print("done after", me.restart, "restarts", flush=True)
"""


def run(folder, *, kills="", restarts=0):
    """Launch the program in a folder, which may hold checkpoints of a job before."""
    script = folder / "program.py"
    script.write_text(BEGIN + textwrap.dedent(PROGRAM))
    command = [sys.executable, "-m", "gluon_mgpu", "launch", "-n", 2, "--servers", 1]
    command += ["--max-restarts", restarts, "--log-dir", folder / "logs"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("GLUON_MGPU_", "DMLC_"))}
    return subprocess.run(
        [str(part) for part in [*command, script, folder, 1, kills]],
        capture_output=True,
        text=True,
        timeout=200,
        env={**environment, "OMP_NUM_THREADS": "1"},
        cwd=folder,
    )


def saved(folder, network):
    """The files of a network's last checkpoint."""
    return {name: (folder / network / "last" / name).read_bytes() for name in ("net.params", "states.npz")}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Folders of a job that ran undisturbed, and of one whose processes were killed in both networks; what the latter printed."""
    undisturbed, killed = tmp_path_factory.mktemp("undisturbed"), tmp_path_factory.mktemp("killed")
    done = run(undisturbed)
    assert done.returncode == 0 and "done after 0 restarts" in done.stdout, done.stdout + done.stderr
    first = run(killed, kills="0:shared,0,7")
    then = run(killed, kills="0:own,1,6", restarts=1)
    return undisturbed, killed, first, then


def test_without_restarts_it_ends_with_the_cause(jobs):
    _, killed, first, _ = jobs
    assert first.returncode == 128 + signal.SIGKILL
    assert "rank 0 was killed by SIGKILL" in first.stdout + first.stderr


def test_killed_processes_do_not_show_in_the_weights(jobs):
    undisturbed, killed, _, then = jobs
    assert then.returncode == 0, then.stdout + then.stderr
    assert then.stdout.count("done after 1 restarts") == 2
    assert saved(killed, "shared") == saved(undisturbed, "shared")


def test_each_process_goes_on_with_random_numbers_of_its_own(jobs):
    undisturbed, killed, _, _ = jobs
    assert saved(killed, "own") == saved(undisturbed, "own")


@pytest.mark.parametrize("differ", [True, False])
def test_a_checkpoint_holds_the_random_numbers_of_every_rank(tmp_path, monkeypatch, differ):
    """The first of two processes saves, what the other one says being given; then each of them loads, and one of three."""
    states = [random_states(rank * differ) for rank in range(2)]
    drawn = []
    for state in states:
        set_random_state(state["now"])
        drawn.append((random.random(), np.random.uniform()))
    net = gluon.nn.Dense(1, in_units=1)
    net.initialize(ctx=mx.cpu())

    class Told:
        said = []

        def all_gather_bytes(self, message):
            self.said.append(len(message))
            if len(message) == 32:
                return [hashlib.sha256(json.dumps(one).encode()).digest() for one in states]
            return [json.dumps(one).encode() for one in states]

    told = Told()
    set_random_state(states[0]["now"])
    monkeypatch.setattr("gluon_mgpu.checkpoint.snapshot.group", lambda: told)
    mgpu.save_checkpoint(tmp_path / "c", net, mgpu.Trainer(net, "sgd"))
    assert len(told.said) == 1 + differ
    for num_processes in (2, 3):
        for rank in range(num_processes):
            process = mgpu.distributed.Process(rank, num_processes, rank, num_processes, 0, 1, 0)
            monkeypatch.setattr("gluon_mgpu.checkpoint.snapshot.this_process", lambda process=process: process)
            mgpu.load_checkpoint(tmp_path / "c", net, mgpu.Trainer(net, "sgd"))
            assert (random.random(), np.random.uniform()) == drawn[rank if num_processes == 2 else 0]


def random_states(seed):
    random.seed(seed)
    np.random.seed(seed)
    state = random_state()
    return {"now": {name: state[name] for name in ("python", "numpy")}, "begun": None}

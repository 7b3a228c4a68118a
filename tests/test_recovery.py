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

pytestmark = pytest.mark.timeout(300)
PROGRAM = """
    import os, signal
    class Kill(mgpu.Callback):
        def on_batch_end(self, state):
            if me.restart == 0 and f"{me.rank} {state.step}" == sys.argv[3]:
                os.kill(os.getpid(), signal.SIGKILL)
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
    saves = mgpu.Checkpoint(f"{folder}/run", monitor=None, every=2, keep=2, background=True)
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    mgpu.fit(net, loss, trainer, batches, [(X, y)], epochs=3, callbacks=[saves, Kill()], resume="auto")
    print("done after", me.restart, "restarts", flush=True)
"""


NOISY = """
    import os, random, signal
    class Kill(mgpu.Callback):
        def on_batch_end(self, state):
            if me.restart == 0 and f"{me.rank} {state.step}" == sys.argv[3]:
                os.kill(os.getpid(), signal.SIGKILL)
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
    saves = mgpu.Checkpoint(f"{folder}/run", monitor=None, every=1)
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    mgpu.fit(net, loss, trainer, Noisy(), epochs=3, callbacks=[saves, Kill()], resume="auto")
    print("done after", me.restart, "restarts", flush=True)
"""


def run(tmp_path, name, *, kill="", restarts=1, program=PROGRAM):
    """What the job says, and the files of its last checkpoint."""
    folder = tmp_path / name
    folder.mkdir()
    script = tmp_path / "program.py"
    script.write_text(BEGIN + textwrap.dedent(program))
    command = [sys.executable, "-m", "gluon_mgpu", "launch", "-n", "2", "--max-restarts", restarts, "--log-dir", folder / "logs"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("GLUON_MGPU_", "DMLC_"))}
    done = subprocess.run(
        [str(part) for part in [*command, script, folder, 1, kill]],
        capture_output=True,
        text=True,
        timeout=120,
        env={**environment, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
    )
    last = folder / "run" / "last"
    return done, {name: (last / name).read_bytes() for name in ("net.params", "states.npz")}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    done, files = run(tmp_path_factory.mktemp("job"), "undisturbed")
    assert done.returncode == 0 and "done after 0 restarts" in done.stdout, done.stdout + done.stderr
    return files


@pytest.mark.parametrize("kill", ["0 7", "1 4"])
def test_a_killed_process_does_not_show_in_the_weights(tmp_path, undisturbed, kill):
    done, files = run(tmp_path, "killed", kill=kill)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("done after 1 restarts") == 2
    assert files == undisturbed


def test_each_process_goes_on_with_random_numbers_of_its_own(tmp_path):
    _, expected = run(tmp_path, "undisturbed", program=NOISY)
    done, files = run(tmp_path, "killed", kill="1 6", program=NOISY)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("done after 1 restarts") == 2
    assert files == expected


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

        def say(self, message):
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


def test_without_restarts_it_ends_with_the_cause(tmp_path):
    done, files = run(tmp_path, "killed", kill="1 4", restarts=0)
    assert done.returncode == 128 + signal.SIGKILL
    assert "rank 1 was killed by SIGKILL" in done.stdout + done.stderr
    assert files["net.params"]  # what was saved before

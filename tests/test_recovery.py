"""A job whose process is killed goes on from its last checkpoint, and ends with the weights of one that nobody disturbed."""

import hashlib
import json
import random
import textwrap

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
import pytest
from gluon_mgpu.checkpoint.random_state import random_state, set_random_state
from mxnet import gluon

from .test_launch import launch_command
from .test_processes import BEGIN, ended

pytestmark = pytest.mark.timeout(600)
PROGRAM = """
    import os, random, signal

    class AbandonError(Exception):
        pass

    class Stop(mgpu.Callback):
        # Before the restart, all abandon the second run of the sharded data, and rank 0 is killed in that of the others.
        def __init__(self, run):
            self.run = run
        def on_batch_end(self, state):
            if me.restart == 0 and self.run == "own, stopped" and state.step == 6:
                raise AbandonError
            if me.restart == 0 and self.run == "shared, stopped" and me.rank == 0 and state.step == 7:
                os.kill(os.getpid(), signal.SIGKILL)
    loss = gluon.loss.SoftmaxCrossEntropyLoss()

    class Noisy:
        def __iter__(self):
            for X, y in gluon.data.DataLoader(gluon.data.ArrayDataset(inputs, labels), batch_sampler=sampler):
                yield X + np.float32(random.gauss(0, 1)) + mx.nd.array(np.random.normal(size=X.shape)), y
        def __len__(self):
            return len(sampler)
    generator = np.random.RandomState(0)
    inputs, labels = generator.normal(size=(40, 5)).astype("float32"), generator.randint(0, 4, 40)
    for run in ("own", "own, stopped"):
        random.seed(me.rank)
        np.random.seed(7 + me.rank)  # each process draws its own
        sampler = mgpu.data.ShardedSampler(40, 10, shuffle=False)
        net = gluon.nn.Dense(4, in_units=5)
        net.initialize(init.Constant(0.1), ctx=ctx)
        trainer = mgpu.Trainer(net, "sgd", {"learning_rate": 0.1, "momentum": 0.9}, sharded_data=True)
        saves = mgpu.Checkpoint(f"{folder}/{run}", monitor=None, every=1)
        try:
            mgpu.fit(net, loss, trainer, Noisy(), epochs=2, callbacks=[saves, Stop(run)], resume="auto")
        except AbandonError:
            print("abandoned", flush=True)

    rng = np.random.RandomState(0)
    X, y = rng.normal(size=(45, 5)).astype("float32"), rng.randint(0, 4, 45)
    for run in ("shared", "shared, stopped"):
        mx.random.seed(1)
        np.random.seed(1)
        net = gluon.nn.HybridSequential()
        net.add(gluon.nn.Dense(8, activation="tanh", in_units=5), gluon.nn.BatchNorm(), gluon.nn.Dropout(0.3), gluon.nn.Dense(4))
        net.initialize(init.Xavier(), ctx=ctx)
        net.hybridize()
        trainer = mgpu.Trainer(net, "adam", {"learning_rate": 0.01}, clip_norm=1.0)
        batches = mgpu.data.ArrayLoader(X, y, 9, shuffle=True, seed=2)  # 5 and 4: their generators part
        saves = mgpu.Checkpoint(f"{folder}/{run}", monitor=None, every=2, keep=2, background=True)
        mgpu.fit(net, loss, trainer, batches, [(X, y)], epochs=2, callbacks=[saves, Stop(run)], resume="auto")
    print("done after", me.restart, "restarts", flush=True)
"""


def saved(folder, run):
    """The files of a run's last checkpoint."""
    return {name: (folder / run / "last" / name).read_bytes() for name in ("net.params", "states.npz")}


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """The folder of a job that trains two networks, each undisturbed and stopped, and what its launcher printed."""
    folder = tmp_path_factory.mktemp("job")
    script = folder / "program.py"
    script.write_text(BEGIN + textwrap.dedent(PROGRAM))
    done = ended(launch_command([script, folder, 1], folder / "logs", max_restarts=1), folder)
    return folder, done.stdout, done.stderr


def test_a_killed_process_does_not_show_in_the_weights(job):
    folder, output, errors = job
    assert "rank 0 was killed by SIGKILL" in errors
    assert output.count("done after 1 restarts") == 2
    assert saved(folder, "shared, stopped") == saved(folder, "shared")


def test_each_process_goes_on_with_random_numbers_of_its_own(job):
    folder, output, _ = job
    assert output.count("abandoned") == 2
    assert saved(folder, "own, stopped") == saved(folder, "own")


@pytest.mark.parametrize("differ", [True, False])
def test_a_checkpoint_holds_the_random_numbers_of_every_rank(tmp_path, become, differ):
    """The first of two processes saves, what the other one says being given; then each of them loads, and one of three."""
    states = [random_states(rank * differ) for rank in range(2)]
    drawn = []
    for state in states:
        set_random_state(state["now"])
        drawn.append((random.random(), np.random.uniform()))
    net = gluon.nn.Dense(1, in_units=1)
    net.initialize(ctx=mx.cpu())

    class Told:
        said, barrier = [], int

        def all_gather_bytes(self, message):
            if message.isdigit():  # the number from which MXNet's generators are seeded
                return [message] * 2
            self.said.append(len(message))
            if len(message) == 32:
                return [hashlib.sha256(json.dumps(one).encode()).digest() for one in states]
            return [json.dumps(one).encode() for one in states]

    told, trainer = Told(), mgpu.Trainer(net, "sgd")
    set_random_state(states[0]["now"])
    become(told)
    mgpu.save_checkpoint(net, tmp_path / "c", trainer)
    assert len(told.said) == 1 + differ
    for num_processes in (2, 3):
        for rank in range(num_processes):
            become(None, rank, num_processes)
            mgpu.load_checkpoint(net, tmp_path / "c", trainer)
            assert (random.random(), np.random.uniform()) == drawn[rank if num_processes == 2 else 0]


def random_states(seed):
    random.seed(seed)
    np.random.seed(seed)
    state = random_state()
    return {"now": {name: state[name] for name in ("python", "numpy")}, "begun": None}

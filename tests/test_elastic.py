"""A job whose process does not come back goes on with fewer from its last checkpoint, and learns what it would have learnt."""

import json
import runpy
import sys

import numpy as np
import pytest

from .test_launch import launch_command
from .test_processes import ended

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(600)]
PROGRAM = """
import json, os, signal, sys, time

rank, restart = os.environ.get("GLUON_MGPU_RANK", "0"), int(os.environ.get("GLUON_MGPU_RESTART", "0"))
if restart == 1:
    if rank == "2":
        os._exit(7)  # its device is gone for good
    time.sleep(10_000)

import gluon_mgpu as mgpu
import numpy as np
from gluon_mgpu.distributed import this_process
from mxnet import gluon, init

folder, num_devices = sys.argv[1], int(sys.argv[2])
me = this_process()


def saved_step(data):
    try:
        with open(f"{folder}/{data}/last/training.json") as file:
            return json.load(file)["place"]["step"]
    except OSError:  # it is being replaced
        return 0


class AbandonError(Exception):
    pass


class Stop(mgpu.Callback):
    # After step 7 of three processes, all abandon the first run; in the second, one process is killed.
    def __init__(self, data):
        self.data = data

    def on_fit_begin(self, state):
        print(self.data, "begins after step", state.step, flush=True)

    def on_batch_end(self, state):
        if me.num_processes == 3 and restart == 0 and state.step == 7:
            if self.data == "whole":
                raise AbandonError
            if rank == "2":
                while saved_step("sharded") != 6:  # process 0 may be some steps behind
                    time.sleep(0.02)
                os.kill(os.getpid(), signal.SIGKILL)


def trained(data):
    rng = np.random.RandomState(0)
    X, y = rng.normal(size=(57, 5)).astype("float32"), rng.randint(0, 4, 57)
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(16, activation="tanh", in_units=5), gluon.nn.Dense(4, in_units=16))
    net.initialize(init.Constant(0.1), ctx=ctx)
    for param in net.collect_params().values():
        param.set_data(rng.normal(0, 0.5, param.shape))
    batches = mgpu.data.ArrayLoader(X, y, 12, shuffle=True, seed=2)
    if data == "sharded":
        sampler = mgpu.data.ShardedSampler(57, 12, seed=2)
        batches = gluon.data.DataLoader(gluon.data.ArrayDataset(X, y), batch_sampler=sampler)
    trainer = mgpu.Trainer(net, "adam", {"learning_rate": 0.01}, clip_norm=1.0, sharded_data=data == "sharded")
    saves = mgpu.Checkpoint(f"{folder}/{data}", monitor=None, every=2)
    parts = -(-3 // (me.num_processes * num_devices))  # as many examples at once as three devices have
    print(data, "parts", parts, "of", me.num_processes, "processes", flush=True)
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    options = dict(epochs=3, callbacks=[saves, Stop(data)], micro_steps=parts, resume="auto")
    try:
        history = mgpu.fit(net, loss, trainer, batches, [(X, y)], **options)
    except AbandonError:
        return None
    rows = [{name: row[name] for name in ("train_loss", "train_accuracy", "test_loss", "grad_norm")} for row in history.rows]
    weights = {name: param.data(ctx[0]).asnumpy().tolist() for name, param in net._collect_params_with_prefix().items()}
    return {"rows": rows, "weights": weights, "steps": trainer.optimizer.num_update}


ctx = mgpu.devices.resolve_devices(f"cpu:{num_devices}")
found = {data: trained(data) for data in ("whole", "sharded")}
with open(f"{folder}/{rank}.json", "w") as file:
    json.dump(found, file)
"""


def launched(folder):
    """What the launcher says, and what each of the processes tells that are left."""
    options = {"num_processes": 3, "min_processes": 2, "max_restarts": 3}
    done = ended(launch_command([folder / "train.py", folder, 1], folder / "logs", **options), folder)
    return done.stdout + done.stderr, [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """What the launcher prints, the results of the two remaining processes, and those of one process with three devices."""
    alone, job = tmp_path_factory.mktemp("alone"), tmp_path_factory.mktemp("job")
    for folder in (alone, job):
        (folder / "train.py").write_text(PROGRAM)
    told, found = launched(job)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", str(alone), "3"])
        runpy.run_path(str(alone / "train.py"))
    return told, found, json.loads((alone / "0.json").read_text())


@pytest.mark.parametrize("data", ["whole", "sharded"])
def test_a_process_that_does_not_come_back_does_not_show_in_the_weights(jobs, data):
    told, (found, other), expected = (jobs[0], [one[data] for one in jobs[1]], jobs[2][data])
    assert "rank 2 was killed by SIGKILL" in told
    assert "rank 2 exited with status 7" in told
    assert "one process fewer: 2 in all" in told
    assert f"{data} parts 1 of 3 processes" in told and told.count(f"{data} parts 2 of 2 processes") == 2
    assert told.count(f"{data} begins after step 6") == 2  # those that are left, with the last checkpoint
    assert found["steps"] == expected["steps"] == 15
    for name, weight in expected["weights"].items():
        np.testing.assert_allclose(found["weights"][name], weight, rtol=0, atol=1e-5)
    assert len(found["rows"]) == 3
    for row, there in zip(found["rows"], expected["rows"]):
        assert row == pytest.approx(there, rel=1e-4)
    assert other == found  # to the bit

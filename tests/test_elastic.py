"""A job whose process does not come back goes on with fewer from its last checkpoint, and learns what it would have learnt."""

import json
import os
import runpy
import subprocess
import sys

import numpy as np
import pytest

pytestmark = pytest.mark.timeout(200)
PROGRAM = """
import json, os, signal, sys, time

rank, restart = os.environ.get("GLUON_MGPU_RANK", "0"), int(os.environ.get("GLUON_MGPU_RESTART", "0"))
if rank == "2" and restart == 1:
    os._exit(7)  # its device is gone for good

import gluon_mgpu as mgpu
import numpy as np
from gluon_mgpu.distributed import this_process
from mxnet import gluon, init

folder, sharded, num_devices = sys.argv[1], sys.argv[2] == "sharded", int(sys.argv[3])
me = this_process()


def saved_step():
    try:
        with open(f"{folder}/run/last/training.json") as file:
            return json.load(file)["place"]["step"]
    except OSError:  # it is being replaced
        return 0


class Die(mgpu.Callback):
    def on_fit_begin(self, state):
        print("begins after step", state.step, flush=True)

    def on_batch_end(self, state):
        if rank == "2" and restart == 0 and state.step == 7:
            while saved_step() != 6:  # process 0 may be some steps behind
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGKILL)


ctx = mgpu.resolve_devices(f"cpu:{num_devices}")
rng = np.random.RandomState(0)
X, y = rng.normal(size=(57, 5)).astype("float32"), rng.randint(0, 4, 57)
net = gluon.nn.HybridSequential()
net.add(gluon.nn.Dense(16, activation="tanh", in_units=5), gluon.nn.Dense(4, in_units=16))
net.initialize(init.Constant(0.1), ctx=ctx)
for param in net.collect_params().values():
    param.set_data(rng.normal(0, 0.5, param.shape))
batches = mgpu.data.ArrayLoader(X, y, 12, shuffle=True, seed=2)
if sharded:
    sampler = mgpu.data.ShardedSampler(57, 12, seed=2)
    batches = gluon.data.DataLoader(gluon.data.ArrayDataset(X, y), batch_sampler=sampler)
trainer = mgpu.Trainer(net, "adam", {"learning_rate": 0.01}, clip_norm=1.0, sharded_data=sharded)
saves = mgpu.Checkpoint(f"{folder}/run", monitor=None, every=2)
parts = -(-3 // (me.num_processes * num_devices))  # as many examples at once as three devices have
print("parts", parts, "of", me.num_processes, "processes", flush=True)
loss = gluon.loss.SoftmaxCrossEntropyLoss()
options = dict(epochs=3, callbacks=[saves, Die()], micro_steps=parts, resume="auto")
history = mgpu.fit(net, loss, trainer, batches, [(X, y)], **options)
rows = [{name: row[name] for name in ("train_loss", "train_accuracy", "test_loss", "grad_norm")} for row in history.rows]
weights = {name: param.data(ctx[0]).asnumpy().tolist() for name, param in net._collect_params_with_prefix().items()}
with open(f"{folder}/{rank}.json", "w") as file:
    json.dump({"rows": rows, "weights": weights, "steps": trainer.optimizer.num_update}, file)
"""


def launched(folder, how):
    """What the launcher says, and what each of the processes tells that are left."""
    launch = ["-m", "gluon_mgpu", "launch", "-n", 3, "--elastic", "2:3", "--max-restarts", 3, "--log-dir", folder / "logs"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("GLUON_MGPU_", "DMLC_", "HOROVOD_"))}
    done = subprocess.run(
        [str(part) for part in [sys.executable, *launch, folder / "train.py", folder, how, 1]],
        capture_output=True,
        text=True,
        timeout=120,
        env={**environ, "OMP_NUM_THREADS": "1"},
        cwd=folder,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr, [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("how", ["whole", "sharded"])
def test_a_process_that_does_not_come_back_does_not_show_in_the_weights(tmp_path, monkeypatch, how):
    """The oracle is one process with three devices, which nobody disturbs."""
    for name in ("alone", "job"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(PROGRAM)
    told, (found, other) = launched(tmp_path / "job", how)
    monkeypatch.setattr(sys, "argv", ["train.py", str(tmp_path / "alone"), how, "3"])
    runpy.run_path(str(tmp_path / "alone" / "train.py"))
    expected = json.loads((tmp_path / "alone" / "0.json").read_text())
    assert "rank 2 was killed by SIGKILL" in told
    assert "rank 2 exited with status 7" in told
    assert "one process fewer on node 0: 2 in all" in told
    assert "parts 1 of 3 processes" in told and told.count("parts 2 of 2 processes") == 2
    assert told.count("begins after step 6") == 2  # those that are left, with the last checkpoint
    assert found["steps"] == expected["steps"] == 15
    for name, weight in expected["weights"].items():
        np.testing.assert_allclose(found["weights"][name], weight, rtol=0, atol=1e-5)
    assert len(found["rows"]) == 3
    for row, there in zip(found["rows"], expected["rows"]):
        assert row == pytest.approx(there, rel=1e-4)
    assert other == found  # to the bit

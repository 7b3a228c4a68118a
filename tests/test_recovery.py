"""A job whose process is killed goes on from its last checkpoint, and ends with the weights of one that nobody disturbed."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

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
    batches = mgpu.data.ArrayLoader(X, y, 10, shuffle=True, seed=2)
    saves = mgpu.Checkpoint(f"{folder}/run", monitor=None, every=2, keep=2, background=True)
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    mgpu.fit(net, loss, trainer, batches, [(X, y)], epochs=3, callbacks=[saves, Kill()], resume="auto")
    print("done after", me.restart, "restarts", flush=True)
"""


def run(tmp_path, name, *, kill="", restarts=1):
    """What the job says, and the files of its last checkpoint."""
    folder = tmp_path / name
    folder.mkdir()
    script = tmp_path / "program.py"
    script.write_text(BEGIN + textwrap.dedent(PROGRAM))
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


def test_without_restarts_it_ends_with_the_cause(tmp_path):
    done, files = run(tmp_path, "killed", kill="1 4", restarts=0)
    assert done.returncode == 128 + signal.SIGKILL
    assert "rank 1 was killed by SIGKILL" in done.stdout + done.stderr
    assert files["net.params"]  # what was saved before

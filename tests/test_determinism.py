"""One seed gives the same bits, in this process and in others."""

import os
import subprocess
import sys
import textwrap

import gluon_mgpu as mgpu
import mxnet as mx
import pytest

PROGRAM = """
    import hashlib, random, sys
    import gluon_mgpu as mgpu
    import mxnet as mx
    import numpy as np
    from mxnet import gluon
    from mxnet.gluon import nn

    def digest(seed, devices):
        mgpu.seed_everything(seed, deterministic=True)
        net = nn.HybridSequential()
        net.add(nn.Dense(16, activation="relu"), nn.Dropout(0.5), nn.Dense(3))
        net.initialize(mx.init.Xavier(), ctx=devices)
        X = np.random.randn(24, 5).astype("float32") * random.random()
        data = gluon.data.DataLoader(gluon.data.ArrayDataset(X, np.arange(24) % 3), 6, shuffle=True)
        trainer = mgpu.Trainer(net, "adam", {"learning_rate": 0.01})
        mgpu.fit(net, gluon.loss.SoftmaxCrossEntropyLoss(), trainer, data, epochs=2, callbacks=[])
        found = hashlib.sha256()
        for param in net.collect_params().values():
            found.update(param.data(devices[0]).asnumpy().tobytes())
        return found.hexdigest()

    with mgpu.use_devices("cpu*2") as ctx:
        print(digest(3, ctx), digest(3, ctx), digest(4, ctx))
        mx.npx.set_np()
        print(digest(3, ctx), digest(3, ctx), digest(4, ctx))
"""


@pytest.mark.exhaustive
def test_two_processes_have_the_same_bits():
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(PROGRAM)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, env=environ) for _ in range(2)]
    first, second = (process.communicate(timeout=240)[0] for process in running)
    assert first == second
    for line in first.decode().splitlines():
        one, again, other = line.split()
        assert one == again != other


@pytest.mark.parametrize("seed", [-1, 2**31, 0.5, True, "0"])
def test_a_wrong_seed_changes_nothing(seed):
    mgpu.seed_everything(1)
    expected = mx.nd.random.uniform(shape=3).asnumpy()
    mgpu.seed_everything(1)
    with pytest.raises(mgpu.errors.TrainerError, match="^seed_everything: got seed="):
        mgpu.seed_everything(seed)
    assert (mx.nd.random.uniform(shape=3).asnumpy() == expected).all()

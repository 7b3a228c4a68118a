"""Print a table's row: versions, the tests of a pytest log, and a hash of the weights of three trainings.

scripts/test_pythons.sh calls it: python scripts/training_hash.py LOG. MXNet draws and computes the weights. NumPy makes the
batches, draws their order, and takes part in learning rates, norms and divisors.
"""

import hashlib
import platform
import re
import sys
from pathlib import Path

import gluon_mgpu as mgpu
import numpy as np
from mxnet import gluon, init, npx


def trained(kind: str, optimizer: str) -> bytes:
    """Return the weights of a convolutional network, trained on two contexts for one epoch of digits."""
    mgpu.seed_everything(0)
    digits = mgpu.data.load_digits()
    images, labels = digits.train_images[:500], digits.train_labels[:500]
    data = gluon.data.DataLoader(gluon.data.ArrayDataset(images, labels), 64, shuffle=True)
    with mgpu.use_devices("cpu*2") as ctx:
        net = gluon.nn.HybridSequential()
        net.add(gluon.nn.Conv2D(8, 3), gluon.nn.BatchNorm(), gluon.nn.Activation("relu"), gluon.nn.Flatten(), gluon.nn.Dense(10))
        net.initialize(init.Xavier(), ctx=ctx)
        trainer = mgpu.Trainer(net, optimizer, {"learning_rate": np.float64(0.05)}, clip_norm=1.5)
        loss = gluon.loss.SoftmaxCrossEntropyLoss()
        batches = mgpu.data.ArrayLoader(images, labels, 48, shuffle=True) if kind == "np" else data
        mgpu.fit(net, loss, trainer, batches, epochs=1, callbacks=())
        return b"".join(param.data(ctx[0]).asnumpy().tobytes() for param in net.collect_params().values())


def row(log: str) -> str:
    """Return the row, with the numbers of the log's last line."""
    last_line = log.strip().rpartition("\n")[2]
    found = {kind: count for count, kind in re.findall(r"(\d+) (passed|failed|error|skipped)", last_line)}
    failed = sum(int(found.get(kind, 0)) for kind in ("failed", "error")) if found else "all"
    weights = trained("nd", "sgd") + trained("nd", "rmsprop")
    npx.set_np()
    digest = hashlib.sha256(weights + trained("np", "adam")).hexdigest()[:16]
    cells = (platform.python_version(), np.__version__, found.get("passed", 0), failed, found.get("skipped", 0), digest)
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    print(row(Path(sys.argv[1]).read_text(encoding="utf-8")))

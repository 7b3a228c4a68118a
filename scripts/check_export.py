"""Export the classification networks of Gluon's model zoo to ONNX, and compare them with MXNet: python scripts/check_export.py

It prints one line per network, as a table in Markdown. Names after the command choose networks. Weights are random, chosen so
that activations keep their size. Each file is also run on a batch of another size than the sample's.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import List, NamedTuple

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon.model_zoo import vision

NAMES = [
    *(f"resnet{depth}_v{version}" for version in (1, 2) for depth in (18, 34, 50, 101, 152)),
    *(f"vgg{depth}{kind}" for kind in ("", "_bn") for depth in (11, 13, 16, 19)),
    "alexnet",
    *(f"densenet{depth}" for depth in (121, 161, 169, 201)),
    *(f"squeezenet{version}" for version in ("1.0", "1.1")),
    "inceptionv3",
    *(f"mobilenet{width}" for width in ("1.0", "0.75", "0.5", "0.25")),
    *(f"mobilenetv2_{width}" for width in ("1.0", "0.75", "0.5", "0.25")),
]


class Row(NamedTuple):
    """One network: the largest differences relative to the output's largest value, and how much the output varies."""

    name: str
    difference: float
    other_batch: float
    variation: float
    seconds: float


def images(seed: int, number: int, size: int) -> np.ndarray:
    """Return images of coloured patches with noise, shape (number, 3, size, size). Noise alone looks alike to a network."""
    rng = np.random.RandomState(seed)
    patches = np.kron(rng.normal(size=(number, 3, 7, 7)), np.ones((1, 1, size // 7 + 1, size // 7 + 1)))[:, :, :size, :size]
    return (patches + rng.normal(0, 0.3, patches.shape)).astype("float32")


def zoo_network(name: str, size: int) -> gluon.HybridBlock:
    """Return a network with random weights and running statistics, whose output depends on its input."""
    rng = np.random.RandomState(0)
    mx.random.seed(0)
    net = vision.get_model(name)
    net.initialize(mx.init.Xavier(rnd_type="gaussian", factor_type="in", magnitude=2))  # keeps the size of relu's outputs
    layers = [block for block in mgpu.trainer.parameters.blocks_of(net) if isinstance(block, gluon.nn.BatchNorm)]
    for layer in layers:
        layer._kwargs["momentum"] = 0.0  # the statistics become those of this batch
    with autograd.record():
        net(mx.nd.array(images(2, 4, size))).wait_to_read()
    mx.nd.waitall()
    for layer in layers:
        for param, low in ((layer.gamma, 0.7), (layer.running_var, 0.7), (layer.running_mean, 0.7)):
            param.set_data(param.data() * mx.nd.array(rng.uniform(low, 2 - low, param.shape)))
        layer.beta.set_data(mx.nd.array(rng.normal(0, 0.2, layer.beta.shape)))
    return net


def compare(name: str, folder: Path) -> Row:
    """Export one network, and compare its file with it for a batch of 2 and one of 3."""
    import onnxruntime

    began = time.perf_counter()
    size = 299 if name == "inceptionv3" else 224
    net = zoo_network(name, size)
    X = images(1, 3, size)
    exported = mgpu.export(net, folder / f"{name}.onnx", X[:2])
    session = onnxruntime.InferenceSession(str(exported.files[0]), providers=["CPUExecutionProvider"])
    (found,), expected = session.run(None, {"data": X}), net(mx.nd.array(X)).asnumpy()
    exported.files[0].unlink()
    largest = np.abs(expected).max()
    variation = np.abs(expected - expected.mean(axis=0)).max() / largest
    assert exported.difference is not None
    return Row(name, exported.difference, np.abs(found - expected).max() / largest, variation, time.perf_counter() - began)


def main(names: List[str]) -> None:
    """Print the table."""
    print("| network | largest difference, batch 2 | batch 3 | variation between examples |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            row = compare(name, Path(folder))
            cells = (f"`{row.name}`", f"{row.difference:.1e}", f"{row.other_batch:.1e}", f"{row.variation:.2f}")
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or NAMES)

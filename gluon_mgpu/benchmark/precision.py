"""Training in low precision beside float32, step against step in one process, and what it costs in accuracy."""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any, Callable, Dict, List, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import Context, gluon

from ..data import ArrayLoader, load_digits
from ..data_parallel.step import train_batch
from ..devices.select import use_devices
from ..loop.evaluate import evaluate_accuracy_gpus
from ..models import resnet18
from ..trainer.precision import set_precision
from ..trainer.trainer import Trainer

NETWORKS = ("resnet18", "mlp")
NUM_CLASSES = 10
WARM_UP_STEPS = 3
_UNITS, _NUM_LAYERS = 1024, 4
_BATCH_SIZES = {"resnet18": 64, "mlp": 256}
_NUM_STEPS = {"resnet18": 2, "mlp": 20}

Table = Tuple[str, List[str], List[List[str]]]
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Round:
    """Examples a second in either precision, measured one after the other.

    Attributes
    ----------
    network : str
        `resnet18`: images of 28 x 28, batch 64. `mlp`: 4 Dense layers of 1024, batch 256.
    group : str
        Devices, and the threads of each.
    low : str
        `bf16` on CPUs, `fp16` on GPUs.
    full_per_s, low_per_s : float, examples/s
        Training steps with float32, and with `low`.
    """

    network: str
    group: str
    low: str
    full_per_s: float
    low_per_s: float

    @property
    def gain(self) -> float:
        """How many times as fast low precision is."""
        return self.low_per_s / self.full_per_s


@dataclass(frozen=True)
class Learned:
    """The test accuracy after training on the digits with one seed, in either precision."""

    seed: int
    low: str
    full: float
    reduced: float


def measure(
    specs: Sequence[str], networks: Sequence[str] = NETWORKS, *, rounds: int = 7, tell: Tell = lambda text: None
) -> List[Round]:
    """Return what training takes in either precision, for each network on each choice of devices.

    Each choice has a process of its own, because its number of threads is settled once. Both precisions are in it, and take
    turns; every other round begins with the other one.

    Parameters
    ----------
    specs : sequence of str
        Devices, as `use_devices` takes them: `cpu` is one context with all cores, `cpu:2` two with their share.
    networks : sequence of str
        Of `NETWORKS`.
    rounds : int
    tell : callable (str)
    """
    found: List[Round] = []
    for spec in specs:
        for network in networks:
            tell(f"{network} on {spec}: {rounds} rounds")
            found += _apart(_rounds, spec, network, rounds)
    return found


def learn(spec: str, *, seeds: Sequence[int] = (0, 1, 2), epochs: int = 8, tell: Tell = lambda text: None) -> List[Learned]:
    """Return the test accuracy of ResNet-18 on scikit-learn's digits, trained in either precision with the same seeds."""
    found = []
    for seed in seeds:
        tell(f"digits on {spec}, seed {seed}")
        found.append(_apart(_learned, spec, seed, epochs))
    return found


def speed_table(found: Sequence[Round]) -> Table:
    """Return title, columns and rows: medians, and the median of the rounds' ratios with their range."""
    rows = []
    for network, group in dict.fromkeys((one.network, one.group) for one in found):
        mine = [one for one in found if (one.network, one.group) == (network, group)]
        gains = [one.gain for one in mine]
        speeds = [f"{median(getattr(one, name) for one in mine):.1f}" for name in ("full_per_s", "low_per_s")]
        rows.append([network, group, mine[0].low, *speeds, f"{median(gains):.2f} ({min(gains):.2f} to {max(gains):.2f})"])
    return "training, examples/s: medians", ["network", "devices", "low", "fp32", "low", "times as fast (range)"], rows


def accuracy_table(found: Sequence[Learned]) -> Table:
    """Return title, columns and rows: the accuracy with each seed, and the mean."""
    rows = [[str(one.seed), f"{one.full:.4f}", f"{one.reduced:.4f}", f"{one.reduced - one.full:+.4f}"] for one in found]
    full, reduced = (float(np.mean([getattr(one, name) for one in found])) for name in ("full", "reduced"))
    rows.append(["mean", f"{full:.4f}", f"{reduced:.4f}", f"{reduced - full:+.4f}"])
    low = found[0].low if found else "low"
    return "ResNet-18 on the digits: test accuracy", ["seed", "fp32", low, "difference"], rows


def ranges(found: Sequence[Round]) -> Dict[str, Dict[str, Tuple[float, float, float]]]:
    """Return how many times as fast low precision is, by network and devices: what `plots.plot_ranges` takes."""
    bars: Dict[str, Dict[str, Tuple[float, float, float]]] = {}
    for one in found:
        gains = [other.gain for other in found if (other.network, other.group) == (one.network, one.group)]
        bars.setdefault(one.network, {})[one.group] = (median(gains), min(gains), max(gains))
    return bars


def _apart(work: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function returns in a new process, which has not yet settled anything."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def _rounds(spec: str, network: str, rounds: int) -> List[Round]:
    with use_devices(spec) as ctx:
        low = _low(ctx)
        steppers = {precision: _stepper(network, precision, ctx) for precision in ("fp32", low)}
        found = []
        for number in range(rounds):
            order = ("fp32", low) if number % 2 == 0 else (low, "fp32")
            speeds = {precision: steppers[precision](_NUM_STEPS[network]) for precision in order}
            found.append(Round(network, f"{len(ctx)} x {ctx[0].device_type}", low, speeds["fp32"], speeds[low]))
        return found


def _stepper(network: str, precision: str, ctx: List[Context]) -> Callable[[int], float]:
    """Return a function that trains for some steps, and returns the examples a second."""
    size = _BATCH_SIZES[network]
    net, shape = (resnet18(NUM_CLASSES), (1, 28, 28)) if network == "resnet18" else (_mlp(), (_UNITS,))
    trainer = _prepared(net, precision, ctx, seed=0)
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    rng = np.random.RandomState(0)
    X, y = rng.uniform(-1, 1, (size, *shape)).astype("float32"), rng.randint(0, NUM_CLASSES, size).astype("int32")

    def work(num_steps: int) -> float:
        mx.nd.waitall()
        started = time.perf_counter()
        for _ in range(num_steps):
            train_batch(net, loss, trainer, X, y)
        mx.nd.waitall()
        return num_steps * size / (time.perf_counter() - started)

    work(WARM_UP_STEPS)
    return work


def _learned(spec: str, seed: int, epochs: int) -> Learned:
    digits = load_digits()
    with use_devices(spec) as ctx:
        accuracy = {}
        for precision in ("fp32", _low(ctx)):
            net, loss = resnet18(NUM_CLASSES), gluon.loss.SoftmaxCrossEntropyLoss()
            trainer = _prepared(net, precision, ctx, seed=seed)
            batches = ArrayLoader(digits.train_images, digits.train_labels, batch_size=64, shuffle=True)
            for _ in range(epochs):
                for X, y in batches:
                    train_batch(net, loss, trainer, X, y)
            accuracy[precision] = evaluate_accuracy_gpus(net, [(digits.test_images, digits.test_labels)])
        return Learned(seed, _low(ctx), accuracy["fp32"], accuracy[_low(ctx)])


def _prepared(net: gluon.Block, precision: str, ctx: List[Context], *, seed: int) -> Trainer:
    np.random.seed(seed)
    mx.random.seed(seed)
    net.initialize(mx.init.Xavier(), ctx=ctx)
    net.hybridize(static_alloc=True, static_shape=True)
    set_precision(net, precision)
    return Trainer(net, "sgd", {"learning_rate": 0.02})


def _mlp() -> gluon.Block:
    net = gluon.nn.HybridSequential()
    for _ in range(_NUM_LAYERS):
        net.add(gluon.nn.Dense(_UNITS, activation="relu"))
    net.add(gluon.nn.Dense(NUM_CLASSES))
    return net


def _low(ctx: Sequence[Context]) -> str:
    return "bf16" if all(context.device_type == "cpu" for context in ctx) else "fp16"

"""Training in low precision compared with float32: speed, in turns in one process, and accuracy."""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any, Callable, Dict, List, Sequence, Tuple

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
from gluon_mgpu.data import ArrayLoader, load_digits
from mxnet import Context, gluon

NETWORKS = ("resnet18", "mlp")
NUM_CLASSES = 10
WARM_UP_STEPS = 3
_UNITS, _NUM_LAYERS = 1024, 4
_BATCH_SIZES = {"resnet18": 64, "mlp": 256}
_NUM_STEPS = {"resnet18": 2, "mlp": 20}

Table = Tuple[str, List[str], List[List[str]]]
OnMessage = Callable[[str], None]


@dataclass(frozen=True)
class Round:
    """Examples per second in both precisions, measured one after the other.

    Attributes
    ----------
    network : str
        `resnet18`: images of 28 x 28, batch 64. `mlp`: 4 Dense layers of 1024, batch 256.
    group : str
        Number and type of the devices.
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
        """Speed in low precision divided by speed in float32."""
        return self.low_per_s / self.full_per_s


@dataclass(frozen=True)
class Learned:
    """The test accuracy after training on the digits with one seed, in both precisions."""

    seed: int
    low: str
    full: float
    reduced: float


def measure(
    specs: Sequence[str], networks: Sequence[str] = NETWORKS, *, rounds: int = 7, on_message: OnMessage = lambda text: None
) -> List[Round]:
    """Return the speed of training in both precisions, for each network on each choice of devices.

    Each choice gets a process of its own, because MXNet sets the number of threads once per process. Both precisions run in
    this process, in turns; every other round begins with the other precision.

    Parameters
    ----------
    specs : sequence of str
        Devices, as `use_devices` takes them: `cpu` is one context with all cores, `cpu:2` two with their share.
    networks : sequence of str
        Of `NETWORKS`.
    rounds : int
    on_message : callable (str)
        Called with the current activity.
    """
    found: List[Round] = []
    for spec in specs:
        for network in networks:
            on_message(f"{network} on {spec}: {rounds} rounds")
            found += _apart(_rounds, spec, network, rounds)
    return found


def learn(
    spec: str, *, seeds: Sequence[int] = (0, 1, 2), epochs: int = 8, on_message: OnMessage = lambda text: None
) -> List[Learned]:
    """Return the test accuracy of ResNet-18 on scikit-learn's digits, trained in both precisions with the same seeds."""
    found = []
    for seed in seeds:
        on_message(f"digits on {spec}, seed {seed}")
        found.append(_apart(_learned, spec, seed, epochs))
    return found


def speed_table(found: Sequence[Round]) -> Table:
    """Return title, columns and rows: medians, and the median and range of the rounds' ratios."""
    rows = []
    for network, group in dict.fromkeys((one.network, one.group) for one in found):
        mine = [one for one in found if (one.network, one.group) == (network, group)]
        gains = [one.gain for one in mine]
        speeds = [f"{median(getattr(one, name) for one in mine):.1f}" for name in ("full_per_s", "low_per_s")]
        rows.append([network, group, mine[0].low, *speeds, f"{median(gains):.2f} ({min(gains):.2f} to {max(gains):.2f})"])
    return "training, examples/s: medians", ["network", "devices", "low", "fp32", "low", "low / fp32 (range)"], rows


def accuracy_table(found: Sequence[Learned]) -> Table:
    """Return title, columns and rows: the accuracy with each seed, and the mean."""
    rows = [[str(one.seed), f"{one.full:.4f}", f"{one.reduced:.4f}", f"{one.reduced - one.full:+.4f}"] for one in found]
    full, reduced = (float(np.mean([getattr(one, name) for one in found])) for name in ("full", "reduced"))
    rows.append(["mean", f"{full:.4f}", f"{reduced:.4f}", f"{reduced - full:+.4f}"])
    low = found[0].low if found else "low"
    return "ResNet-18 on the digits: test accuracy", ["seed", "fp32", low, "difference"], rows


def ranges(found: Sequence[Round]) -> Dict[str, Dict[str, Tuple[float, float, float]]]:
    """Return the speed in low precision divided by float32's, by network and devices, for `plot_ranges`."""
    bars: Dict[str, Dict[str, Tuple[float, float, float]]] = {}
    for one in found:
        gains = [other.gain for other in found if (other.network, other.group) == (one.network, one.group)]
        bars.setdefault(one.network, {})[one.group] = (median(gains), min(gains), max(gains))
    return bars


def _apart(work: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function in a new process, whose number of threads is not set yet, and return its result."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def _rounds(spec: str, network: str, rounds: int) -> List[Round]:
    with mgpu.use_devices(spec) as ctx:
        low = _low(ctx)
        steppers = {precision: _stepper(network, precision, ctx) for precision in ("fp32", low)}
        found = []
        for number in range(rounds):
            order = ("fp32", low) if number % 2 == 0 else (low, "fp32")
            speeds = {precision: steppers[precision](_NUM_STEPS[network]) for precision in order}
            found.append(Round(network, f"{len(ctx)} x {ctx[0].device_type}", low, speeds["fp32"], speeds[low]))
        return found


def _stepper(network: str, precision: str, ctx: List[Context]) -> Callable[[int], float]:
    """Return a function that trains for some steps and returns the examples per second."""
    size = _BATCH_SIZES[network]
    net, shape = (mgpu.models.resnet18(NUM_CLASSES), (1, 28, 28)) if network == "resnet18" else (_mlp(), (_UNITS,))
    trainer = _prepared(net, precision, ctx, seed=0)
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    rng = np.random.RandomState(0)
    X, y = rng.uniform(-1, 1, (size, *shape)).astype("float32"), rng.randint(0, NUM_CLASSES, size).astype("int32")

    def work(num_steps: int) -> float:
        mx.nd.waitall()
        started = time.perf_counter()
        for _ in range(num_steps):
            mgpu.train_batch(net, loss, trainer, X, y)
        mx.nd.waitall()
        return num_steps * size / (time.perf_counter() - started)

    work(WARM_UP_STEPS)
    return work


def _learned(spec: str, seed: int, epochs: int) -> Learned:
    digits = load_digits()
    with mgpu.use_devices(spec) as ctx:
        accuracy = {}
        for precision in ("fp32", _low(ctx)):
            net, loss = mgpu.models.resnet18(NUM_CLASSES), gluon.loss.SoftmaxCrossEntropyLoss()
            trainer = _prepared(net, precision, ctx, seed=seed)
            batches = ArrayLoader(digits.train_images, digits.train_labels, batch_size=64, shuffle=True)
            for _ in range(epochs):
                for X, y in batches:
                    mgpu.train_batch(net, loss, trainer, X, y)
            accuracy[precision] = mgpu.evaluate_accuracy_gpus(net, [(digits.test_images, digits.test_labels)])
        return Learned(seed, _low(ctx), accuracy["fp32"], accuracy[_low(ctx)])


def _prepared(net: gluon.Block, precision: str, ctx: List[Context], *, seed: int) -> mgpu.Trainer:
    np.random.seed(seed)
    mx.random.seed(seed)
    net.initialize(mx.init.Xavier(), ctx=ctx)
    net.hybridize(static_alloc=True, static_shape=True)
    mgpu.set_precision(net, precision)
    return mgpu.Trainer(net, "sgd", {"learning_rate": 0.02})


def _mlp() -> gluon.Block:
    net = gluon.nn.HybridSequential()
    for _ in range(_NUM_LAYERS):
        net.add(gluon.nn.Dense(_UNITS, activation="relu"))
    net.add(gluon.nn.Dense(NUM_CLASSES))
    return net


def _low(ctx: Sequence[Context]) -> str:
    return "bf16" if all(context.device_type == "cpu" for context in ctx) else "fp16"

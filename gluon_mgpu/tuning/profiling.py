"""Costs of computing on each device: matrix products, logging, and two devices at once."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import Callable, Dict, List, Sequence

import mxnet as mx
from mxnet import Context


@dataclass(frozen=True)
class Product:
    """The cost of multiplying two square matrices.

    Attributes
    ----------
    device : str
    size : int
        The matrices are size x size, float32.
    seconds : float
        The median over the repeats, of one product.
    gflop_per_s : float
        10**9 operations per second, two for each multiply-add.
    """

    device: str
    size: int
    seconds: float
    gflop_per_s: float


def measure_products(contexts: Sequence[Context], sizes: Sequence[int], *, repeats: int = 5) -> List[Product]:
    """Return the cost of products of each size on each device, one device at a time.

    Small products are repeated inside one measurement, up to about 2 * 10**9 operations, to show the cost of one product in a
    long queue.

    Parameters
    ----------
    contexts : sequence of mxnet.Context
    sizes : sequence of int
    repeats : int
        Number of measurements; the median counts.

    Source: d2l, chapter "GPUs", exercise 1.
    """
    found = []
    for size in sizes:
        for context in contexts:
            matrix = mx.nd.ones((size, size), ctx=context)
            num_products = max(1, min(1000, 10**9 // size**3))
            work = _products(matrix, num_products)
            _seconds(work)
            seconds = median(_seconds(work) for _ in range(repeats)) / num_products
            found.append(Product(str(context), size, seconds, 2 * size**3 / seconds / 1e9))
    return found


def measure_logging(context: Context, *, num_products: int = 1000, size: int = 100, repeats: int = 3) -> Dict[str, float]:
    """Return the seconds for many small products whose norms are logged: each one to the host, or on the device first.

    The norm is tr(M M'), the sum of the squares of M.

    Returns
    -------
    dict
        `to the host each time` and `on the device, read once`: medians, seconds for all products together.

    Source: d2l, chapter "GPUs", exercise 3.
    """
    matrix = mx.nd.random.uniform(shape=(size, size), ctx=context)

    def on_host() -> None:
        norms = []
        for _ in range(num_products):
            norms.append(float(mx.nd.sum(mx.nd.square(mx.nd.dot(matrix, matrix))).asscalar()))

    def on_device() -> None:
        norms = [mx.nd.sum(mx.nd.square(mx.nd.dot(matrix, matrix))) for _ in range(num_products)]
        mx.nd.concat(*norms, dim=0).asnumpy()

    contenders = {"to the host each time": on_host, "on the device, read once": on_device}
    return _compared(contenders, repeats)


def measure_overlap(
    contexts: Sequence[Context], *, num_products: int = 40, size: int = 512, repeats: int = 3
) -> Dict[str, float]:
    """Return the seconds for the same products on every device: one device after another, or all at once.

    Returns
    -------
    dict
        `one after another` and `at once`: medians, seconds for all devices together.

    Source: d2l, chapter "GPUs", exercise 4.
    """
    works = [_products(mx.nd.ones((size, size), ctx=context), num_products) for context in contexts]

    def one_after_another() -> None:
        for work in works:
            work()
            mx.nd.waitall()

    def at_once() -> None:
        for work in works:
            work()

    return _compared({"one after another": one_after_another, "at once": at_once}, repeats)


def _products(matrix: mx.nd.NDArray, num_products: int) -> Callable[[], None]:
    def work() -> None:
        for _ in range(num_products):
            mx.nd.dot(matrix, matrix)

    return work


def _compared(contenders: Dict[str, Callable[[], None]], repeats: int) -> Dict[str, float]:
    """Return the median seconds of each; they run in turns, so that a slow moment of the machine affects all."""
    times: Dict[str, List[float]] = {name: [] for name in contenders}
    for work in contenders.values():
        _seconds(work)
    for _ in range(repeats):
        for name, work in contenders.items():
            times[name].append(_seconds(work))
    return {name: median(seconds) for name, seconds in times.items()}


def _seconds(work: Callable[[], None]) -> float:
    mx.nd.waitall()
    started = time.perf_counter()
    work()
    mx.nd.waitall()
    return time.perf_counter() - started

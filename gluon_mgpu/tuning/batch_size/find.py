"""find_batch_size(): the largest batch that fits, by doubling and halving, and the recommended one."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import Context, gluon, init

from ...checks import check_function, is_whole, real_number, renamed_argument, short, whole_number
from ...devices.select import DeviceSpec
from ...errors import DeviceError, StepError, TrainerError
from ...models import resnet18
from ...runtime.units import format_bytes
from ...trainer.trainer import Trainer
from .process import INSIDE, NoMemoryError, ProbeTimeoutError, ask
from .workload import Question, Workload, reference_of

WITHIN = 0.05


@dataclass(frozen=True)
class Probe:
    """The result of one batch size.

    Attributes
    ----------
    batch_size : int
        Over all devices.
    fits : bool
    memory_bytes : int
        Memory in use on the fullest GPU; on CPU contexts, of the process, plus an estimate for temporary buffers that would
        still grow. If the batch does not fit, the memory seen before the process was stopped.
    examples_per_s : tuple of float
        One number per round; empty if the batch does not fit.
    reason : str
        Why it does not fit; "" if it does.
    """

    batch_size: int
    fits: bool
    memory_bytes: int
    examples_per_s: Tuple[float, ...] = ()
    reason: str = ""

    @property
    def rate(self) -> float:
        """The median of the rounds, examples/s; 0.0 if the batch does not fit."""
        return median(self.examples_per_s) if self.examples_per_s else 0.0

    def __str__(self) -> str:
        size = f"batch {self.batch_size}: {format_bytes(self.memory_bytes, digits=2)}"
        if not self.fits:
            return f"{size}, does not fit ({self.reason})"
        return f"{size}, {self.rate:.4g} ({min(self.examples_per_s):.4g} to {max(self.examples_per_s):.4g}) examples/s, fits"


@dataclass(frozen=True)
class BatchSizes:
    """The result of `find_batch_size`.

    Attributes
    ----------
    devices : tuple of str
    memory_limit_bytes : int
    probes : tuple of Probe
        In the order of the search.
    largest : int
        The largest batch size that fits.
    recommended : int
        See `recommend`.
    ended_by : str
        Why no larger batch was tried, if the reason is not memory: the allowed maximum, or a probe without an answer.
    """

    devices: Tuple[str, ...]
    memory_limit_bytes: int
    probes: Tuple[Probe, ...]
    largest: int
    recommended: int
    ended_by: str = ""


def find_batch_size(
    workload: Workload,
    *,
    devices: DeviceSpec = None,
    options: Optional[Dict[str, Any]] = None,
    memory_limit_bytes: Optional[int] = None,
    first: int = 16,
    max_batch_size: int = 65536,
    multiple_of: Optional[int] = None,
    timeout_s: float = 300.0,
    on_start: Callable[[int], None] = lambda batch_size: None,
    on_message: Optional[Callable[[Probe], None]] = None,
    tell: Optional[Callable[[Probe], None]] = None,
) -> BatchSizes:
    """Try batch sizes, each in a separate process, and return the largest that fits and the recommended one.

    The size doubles until a batch does not fit; then the gap is halved. The search assumes that memory grows with the batch:
    sizes above one that does not fit are not tried. Each probe makes some steps before it is timed, because the first one creates
    the momentum, then measures five rounds. The batch size is a hyper-parameter: after a change, tune the learning rate again.

    Parameters
    ----------
    workload : str or callable (batch_size, ctx, **options)
        The training to measure: `"module:function"`, `"path/to/file.py:function"`, or a function at the top level of a module
        or script. It returns a function without arguments that makes one step, or the arguments of `train_batch`,
        `(net, loss, trainer, X, y)`. A script that passes its own function calls this below `if __name__ == "__main__":`.
    devices : None, str, int, mxnet.Context or sequence of mxnet.Context
        As `use_devices` accepts them. Only the new processes use them, so this process takes no GPU memory.
    options : dict, optional
        Further arguments of the workload, as values for JSON.
    memory_limit_bytes : int, optional
        By default a GPU's memory; on CPU contexts nine tenths of the free memory. There the complete process of the probe counts
        (about 200 MB before the first array), but not the processes that it starts.
    first : int
        The first batch size, raised to a multiple.
    max_batch_size : int
    multiple_of : int, optional
        Try only multiples of it, by default of the number of devices. It is also the resolution of the search.
    timeout_s : float, seconds
        For each probe. When one gives no answer in time, the search ends with what was found before.
    on_start : callable (int)
        Gets each batch size before it is tried, and first 0, before the devices are checked. Each takes seconds.
    on_message : callable (Probe), optional
        Called with each probe when it is done.
    tell : callable (Probe), optional
        Deprecated: the former name of `on_message`.

    Raises
    ------
    TrainerError
        An argument is invalid, or the workload cannot be found. Nothing was tried.
    DeviceError
        A device does not exist.
    StepError
        The step fails for a reason other than memory, or the smallest batch does not fit or does not answer.

    Examples
    --------
    >>> found = find_batch_size("train.py:make", devices="cpu*2", on_message=print)  # doctest: +SKIP
    batch 16: 0.55 GiB, 181 (178 to 184) examples/s, fits
    ...
    >>> found.recommended  # doctest: +SKIP
    64
    """
    on_message = renamed_argument("find_batch_size", "tell", tell, "on_message", on_message)
    check_function("find_batch_size", "on_start", on_start, advice="Pass for example print.")
    question = Question(reference_of(workload), _checked_options(options), _spec_of(devices), np=bool(mx.util.is_np_array()))
    _check_numbers(memory_limit_bytes, first, max_batch_size, multiple_of, timeout_s)
    _check_not_inside()
    on_start(0)
    there = _inspect(question, timeout_s)
    unit = multiple_of or len(there["devices"])
    _check_room(there, memory_limit_bytes, max_batch_size, unit)
    limit = memory_limit_bytes or there["room_bytes"]
    probes: List[Probe] = []

    def fits(batch_size: int) -> bool:
        on_start(batch_size)
        probes.append(_probe(replace(question, batch_size=batch_size), there, limit, timeout_s))
        if on_message is not None:
            on_message(probes[-1])
        return probes[-1].fits

    ended_by = ""
    try:
        search(fits, first=first, most=max_batch_size, multiple_of=unit)
    except ProbeTimeoutError as error:
        if not any(probe.fits for probe in probes):
            raise
        ended_by = str(error)
    if not any(probe.fits for probe in probes):
        raise StepError(
            f"find_batch_size: got {probes[-1].reason} with a batch of {probes[-1].batch_size}, the smallest; expected one "
            f"that fits in {format_bytes(limit, digits=2)}. Raise the limit, or make the network or its inputs smaller."
        )
    largest = max(probe.batch_size for probe in probes if probe.fits)
    if not ended_by and all(probe.fits for probe in probes):
        ended_by = f"the largest batch allowed, {max_batch_size}"
    return BatchSizes(tuple(there["devices"]), limit, tuple(probes), largest, recommend(probes), ended_by)


def search(fits: Callable[[int], bool], *, first: int, most: int, multiple_of: int = 1) -> int:
    """Return the largest multiple, up to `most`, that fits, or 0, by doubling and then halving the gap.

    Examples
    --------
    >>> tried = []
    >>> search(lambda n: tried.append(n) or n <= 44, first=16, most=1000, multiple_of=2)
    44
    >>> tried
    [16, 32, 64, 48, 40, 44, 46]
    """
    top = most // multiple_of
    low, high, number = 0, top + 1, min(top, -(-first // multiple_of))
    while low + 1 < high:
        if fits(number * multiple_of):
            low = number
        else:
            high = number
        number = min(2 * low, top) if high > top else (low + high) // 2
    return low * multiple_of


def recommend(probes: Sequence[Probe]) -> int:
    """Return the smallest batch whose median rate is within 5 % of the best: a larger one would only take memory.

    Examples
    --------
    >>> recommend([Probe(16, True, 1, (80.0,)), Probe(32, True, 2, (96.0,)), Probe(64, True, 4, (100.0,)), Probe(128, False, 8)])
    32
    """
    best = max(probe.rate for probe in probes)
    return min(probe.batch_size for probe in probes if probe.fits and probe.rate >= (1 - WITHIN) * best)


def resnet18_workload(batch_size: int, ctx: Sequence[Context], image_size: int = 28, optimizer: str = "sgd") -> Tuple[Any, ...]:
    """Return the arguments of `train_batch` to train the toolkit's ResNet-18 on random grey images of ten classes."""
    net = resnet18(10)
    net.initialize(init.Xavier(), ctx=list(ctx))
    net.hybridize(static_alloc=True, static_shape=True)
    X = np.random.uniform(size=(batch_size, 1, image_size, image_size)).astype("float32")
    y = np.random.randint(0, 10, batch_size).astype("int32")
    return net, gluon.loss.SoftmaxCrossEntropyLoss(), Trainer(net, optimizer, {"learning_rate": 0.01}), X, y


def _inspect(question: Question, timeout_s: float) -> Dict[str, Any]:
    """Return the devices and memory that a process finds before any training."""
    try:
        return ask(question, timeout_s=timeout_s)
    except NoMemoryError as error:
        raise StepError(
            f"find_batch_size: got a lack of memory ({error}) before the first batch; expected enough for a process with MXNet "
            "and the data of the workload's file. Stop other processes, or load less data."
        ) from error


def _probe(question: Question, there: Dict[str, Any], limit_bytes: int, timeout_s: float) -> Probe:
    on_gpus = any(device.startswith("gpu") for device in there["devices"])
    try:
        found = ask(question, limit_bytes=0 if on_gpus else limit_bytes, timeout_s=timeout_s)
    except NoMemoryError as error:
        return Probe(question.batch_size, False, error.peak_bytes, reason=str(error))
    fits = found["memory_bytes"] <= limit_bytes
    rates = tuple(found["examples_per_s"]) if fits else ()
    return Probe(question.batch_size, fits, found["memory_bytes"], rates, "" if fits else "more than the limit")


def _checked_options(options: Optional[Dict[str, Any]]) -> Dict[str, Any]:
    try:
        requested = {} if options is None else options
        copied = json.loads(json.dumps(requested)) if isinstance(requested, dict) else None
    except (TypeError, ValueError, RecursionError):
        copied = None
    if copied is None or copied != requested:
        raise TrainerError(
            f"find_batch_size: got the options {short(options)}; expected a dict of values for JSON, because other processes "
            "read them. Pass numbers, strings and lists, and create other objects in the workload."
        )
    return dict(requested)


def _spec_of(devices: DeviceSpec) -> str:
    """Return devices as a string; `cpu:3-3` is one context, `cpu:3` would be three."""
    if devices is None:
        return "auto"
    if isinstance(devices, str) or is_whole(devices):
        return str(devices)
    contexts = [devices] if isinstance(devices, Context) else devices
    if isinstance(contexts, (list, tuple)) and contexts and all(isinstance(one, Context) for one in contexts):
        return ",".join(f"{one.device_type}:{one.device_id}-{one.device_id}" for one in contexts)
    raise DeviceError(
        f"find_batch_size: got {short(devices)} as devices; expected a device spec. Pass 'gpu', 'cpu*2' or a count."
    )


def _check_numbers(limit: Any, first: Any, most: Any, multiple_of: Any, timeout_s: Any) -> None:
    whole = {"memory_limit_bytes": limit, "first": first, "max_batch_size": most, "multiple_of": multiple_of}
    for name, number in whole.items():
        if number is None and name in ("memory_limit_bytes", "multiple_of"):
            continue
        whole_number("find_batch_size", name, number, high=2**63 - 1, advice="Pass an int.")
    real_number("find_batch_size", "timeout_s", timeout_s, above=True, advice="300 seconds are usual.")


def _check_not_inside() -> None:
    if INSIDE in os.environ:
        raise TrainerError(
            "find_batch_size: got a call from a probe, which imports the workload's file; expected the call below "
            'if __name__ == "__main__":. Move it there, or move the workload into a separate file.'
        )


def _check_room(there: Dict[str, Any], limit: Optional[int], most: int, unit: int) -> None:
    if most < unit:
        raise TrainerError(
            f"find_batch_size: got max_batch_size={most}; expected {unit} or more, because batches are multiples of {unit}. "
            "Raise it, or pass multiple_of=."
        )
    if limit is not None and limit <= there["memory_bytes"]:
        raise TrainerError(
            f"find_batch_size: got a memory limit of {limit:,} bytes; expected more than the {there['memory_bytes']:,} that "
            f"are in use on {', '.join(there['devices'])} before the first batch. Raise it."
        )

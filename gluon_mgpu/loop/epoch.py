"""One pass over the data, for training and for evaluation alike."""

from __future__ import annotations

import math
import time
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Callable, Deque, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

import mxnet as mx

from ..data_parallel.iterators import as_pair, batches_of
from ..data_parallel.prefetch import NUM_HELD, Buffers
from ..data_parallel.step import Batch
from ..errors import NonFiniteLossError, StepError, TrainerError
from ..nested import Array, is_device_array, leaves, map_leaves
from .metrics import DeviceSums, Metrics
from .stopping import Stops

REPORT_S = 0.5
REPORT_BATCHES = 64


@dataclass(frozen=True)
class EpochProgress:
    """How far a pass has come.

    Attributes
    ----------
    means : dict of str to float
        Each metric, and `loss`, over what has been seen.
    num_batches, num_examples : int
        Seen so far.
    seconds : float
        Since the pass began.
    stopped : int
        The signal that stopped it before the end; 0 for none.
    """

    means: Dict[str, float]
    num_batches: int
    num_examples: int
    seconds: float
    stopped: int = 0

    @property
    def examples_per_s(self) -> float:
        """Examples a second, on the wall clock."""
        return self.num_examples / self.seconds if self.seconds > 0 else 0.0


def run_epoch(
    data_iter: Iterable[Any],
    run_batch: Callable[[Any, Any], Batch],
    metrics: Metrics = (),
    *,
    operation: str,
    first_step: int = 1,
    max_inflight: int = 2,
    check_finite: bool = False,
    on_report: Optional[Callable[[EpochProgress], None]] = None,
    on_batch: Optional[Callable[[Callable[[], None]], None]] = None,
    sums: Optional[DeviceSums] = None,
    should_stop: Optional[Callable[[], int]] = None,
    may_stop: Callable[[], bool] = lambda: True,
    on_phase: Callable[[str], None] = lambda phase: None,
) -> EpochProgress:
    """Run `run_batch` on every batch, and return the metrics over all of them.

    ```
    batch ─► run_batch: queued, not waited for ─► with more than `max_inflight` queued, the oldest is waited for
                 on_report, finite? ◄── read, every half second ◄── its metrics are added up on the devices ◄──┘
    ```

    Only what has run is added up, so that the devices have the later batches to do while it is read.

    Parameters
    ----------
    data_iter : iterable of (X, y)
    run_batch : callable (X, y) -> Batch
        Trains or evaluates, without waiting.
    metrics : sequence of functions, or dict name -> function
    operation : str
        What errors call this pass.
    first_step : int
        The number of the first batch, for errors.
    max_inflight : int
        Batches that may be queued on the devices. More hide longer pauses of the host, take more memory, and let reports and
        errors come later by as many.
    check_finite : bool
        Raise when the loss is NaN or infinite.
    on_report : callable (EpochProgress), optional
        Called about twice a second, and at the end.
    on_batch : callable (callable () -> None), optional
        Called after each batch has been queued. What it gets adds the batches that are still queued to the sums, without waiting.
    sums : DeviceSums, optional
        Of these metrics: to go on from what is in them.
    should_stop : callable () -> int, optional
        Returns the signal that asked this process to stop, 0 for none. Processes agree on the batch; see `Stops`.
    may_stop : callable () -> bool
        Returns whether the pass can stop after this batch; the same in all processes.
    on_phase : callable (str) -> None
        Told what begins: `data`, waiting for the next batch; `dispatch`, queueing it; `devices`, waiting for an earlier one or
        for the sums; `callbacks`; and "" at the end.

    Raises
    ------
    TrainerError
        There is no batch, or one is not a pair.
    StepError
        A device failed; the message names the step.
    NonFiniteLossError
        The message names the step and the device.
    """
    sums = DeviceSums(metrics) if sums is None else sums
    buffers = Buffers(max_inflight + NUM_HELD)
    queued: Deque[Tuple[int, Batch]] = deque()
    unread: List[Tuple[int, List[Array]]] = []  # losses since the last report: to find out which step went wrong
    started = reported = time.perf_counter()
    num_batches = num_examples = 0  # that have been added up
    num_ahead = 0  # queued, and in the sums already
    stops, stopped = Stops(), 0
    keeps = isinstance(data_iter, (list, tuple, mx.gluon.data.DataLoader))  # every batch, in memory of its own

    def report(read: Callable[[], Dict[str, float]]) -> EpochProgress:
        on_phase("devices")
        means = _checked(operation, unread or queued, read)
        if check_finite and not math.isfinite(means.get("loss", 0.0)):
            _raise_non_finite(operation, [*unread, *((step, batch.losses) for step, batch in queued)])
        unread.clear()
        progress = EpochProgress(means, num_batches, num_examples, time.perf_counter() - started, stopped)
        if on_report is not None:
            on_phase("callbacks")
            on_report(progress)
        return progress

    def add_queued() -> None:
        nonlocal num_ahead
        for step, batch in list(queued)[num_ahead:]:
            with _naming(operation, step, "; expected data that the metrics take. Try them on one batch."):
                sums.add_batch(batch)
            num_ahead += 1

    def add_oldest() -> None:
        nonlocal num_batches, num_examples, num_ahead, reported
        step, batch = queued[0]
        if num_ahead:
            num_ahead -= 1
        else:
            with _naming(operation, step, "; expected data that the metrics take. Try them on one batch."):
                sums.add_batch(batch)
        queued.popleft()
        unread.append((step, batch.losses))
        num_batches += 1
        num_examples += batch.num_examples
        if time.perf_counter() - reported > REPORT_S or len(unread) >= REPORT_BATCHES:
            report(sums.read)
            reported = time.perf_counter()

    on_phase("data")
    for step, item in enumerate(batches_of(data_iter), first_step):
        on_phase("dispatch")
        X, y = as_pair(item, operation)
        with _naming(
            operation, step, "; expected data that the network and the loss take. Try them on one batch."
        ), buffers.used():
            batch = run_batch(X, y)
        queued.append((step, batch if keeps else _owning(batch, y)))
        if len(queued) > max_inflight:
            on_phase("devices")
            _checked(operation, queued, lambda: _wait(queued[0][1]))
            on_phase("dispatch")
            add_oldest()
        if on_batch is not None:
            on_phase("callbacks")
            on_batch(add_queued)
        stopped = stops.after_step(should_stop(), may_stop=may_stop()) if should_stop is not None else 0
        if stopped:
            break
        on_phase("data")
    if not num_batches and not queued:
        raise TrainerError(
            f"{operation}: got no batch; expected one or more. A generator is empty when it is read a second time: "
            "pass a list or a loader."
        )
    # The sums know nothing of the last update: its seconds count, and its errors belong to this pass.
    on_phase("devices")
    _checked(operation, queued, mx.nd.waitall)
    while queued:
        add_oldest()
    progress = report(sums.read_all)
    on_phase("")
    return progress


@contextmanager
def _naming(operation: str, step: int, advice: str) -> Iterator[None]:
    """Name the step in what MXNet raises at once."""
    try:
        yield
    except (StepError, mx.MXNetError) as error:
        told = _told(error) + ("" if isinstance(error, StepError) else advice)
        raise StepError(f"{operation}: got an error at step {step}: {told}") from (error.__cause__ or error)


def _owning(batch: Batch, label: Any) -> Batch:
    """Return a batch with its labels copied where they may share the memory of what the iterator gave.

    Metrics look at them when later batches are on their way already, and MXNet's own iterators write each batch into the arrays
    of the one before.
    """
    shared = {leaf.context for _, leaf in leaves(label) if is_device_array(leaf)}
    if not shared:
        return batch

    def own(_: str, leaf: Array) -> Array:
        return leaf.copy() if is_device_array(leaf) and leaf.context in shared else leaf

    return replace(batch, labels=[map_leaves(own, shard) for shard in batch.labels])


def _wait(batch: Batch) -> None:
    for array in batch.losses or [output for output in batch.outputs if is_device_array(output)]:
        array.wait_to_read()


def _checked(operation: str, queued: Sequence[Tuple[int, Any]], read: Callable[[], Any]) -> Any:
    """Return `read()`; an error that surfaces there belongs to the oldest step that is still queued, or a later one."""
    try:
        return read()
    except mx.MXNetError as error:
        step = queued[0][0] if queued else 0
        with suppress(mx.MXNetError):  # the engine keeps an error for each array that it has spoilt
            mx.nd.waitall()
        expected = "devices that work"
        if "Unknown type enum" in str(error):  # MXNet's number of a dtype that an operator was not written for
            expected = "dtypes that every operator takes, which bool is not for most: cast it with astype('float32')"
        raise StepError(
            f"{operation}: got an error of a device around step {step}: {_told(error)}; expected {expected}. Weights may "
            "be half updated: load the last checkpoint. MXNET_ENGINE_TYPE=NaiveEngine names the operation."
        ) from error


def _told(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _raise_non_finite(operation: str, unread: List[Tuple[int, List[Array]]]) -> None:
    for step, shards in unread:
        for shard, losses in enumerate(shards):
            total = float(losses.sum().asnumpy().sum())
            if not math.isfinite(total):
                raise NonFiniteLossError(
                    f"{operation}: got a loss of {total} at step {step} on {losses.context} (shard {shard}); expected "
                    "finite numbers. "
                    "Lower the learning rate, clip the gradient (clip_norm), and look at this batch."
                )
    raise NonFiniteLossError(
        f"{operation}: got a sum of losses that is not finite; expected finite numbers. Lower the learning rate."
    )

"""One pass over the data, for training and evaluation."""

from __future__ import annotations

import math
import time
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Deque, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

import mxnet as mx

from ..checks import advice_for, reason_of
from ..data.iterators import batches_of, no_batch, own_pair
from ..data_parallel.step import Batch
from ..errors import DataError, NonFiniteLossError, StepError, last_line
from ..nested import Array, is_device_array
from .metric_sums import MetricSums
from .stop_signals import StopVote

REPORT_S, REPORT_BATCHES = 0.5, 256


@dataclass(frozen=True)
class EpochProgress:
    """The progress of a pass.

    Attributes
    ----------
    means : dict of str to float
        Each metric, and `loss`, over the examples so far.
    num_batches, num_examples : int
        Finished so far.
    seconds : float
        Since the pass began.
    stopped : int
        The signal that stopped the pass early; 0 for none.
    """

    means: Dict[str, float] = field(default_factory=dict)
    num_batches: int = 0
    num_examples: int = 0
    seconds: float = 0.0
    stopped: int = 0

    @property
    def examples_per_s(self) -> float:
        """Examples per second of wall-clock time."""
        return self.num_examples / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class EpochOptions:
    """How a pass runs and what it reports.

    Attributes
    ----------
    operation : str
        The name of this pass in error messages.
    first_step : int
        The number of the first batch, for error messages.
    before : EpochProgress
        The part of this pass that was finished before it was resumed.
    max_inflight : int
        Batches that may be queued on the devices. More batches hide longer pauses of the host. They also take more memory and
        delay reports and errors.
    check_finite : bool
        Raise when the loss is NaN or infinite.
    on_report : callable (EpochProgress)
        Called every half second or 256 batches, and at the end.
    on_batch : callable () -> None
        Called after each batch has been queued.
    stop_signal : callable () -> int, optional
        Returns the signal that asked this process to stop, 0 for none. Processes agree on the batch; see `StopVote`.
    may_stop : callable () -> bool
        Returns whether the pass can stop after this batch; the same in all processes.
    on_phase : callable (str)
        Called when a phase begins: `data`, waiting for the next batch; `dispatch`, queueing it, of which a training step names
        `split`, `forward`, `backward` and `update`; `devices`, waiting for an earlier batch, for the sums or for other processes;
        `callbacks`; and "" at the end.
    """

    operation: str
    first_step: int = 1
    before: EpochProgress = EpochProgress()
    max_inflight: int = 2
    check_finite: bool = False
    on_report: Callable[[EpochProgress], None] = lambda progress: None
    on_batch: Callable[[], None] = lambda: None
    stop_signal: Optional[Callable[[], int]] = None
    may_stop: Callable[[], bool] = lambda: True
    on_phase: Callable[[str], None] = lambda phase: None


class BatchLoop:
    """One pass over the data: queues batches, waits for the oldest and adds up its metrics.

    ```
    batch ─► run_batch: queued, not waited for ─► with more than `max_inflight` queued, the oldest is waited for
                 on_report, finite? ◄── read, every half second ◄── its metrics are added up on the devices ◄──┘
    ```

    Only finished batches are added up. The devices work on later batches while the host reads the sums.

    Parameters
    ----------
    run_batch : callable (X, y) -> Batch
        Trains or evaluates, without waiting.
    sums : MetricSums
        The metrics. They may hold the first part of an epoch.
    options : EpochOptions
    """

    def __init__(self, run_batch: Callable[[Any, Any], Batch], sums: MetricSums, options: EpochOptions) -> None:
        self._run_batch, self._sums, self._options = run_batch, sums, options
        self._queued: Deque[Tuple[int, Batch]] = deque()
        self._last_added = 0  # the step up to which batches are in the sums
        self._unreported: List[Tuple[int, List[Array]]] = []  # losses since the last report, to find the step that went wrong
        self._num_batches, self._num_examples = options.before.num_batches, options.before.num_examples  # finished
        self._started = self._reported = time.perf_counter()

    def run(self, data_iter: Iterable[Any]) -> EpochProgress:
        """Run every batch, wait for the devices, and return the result of the pass.

        Parameters
        ----------
        data_iter : iterable of (X, y)

        Raises
        ------
        TrainerError
            There is no batch, or one is not a pair.
        StepError
            A device failed; the message names the step.
        NonFiniteLossError
            The message names the step and the device.
        """
        options, vote, stopped = self._options, StopVote(), 0
        options.on_phase("data")
        for step, item in enumerate(batches_of(data_iter), options.first_step):
            options.on_phase("dispatch")
            with naming_step(options.operation, f"step {step}", _WRONG_DATA):
                batch = self._run_batch(*own_pair(item, options.operation, data_iter))  # metrics read it later
            self._queued.append((step, batch))
            if len(self._queued) > options.max_inflight:
                options.on_phase("devices")
                self._checked(self._queued, self._wait_for_oldest)
                options.on_phase("dispatch")
                self._finish_oldest()
            options.on_phase("callbacks")
            options.on_batch()
            if options.stop_signal is not None:
                options.on_phase("devices")  # processes wait for each other here
                stopped = vote.after_step(options.stop_signal(), may_stop=options.may_stop())
            if stopped:
                break
            options.on_phase("data")
        return replace(self._finish(), stopped=stopped)

    def add_queued(self) -> Tuple[int, float]:
        """Add the queued batches to the sums, too, without waiting; return the examples and seconds of the pass so far."""
        for step, batch in self._queued:
            self._add(step, batch)
        return self._num_examples + sum(batch.num_examples for _, batch in self._queued), self._seconds()

    def leave_out(self, seconds: float) -> None:
        """Do not count this time, in which an evaluation ran."""
        self._started += seconds

    def _finish(self) -> EpochProgress:
        options = self._options
        if not self._num_batches and not self._queued:
            raise no_batch(options.operation)
        # The sums do not depend on the last update. Waiting for it here counts its seconds and raises its errors in this pass.
        options.on_phase("devices")
        self._checked(self._queued, mx.nd.waitall)
        while self._queued:
            self._finish_oldest()
        progress = self._report(self._sums.read_all)
        options.on_phase("")
        return progress

    def _wait_for_oldest(self) -> None:
        _, batch = self._queued[0]
        for array in batch.losses or [output for output in batch.outputs if is_device_array(output)]:
            array.wait_to_read()

    def _finish_oldest(self) -> None:
        """Take the oldest batch out of the queue and add it up. Report if it is time to."""
        step, batch = self._queued[0]
        with naming_step(self._options.operation, f"step {step}"):
            for check in batch.checks:
                check()
        self._add(step, batch)
        self._queued.popleft()
        self._unreported.append((step, batch.losses))
        self._num_batches += 1
        self._num_examples += batch.num_examples
        if time.perf_counter() - self._reported > REPORT_S or len(self._unreported) >= REPORT_BATCHES:
            self._report(self._sums.read)
            self._reported = time.perf_counter()

    def _add(self, step: int, batch: Batch) -> None:
        """Add a batch to the sums, once."""
        if step <= self._last_added:
            return
        with naming_step(self._options.operation, f"step {step}", _WRONG_METRICS):
            self._sums.add_batch(batch)
        self._last_added = step

    def _report(self, read: Callable[[], Dict[str, float]]) -> EpochProgress:
        """Read the sums, check the loss, and pass the progress on."""
        options = self._options
        options.on_phase("devices")
        means = self._checked(self._unreported or self._queued, read)
        if options.check_finite and not math.isfinite(means.get("loss", 0.0)):
            queued = [(step, batch.losses) for step, batch in self._queued]
            _raise_non_finite(options.operation, [*self._unreported, *queued])
        self._unreported.clear()
        progress = EpochProgress(means, self._num_batches, self._num_examples, self._seconds())
        options.on_phase("callbacks")
        options.on_report(progress)
        return progress

    def _seconds(self) -> float:
        return self._options.before.seconds + time.perf_counter() - self._started

    def _checked(self, steps: Sequence[Tuple[int, Any]], read: Callable[[], Any]) -> Any:
        """Return `read()`. An error that surfaces there comes from the oldest of these steps, or a later one."""
        try:
            return read()
        except mx.MXNetError as error:
            where = f"a device around step {steps[0][0] if steps else 0}"
            raise device_error(self._options.operation, where, error, "Weights may be half updated: reload them. ") from error


_WRONG_DATA = "; expected data that the network and the loss take. Try them on one batch."
_WRONG_METRICS = "; expected data that the metrics take. Try them on one batch."


@contextmanager
def naming_step(operation: str, where: str, advice: str = "") -> Iterator[None]:
    """Name the step in an error that is raised immediately."""
    try:
        yield
    except (StepError, DataError, mx.MXNetError) as error:
        message = last_line(error) + (advice if isinstance(error, mx.MXNetError) else "")
        if message.startswith(f"{operation}: "):
            message = message[len(operation) + 2 :]
        kind = DataError if isinstance(error, DataError) else StepError
        raise kind(f"{operation}: got an error at {where}: {message}") from (error.__cause__ or error)


def device_error(operation: str, where: str, error: mx.MXNetError, advice: str = "") -> StepError:
    """Return the error of a device, having waited for all others."""
    with suppress(mx.MXNetError):  # the engine keeps an error for each array that depends on the failed operation
        mx.nd.waitall()
    known = advice_for(error, "MXNET_ENGINE_TYPE=NaiveEngine names the operation.")
    return StepError(f"{operation}: got an error of {where}: {reason_of(error)}; expected devices that work. {advice}{known}")


def _raise_non_finite(operation: str, losses: Sequence[Tuple[int, List[Array]]]) -> None:
    """Raise an error that names the first step and device with a loss that is not finite."""
    found = "a sum of losses that is not finite"
    for step, i, shard in [(step, i, shard) for step, shards in losses for i, shard in enumerate(shards)]:
        total = float(shard.sum().asnumpy().sum())
        if not math.isfinite(total):
            found = f"a loss of {total} at step {step} on {shard.context} (shard {i})"
            break
    raise NonFiniteLossError(
        f"{operation}: got {found}; expected finite numbers. Lower the learning rate, clip the gradient (clip_norm), and check "
        "this batch."
    )

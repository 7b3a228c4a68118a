"""Predict: a network's output for every example, computed on all its devices, in the order of the examples."""

from __future__ import annotations

import sys
import time
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Deque, Generator, Iterable, Iterator, List, Optional, Sequence, Sized, Tuple

import mxnet as mx
from mxnet import Context, autograd, gluon

from ..checks import flag, reason_of, whole_number
from ..data_parallel.batchnorm import sync_running_stats
from ..data_parallel.compiled import check_mode, passes_of
from ..data_parallel.iterators import as_pair, batches_of, check_iterable, features_of, no_batch
from ..data_parallel.passes import Passes
from ..data_parallel.prefetch import NUM_HELD, Buffers
from ..data_parallel.sharding import gather, plan_shards, split_and_load
from ..data_parallel.step import check_network, run_eval_batch
from ..devices.select import check_contexts
from ..distributed import without_group
from ..errors import ShardError, StepError, TrainerError, last_line
from ..nested import Array, is_device_array, leaves, map_leaves
from ..trainer.parameters import devices_of
from .evaluate import MAX_INFLIGHT

Output = Tuple[Context, Any]  # of one shard: the device that computes it, and nested arrays

SHOW_AFTER_S = 2.0
SHOW_EVERY_S = 5.0  # without a terminal


def predict(
    net: gluon.Block,
    data_iter: Iterable[Any],
    *,
    pairs: bool = False,
    batch_axis: Any = 0,
    output_axis: Any = None,
    weights: Optional[Sequence[float]] = None,
    max_inflight: int = MAX_INFLIGHT,
    compiled: str = "auto",
    ctx: Optional[Context] = None,
    progress: bool = False,
) -> Any:
    """Return a network's output for every example of a data set, in their order, computed on all its devices.

    The result is assembled in the host's memory as NumPy arrays, which takes twice its size for a moment. If the outputs do not
    fit, use `predict_batches`.

    Parameters
    ----------
    net, data_iter, pairs, batch_axis, output_axis, weights, max_inflight, compiled
        As for `predict_batches`.
    ctx : mxnet.Context, optional
        Return MXNet arrays of the current mode on this device instead.
    progress : bool
        Show the progress after two seconds: a bar on a terminal, a line every five seconds elsewhere.

    Returns
    -------
    numpy.ndarray, shape (N, ...), or nested arrays of the form of the network's output
        N being the examples of all batches.

    Raises
    ------
    TrainerError, ShardError, StepError
        As for `predict_batches`.
    ShardError
        The outputs of two batches differ in more than their number of examples.

    Examples
    --------
    >>> net = gluon.nn.Dense(1, use_bias=False, in_units=1)
    >>> net.initialize(mx.init.Constant(2), ctx=[mx.cpu(0), mx.cpu(1)])
    >>> import numpy as np
    >>> predict(net, [np.array([[1.0], [2.0], [3.0]]), np.array([[4.0]])]).tolist()
    [[2.0], [4.0], [6.0], [8.0]]
    """
    if ctx is not None:
        check_contexts([ctx], "predict")
    flag("predict", "progress", progress)
    outputs: Iterator[Any] = predict_batches(
        net,
        data_iter,
        pairs=pairs,
        batch_axis=batch_axis,
        output_axis=output_axis,
        weights=weights,
        max_inflight=max_inflight,
        compiled=compiled,
    )
    if progress:
        outputs = _shown(outputs, len(data_iter) if isinstance(data_iter, Sized) else None)
    batches = list(outputs)
    try:
        return gather(batches, ctx, _output_axis(batch_axis, output_axis))
    except ShardError as error:
        raise ShardError(
            f"predict: got outputs of batches that do not fit together ({error}); expected equal shapes except for the number "
            "of examples. Use predict_batches."
        ) from error


def predict_batches(
    net: gluon.Block,
    data_iter: Iterable[Any],
    *,
    pairs: bool = False,
    batch_axis: Any = 0,
    output_axis: Any = None,
    weights: Optional[Sequence[float]] = None,
    max_inflight: int = MAX_INFLIGHT,
    compiled: str = "auto",
) -> Generator[Any, None, None]:
    """Yield a network's output for each batch, as NumPy arrays, in order, while its devices compute the next ones.

    ```
    batch ─► split ─► forward on each device: queued, not waited for ─► with more than `max_inflight` queued,
             your loop ◄── shards put together, in their order ◄── the oldest one's are read ◄──┘
    ```

    It records nothing, even inside `autograd.record`, and keeps no activations. A device holds the inputs and outputs of the
    queued batches, the host the outputs of one. BatchNorm's running statistics are first averaged over the devices, as in
    `evaluate`, so that all devices predict the same.

    Parameters
    ----------
    net : gluon.Block
        Initialised on one or more devices. Called once per shard, with the shard of `X` as its only argument.
    data_iter : iterable of X
        Arrays, or nested data, shapes (B, ...); a batch may have fewer examples than there are devices. It is read up to
        `max_inflight` batches ahead.
    pairs : bool
        The items are (X, y); y is ignored.
    batch_axis : int, or nested ints of the form of X
    output_axis : int, or nested ints of the form of the output, optional
        The axis of the examples in the outputs; `batch_axis` by default, or 0 if that is not a single number.
    weights : sequence of float, optional
        Split in these proportions; see `plan_shards`.
    max_inflight : int
        Batches that may be queued on the devices.
    compiled : "auto", "on" or "off"
        Whether the passes run as compiled graphs; see `fit`.

    Yields
    ------
    numpy.ndarray, shape (B, ...), or nested arrays of the form of the network's output

    Raises
    ------
    TrainerError
        There is no batch, an argument is invalid, or the network is not initialised or returns something other than arrays.
    ShardError
        A batch cannot be split this way, or the outputs do not hold one item per example.
    StepError
        The network rejects a batch, or a device failed; the message names the batch, from 1, and the device.

    Examples
    --------
    >>> net = gluon.nn.Dense(1, use_bias=False, in_units=1)
    >>> net.initialize(mx.init.Constant(2), ctx=[mx.cpu(0), mx.cpu(1)])
    >>> import numpy as np
    >>> for outputs in predict_batches(net, [(np.ones((3, 1)), np.zeros(3)), (np.ones((1, 1)), np.zeros(1))], pairs=True):
    ...     print(outputs.tolist())
    [[2.0], [2.0], [2.0]]
    [[2.0]]
    """
    check_network("predict", net)
    flag("predict", "pairs", pairs)
    max_inflight = whole_number("predict", "max_inflight", max_inflight, advice="8 is usual.")
    check_iterable("predict", "data_iter", data_iter, pairs=False)
    devices = _devices(net)
    plan_shards(1, len(devices), weights)  # raises on weights for other devices
    passes = passes_of(check_mode("predict", compiled))(net, None, trains=False)
    forward = _Forward(net, devices, batch_axis, _output_axis(batch_axis, output_axis), weights, passes)
    return _run(forward, data_iter, pairs, max_inflight)


@dataclass(frozen=True)
class _Forward:
    """A network, its devices, and where the examples are."""

    net: gluon.Block
    devices: List[Context]
    batch_axis: Any
    output_axis: Any
    weights: Optional[Sequence[float]]
    passes: Passes

    def queue(self, X: Any, number: int) -> List[Output]:
        """Return one batch's outputs, one item per shard, in memory that is not overwritten before they are read."""
        # An iterator may write its next batch into the arrays of this one, and a network may return its input.
        shared = any(is_device_array(leaf) for leaf in _leaves(X, number))
        held: List[Tuple[Context, int]] = []

        def split(X: Any, _: Any, devices: Sequence[Context]) -> Tuple[List[Any], List[Any]]:
            shards = split_and_load(X, devices, self.batch_axis, even_split=False, weights=self.weights)
            held.extend(_held(shard, self.batch_axis) for shard in shards)
            return shards, [None] * len(shards)

        try:
            with without_group():  # every process of a job has all outputs
                outputs = run_eval_batch(self.passes, self.net, X, None, self.devices, None, split).outputs
        except (StepError, mx.MXNetError) as error:
            raise StepError(f"predict: got an error at batch {number}: {error}") from (error.__cause__ or error)
        for output, (_, size) in zip(outputs, held):
            self._check(output, size, number)
        with autograd.pause():
            kept = [map_leaves(lambda _, leaf: _kept(leaf, shared), output) for output in outputs]
        return [(context, output) for (context, _), output in zip(held, kept)]

    def _check(self, output: Any, size: int, number: int) -> None:
        def check(path: str, leaf: Array, axis: Any) -> None:
            if not is_device_array(leaf):
                raise TrainerError(
                    f"predict: got {path} of type {type(leaf).__name__} at batch {number}; expected MXNet arrays. "
                    "Return what layers return."
                )
            if not isinstance(axis, int) or not -leaf.ndim <= axis < leaf.ndim or leaf.shape[axis] != size:
                raise ShardError(
                    f"predict: got {path} of shape {leaf.shape} at batch {number}, for {size} examples along axis {axis}; "
                    "expected one item per example. Pass the axis of the examples as output_axis."
                )

        map_leaves(check, output, self.output_axis, path="output")


def _run(forward: _Forward, data_iter: Iterable[Any], pairs: bool, max_inflight: int) -> Generator[Any, None, None]:
    sync_running_stats(forward.net)
    buffers = Buffers(max_inflight + NUM_HELD)
    queued: Deque[Tuple[int, List[Output]]] = deque()
    for number, item in enumerate(batches_of(data_iter), 1):
        X = as_pair(item, "predict")[0] if pairs and not isinstance(item, mx.io.DataBatch) else features_of(item)
        with _naming_pairs(X, pairs), buffers.used():
            queued.append((number, forward.queue(X, number)))
        if len(queued) > max_inflight:
            yield _read(*queued.popleft(), forward.output_axis)
    if not queued:  # after a batch, at least one stays in the queue
        raise no_batch("predict")
    while queued:
        yield _read(*queued.popleft(), forward.output_axis)


@contextmanager
def _naming_pairs(X: Any, pairs: bool) -> Iterator[None]:
    """Advise `pairs=True` if a network rejects a batch that may be a pair."""
    try:
        yield
    except (StepError, AssertionError, AttributeError) as error:  # what Gluon's layers raise for a tuple
        cause = error.__cause__ if isinstance(error, StepError) else error
        is_of_layers = isinstance(cause, (AssertionError, AttributeError)) or type(cause) is ValueError  # that of deferred shapes
        if pairs or not isinstance(X, (list, tuple)) or len(X) != 2 or not is_of_layers:
            raise
        raise TrainerError(
            f"predict: got a {type(X).__name__} of 2 as a batch, which the network does not take ({reason_of(cause or error)}); "
            "expected its one argument. Pass pairs=True if the items are (X, y)."
        ) from error


def _leaves(X: Any, number: int) -> List[Array]:
    try:
        return [leaf for _, leaf in leaves(X)]
    except TypeError as error:
        raise TrainerError(
            f"predict: got something that is not an array at batch {number} ({str(error).split(';')[0]}); expected an array, or "
            "nested data. Take it out of the batch."
        ) from None


def _kept(leaf: Array, shared: bool) -> Array:
    if leaf.context.device_type == "gpu":
        return leaf.as_in_context(mx.cpu())  # queued behind the forward pass, so that the host can read it later
    return leaf.copy() if shared else leaf


def _read(number: int, outputs: List[Output], output_axis: Any) -> Any:
    """Return one batch's outputs as NumPy arrays, having waited for them."""
    shards = [_to_numpy(number, context, output) for context, output in outputs]
    return shards[0] if len(shards) == 1 else gather(shards, batch_axis=output_axis)


def _to_numpy(number: int, context: Context, output: Any) -> Any:
    try:
        return map_leaves(lambda _, leaf: leaf.asnumpy(), output)
    except mx.MXNetError as error:
        with suppress(mx.MXNetError):  # the engine keeps an error for each array that depends on the failed operation
            mx.nd.waitall()
        raise StepError(
            f"predict: got an error of {context} at batch {number}: {last_line(error)}; expected devices that work. "
            "MXNET_ENGINE_TYPE=NaiveEngine names the operation."
        ) from error


def _held(shard: Any, batch_axis: Any) -> Tuple[Context, int]:
    """Return the device of a shard, and its number of examples."""
    found: List[Tuple[Context, int]] = []
    map_leaves(lambda _, leaf, axis: found.append((leaf.context, leaf.shape[axis])), shard, batch_axis)
    return found[0]


def _output_axis(batch_axis: Any, output_axis: Any) -> Any:
    if output_axis is not None:
        return output_axis
    return batch_axis if isinstance(batch_axis, int) else 0


def _devices(net: gluon.Block) -> List[Context]:
    try:
        return devices_of(net)
    except TrainerError:
        raise TrainerError(
            "predict: got a network that is on no device; expected initialised parameters. Call net.initialize(ctx=ctx) first."
        ) from None


def _shown(batches: Iterable[Any], total: Optional[int]) -> Iterator[Any]:
    """Yield the batches, and show the progress once that takes long."""
    began = time.perf_counter()
    show_at = began + SHOW_AFTER_S
    bar: Any = None
    try:
        for number, batch in enumerate(batches, 1):
            now = time.perf_counter()
            if now >= show_at and sys.stdout.isatty():
                bar = bar or _started_bar(total)
                bar.update(bar.task_ids[0], completed=number)
            elif now >= show_at:
                print(f"predict  batch {number}/{total or '?'}  {number / (now - began):.1f} batches/s", flush=True)
                show_at = now + SHOW_EVERY_S
            yield batch
    finally:
        if bar is not None:
            bar.stop()


def _started_bar(total: Optional[int]) -> Any:
    from rich import progress  # only here: importing it takes longer than most batches

    columns = (progress.TextColumn("predict"), progress.BarColumn(bar_width=10), progress.MofNCompleteColumn())
    bar = progress.Progress(*columns, progress.TimeRemainingColumn())
    bar.add_task("", total=total)
    bar.start()
    return bar

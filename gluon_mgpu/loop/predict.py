"""Predict: a network's output for every example, computed on all its devices, in the order of the examples."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any, Deque, Dict, Generator, Iterable, List, Sized, Tuple

import mxnet as mx
from mxnet import Context, autograd, gluon

from ..checks import flag, reason_of, whole_number
from ..data.iterators import as_pair, batches_of, check_iterable, features_of, no_batch
from ..data_parallel.compiled import make_passes
from ..data_parallel.sharding import Split, gather
from ..data_parallel.step import check_network
from ..distributed import group, without_group
from ..errors import ShardError, StepError, TrainerError
from ..nested import Array, is_device_array, leaves, map_leaves
from ..trainer.parameters import average_replicas, devices_of
from ..trainer.replica_check import ReplicaComparison
from .batch_loop import device_error, naming_step
from .evaluate import EvalStep

Output = Tuple[Context, Any]  # of one shard: the device that computes it, and nested arrays


def predict(
    net: gluon.Block,
    data_iter: Iterable[Any],
    *,
    pairs: bool = False,
    batch_axis: Any = 0,
    output_axis: Any = None,
    max_inflight: int = 8,
    compiled: str = "auto",
) -> Any:
    """Return a network's output for every example of a data set, in their order, computed on all its devices.

    The result is assembled in the host's memory as NumPy arrays, which takes twice its size for a moment. If the outputs do not
    fit, use `predict_batches`.

    In a job, each process returns all outputs. Running statistics that a pass without a step has moved stay different there
    until `evaluate` or a step.

    Parameters
    ----------
    net, data_iter, pairs, batch_axis, output_axis, max_inflight, compiled
        As for `predict_batches`.

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
    options: Dict[str, Any] = {"batch_axis": batch_axis, "output_axis": output_axis, "max_inflight": max_inflight}
    batches = list(predict_batches(net, data_iter, pairs=pairs, compiled=compiled, **options))
    try:
        return gather(batches, batch_axis=_output_axis(batch_axis, output_axis))
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
    max_inflight: int = 8,
    compiled: str = "auto",
) -> Generator[Any, None, None]:
    """Yield a network's output for each batch, as NumPy arrays, in order, while its devices compute the next ones.

    ```
    batch ─► split ─► forward on each device: queued, not waited for ─► with more than `max_inflight` queued,
             your loop ◄── shards put together, in their order ◄── the oldest one's are read ◄──┘
    ```

    It records nothing, even inside `autograd.record`, and keeps no activations. A device holds the inputs and outputs of the
    queued batches, the host the outputs of one.

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
    max_inflight : int
        Batches that may be queued on the devices.
    compiled : "auto", "on" or "off"
        Whether the passes run as compiled graphs; see `fit`. A list of fewer than 4 batches makes no graph unless it is `"on"`.

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
    check_iterable("predict", "data_iter", data_iter, pairs=False, each_once=True)
    devices = devices_of(net, "predict")
    if compiled == "auto" and isinstance(data_iter, Sized) and len(data_iter) < 4:
        compiled = "off"  # MXNet never frees the text of a graph, and a server calls this for each request
    passes = make_passes("predict", net, None, compiled, kept={})
    step = EvalStep("predict", None, devices, Split((batch_axis, 0)), passes)
    return _run(net, step, data_iter, pairs=pairs, output_axis=_output_axis(batch_axis, output_axis), max_inflight=max_inflight)


def _run(
    net: gluon.Block, step: EvalStep, data_iter: Iterable[Any], *, pairs: bool, output_axis: Any, max_inflight: int
) -> Generator[Any, None, None]:
    if group() is None:  # in a job, one process may predict alone
        average_replicas(net)
    comparison = ReplicaComparison("predict", net)
    queued: Deque[Tuple[int, List[Output]]] = deque()
    for number, item in enumerate(batches_of(data_iter), 1):
        X = as_pair(item, "predict")[0] if pairs and not isinstance(item, mx.io.DataBatch) else features_of(item)
        try:
            queued.append((number, _queue(step, X, number, output_axis)))
        except (StepError, AssertionError, AttributeError) as error:  # what Gluon's layers raise for a tuple
            cause = error.__cause__ or error
            if pairs or not isinstance(X, (list, tuple)) or len(X) != 2 or isinstance(cause, mx.MXNetError):
                raise
            raise TrainerError(
                f"predict: got a {type(X).__name__} of 2 as a batch, which the network does not take ({reason_of(cause)}); "
                "expected its one argument. Pass pairs=True if the items are (X, y)."
            ) from error
        if len(queued) > max_inflight:
            comparison.check()
            yield _read(*queued.popleft(), output_axis)
    if not queued:  # after a batch, at least one stays in the queue
        raise no_batch("predict")
    comparison.check()
    while queued:
        yield _read(*queued.popleft(), output_axis)


def _queue(step: EvalStep, X: Any, number: int, output_axis: Any) -> List[Output]:
    """Return one batch's outputs, one item per shard."""
    # An iterator may write its next batch into the arrays of this one, and a network may return its input.
    try:
        shared = any(is_device_array(leaf) for _, leaf in leaves(X))
    except TypeError as error:
        raise TrainerError(f"predict: got no array at batch {number} ({error}); expected arrays.") from None
    with naming_step("predict", f"batch {number}"), without_group():  # every process of a job has all outputs
        outputs = step(X, None).outputs
    found = []
    with autograd.pause():
        for output, (begin, end, context) in zip(outputs, step.ranges):
            keep = partial(_kept, size=end - begin, number=number, shared=shared)
            found.append((context, map_leaves(keep, output, output_axis, path="output")))
    return found


def _kept(path: str, leaf: Array, axis: Any, *, size: int, number: int, shared: bool) -> Array:
    """Return an output, checked, in memory that is not overwritten before it is read."""
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
    if leaf.context.device_type == "gpu":
        return leaf.as_in_context(mx.cpu())  # queued behind the forward pass, so that the host can read it later
    return leaf.copy() if shared else leaf


def _read(number: int, outputs: List[Output], output_axis: Any) -> Any:
    """Return one batch's outputs as NumPy arrays, having waited for them."""
    shards = []
    for context, output in outputs:
        try:
            shards.append(map_leaves(lambda _, leaf: leaf.asnumpy(), output))
        except mx.MXNetError as error:
            raise device_error("predict", f"{context} at batch {number}", error) from error
    return shards[0] if len(shards) == 1 else gather(shards, batch_axis=output_axis)


def _output_axis(batch_axis: Any, output_axis: Any) -> Any:
    return output_axis if output_axis is not None else batch_axis if isinstance(batch_axis, int) else 0

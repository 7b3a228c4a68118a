"""BatchNorm's running statistics for weights that no pass has trained with, such as averaged ones."""

from __future__ import annotations

from typing import Any, Iterable

import mxnet as mx
from mxnet import gluon

from ..data.iterators import as_pair, batches_of, check_iterable, no_batch
from ..data_parallel.passes import Passes
from ..data_parallel.plan import as_split
from ..data_parallel.sharding import SplitFunction, leaves_and_axes, split_batch
from ..data_parallel.step import check_network
from ..distributed import any_process, group, own_batches
from ..errors import TrainerError
from ..mxnet_internals.parameters import is_open
from ..nested import Array, is_device_array, is_float, leaves
from ..refusals import refusal
from ..trainer.backward import differentiate
from ..trainer.parameters import average_replicas, devices_of, spans_devices, trainers_of
from ..trainer.running_stats import RunningStats, is_running_stat, running_stats
from ..trainer.sums import make_sum


def update_bn(net: gluon.Block, data_iter: Iterable[Any], *, split_f: SplitFunction = split_batch) -> None:
    """Let BatchNorm's running statistics follow the weights that a network has now: passes in training mode, without updates.

    PyTorch's `torch.optim.swa_utils.update_bn`. MXNet's statistics move by the layer's momentum: with 0.9, after 50 batches the
    former statistics count for 0.5 %. A network without running statistics reads no data. In a job, all processes must call it;
    the devices are then averaged once, at the end, and otherwise after each batch.

    Parameters
    ----------
    net : gluon.Block
        Initialised on one or more devices.
    data_iter : iterable of (X, y)
        Shapes (B, ...): batches of training data, of the size used in training. With a trainer of `sharded_data`, those of this
        process.
    split_f : callable (X, y, devices) -> (list of shards, list of shards)

    Raises
    ------
    TrainerError
        Gradients were accumulated and not applied, the network spans devices, or an item is not a pair.

    Examples
    --------
    >>> import mxnet as mx
    >>> net = gluon.nn.BatchNorm(in_channels=1, momentum=0.5)
    >>> net.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
    >>> update_bn(net, [(mx.nd.array([[4.0], [8.0]]), mx.nd.zeros(2))] * 20)
    >>> [round(mean.asnumpy().item(), 3) for mean in net.running_mean.list_data()]
    [6.0, 6.0]
    """
    check_network("update_bn", net)
    check_iterable("update_bn", "data_iter", data_iter, each_once=True)
    axis = as_split("update_bn", split_f).batch_axis
    if spans_devices(net):
        raise refusal("update_bn", "Pipeline", "update_bn()")
    devices = devices_of(net, "update_bn")
    params, stats = net.collect_params().values(), running_stats(net)
    if not stats:
        if any(is_running_stat(param) and is_open(param) for param in params):
            raise TrainerError("update_bn: got an untrained network (unknown shapes); expected a trained one. Call it after fit.")
        return
    trainers = trainers_of(net)
    for trainer in trainers:
        trainer.steps.check_applied("update_bn")
    average_replicas(net)  # passes that no step has used count by their own examples
    passes = Passes(net, _zero, trains=True)
    moved = RunningStats(stats, make_sum("device"), devices)
    moved.begin()
    reads_own = any(trainer.steps.sharded_data for trainer in trainers)
    before = [(array, array.copy()) for param in stats for array in param.list_data()]
    item: Any = None
    try:
        for item in batches_of(data_iter):
            with own_batches(reads_own):
                Xs, ys = split_f(*as_pair(item, "update_bn"), devices)
            _, zeros = passes.forward("update_bn", Xs, ys)
            differentiate("update_bn", zeros)  # MXNet moves the statistics in it
            moved.count({first.context: first.shape[at] for X in zip(Xs, ys) for _, first, at in leaves_and_axes(X, axis)[:1]})
            if group() is None:  # processes may have other numbers of batches
                mx.nd.waitall()  # a static graph writes them without telling the engine
                moved.move([])
        if not any_process(item is not None):
            raise no_batch("update_bn")
        mx.nd.waitall()
        moved.move([])
    except BaseException:
        mx.nd.waitall()
        for array, former in before:
            former.copyto(array)
        raise
    finally:
        for trainer in trainers:
            trainer.discard()  # the zeros


def _zero(output: Any, label: Any) -> Array:
    """Return a loss whose gradient is 0 for all of an output's arrays."""
    return sum((leaf * 0).sum() for _, leaf in leaves(output) if is_device_array(leaf) and is_float(leaf))

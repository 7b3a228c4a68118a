"""BatchNorm over several devices: a layer that normalises with the statistics of the complete batch."""

from __future__ import annotations

from functools import partial
from typing import Any, List, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from ..checks import explaining, instance, one_of
from ..distributed import group
from ..errors import StepError, TrainerError
from ..mxnet_internals.blocks import BaseBatchNorm, batch_norm_options, close_shapes, graph_of, is_hybridized, set_hybridized
from ..mxnet_internals.parameters import is_open
from ..mxnet_internals.versions import SyncBatchNorm as GluonSyncBatchNorm
from ..mxnet_internals.versions import name_of, require_mxnet1
from ..refusals import refusal
from ..trainer.parameters import blocks_of, spans_devices
from .cudnn_batchnorm import would_move
from .lockstep import defer, exchange, is_in_lockstep, run_in_lockstep


class SyncBatchNorm(BaseBatchNorm):
    """A BatchNorm that trains with the mean and variance of the complete batch, over all its shards.

    `convert_sync_batchnorm` creates it. In prediction it is an ordinary BatchNorm.

    ```
    cpu(0)  x ─► count, mean, squares ─┐                                        ┌─► normalise ─► y
                                       ├─► mean and variance, on one device ────┤
    cpu(1)  x ─► count, mean, squares ─┘                                        └─► normalise ─► y
    ```

    All of it is recorded, so the gradient flows back the same way.
    """

    plain: type  # its class before
    was_made = False  # whether this process has had a synchronised layer

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:  # also of copies and of pickled layers
        SyncBatchNorm.was_made = True
        return super().__new__(cls)

    def forward(self, x: Any, *args: Any) -> Any:
        is_symbol = isinstance(x, mx.sym.Symbol)
        if is_symbol and is_hybridized(self):  # a graph would run each shard separately
            raise TrainerError(
                "SyncBatchNorm: got hybridize() after convert_sync_batchnorm(); expected hybridize() first. Call "
                "convert_sync_batchnorm(net) again; to export the network, call mgpu.export(net, path, sample) instead."
            )
        if is_symbol or not autograd.is_training() or batch_norm_options(self)["use_global_stats"]:
            return super().forward(x, *args)
        if not is_in_lockstep() and len(self.running_mean.list_ctx()) > 1:
            raise TrainerError(
                f"SyncBatchNorm: got a shard on {x.context} alone; expected all shards of a batch together. "
                "Use train_batch, or forward_shards(net, Xs) for net(x) of each."
            )
        y = self._normalise(x.as_nd_ndarray(), *(param.as_nd_ndarray() for param in self._params_on(x)))
        y = mx.nd.relu(y) if self.fuse_relu else y
        return y.as_np_ndarray() if mx.util.is_np_array() else y

    def _normalise(self, x: Any, gamma: Any, beta: Any) -> Any:
        options = batch_norm_options(self)
        joint = exchange(self, _shard_moments(x.astype(gamma.dtype, copy=False), options["axis"]))
        if joint.result is None:
            joint.result = _moments(joint.values)
            if would_move(self, x):
                defer(partial(self._move_stats, *(moment.detach() for moment in joint.result)))
        mean, variance = (moment.as_in_context(x.context) for moment in joint.result)
        inverse = mx.nd.rsqrt(variance + options["eps"])
        gamma = mx.nd.ones_like(gamma) if options["fix_gamma"] else gamma
        # MXNet's operator is fast but computes no gradient of the moments. These two factors do: their values are 1 and 0.
        scale = gamma * (inverse / inverse.detach())
        offset = beta + gamma * inverse.detach() * (mean.detach() - mean)
        options = {"axis": options["axis"], "eps": options["eps"], "fix_gamma": False, "use_global_stats": True}
        return mx.nd.BatchNorm(x, scale, offset, mean.detach(), variance.detach(), **options)

    def _move_stats(self, mean: Any, variance: Any) -> None:
        """Move the running statistics towards those of the batch, also on devices without data."""
        momentum = batch_norm_options(self)["momentum"]
        with autograd.pause():
            for param, moment in ((self.running_mean, mean), (self.running_var, variance)):
                for running in param.list_data():
                    array = running.as_nd_ndarray()
                    array[:] = momentum * array + (1 - momentum) * moment.as_in_context(array.context)

    def _params_on(self, x: Any) -> Tuple[Any, Any]:
        if is_open(self.gamma):
            close_shapes(self, x)
        return self.gamma.data(x.context), self.beta.data(x.context)


def set_batch_norm(net: gluon.Block, bn: str) -> gluon.Block:
    """Choose the statistics that a network's BatchNorm layers use on several devices, and return the network.

    - `local` normalises each shard with its own statistics.
    - `sync` normalises all shards with the statistics of the complete batch, as one device does.

    With both, each step of a `Trainer` moves the running statistics of all devices alike.

    Parameters
    ----------
    net : gluon.Block
        The complete network. The default is `local`.
    bn : "local" or "sync"
        For `sync` see `convert_sync_batchnorm`; `local` undoes it.

    Raises
    ------
    TrainerError
        `bn` is unknown, or a layer cannot be synchronised. Nothing was changed.

    Examples
    --------
    >>> net = set_batch_norm(gluon.nn.BatchNorm(), "sync")
    >>> type(net).__name__
    'SyncBatchNorm'
    """
    one_of("set_batch_norm", "bn", bn, ("local", "sync"), advice="'local' is usual; 'sync' equals one device.")
    return convert_sync_batchnorm(net) if bn == "sync" else revert_sync_batchnorm(net)


def convert_sync_batchnorm(net: gluon.Block) -> gluon.Block:
    """Let every BatchNorm of a network train with the statistics of the complete batch, and return the network.

    k devices then train like one, also with uneven shards and with devices that get no data. Only the class of the layers
    changes: parameters, running statistics and names in files stay. A layer with `use_global_stats=True` is not changed.

    Blocks that contain such a layer run without a graph. Other hybridized blocks keep their graphs. Convert again after
    `net.hybridize()`.

    Parameters
    ----------
    net : gluon.Block
        Initialised or not, hybridized or not. Changed in place.

    Raises
    ------
    TrainerError
        The network contains a BatchNorm with its own forward computation, or is a `Pipeline`. Nothing was changed.

    Examples
    --------
    >>> net = gluon.nn.HybridSequential()
    >>> net.add(gluon.nn.Dense(4, in_units=2), gluon.nn.BatchNorm(in_channels=4))
    >>> type(convert_sync_batchnorm(net)[1]).__name__
    'SyncBatchNorm'
    >>> type(revert_sync_batchnorm(net)[1]).__name__
    'BatchNorm'

    Source: the name is that of PyTorch's `nn.SyncBatchNorm.convert_sync_batchnorm`.
    """
    require_mxnet1("convert_sync_batchnorm")
    blocks = _blocks("convert_sync_batchnorm", net)
    if spans_devices(net):
        raise refusal("BatchNorm", "Pipeline", "synchronised BatchNorm")
    if group() is not None:
        raise refusal("BatchNorm", "several processes", "synchronised BatchNorm")
    for block in blocks:
        _check_convertible(block)
    for block in blocks:
        is_plain = isinstance(block, BaseBatchNorm) and not isinstance(block, SyncBatchNorm)
        if is_plain and not batch_norm_options(block)["use_global_stats"]:
            block.plain, block.__class__ = type(block), SyncBatchNorm
            SyncBatchNorm.was_made = True
    for block in blocks:
        if is_hybridized(block) and is_synchronised(block):
            block._was_active = True
            set_hybridized(block, False)
    return net


def revert_sync_batchnorm(net: gluon.Block) -> gluon.Block:
    """Undo `convert_sync_batchnorm`, and return the network.

    Blocks that were hybridized are hybridized again. `net.export` needs that; `save_parameters` does not.
    """
    for block in _blocks("revert_sync_batchnorm", net):
        if isinstance(block, SyncBatchNorm):
            block.__class__ = block.plain
            del block.plain
        if getattr(block, "_was_active", False):
            set_hybridized(block, True)
            del block._was_active
    return net


def is_synchronised(net: gluon.Block) -> bool:
    """Return whether a network has a layer that trains with the statistics of the complete batch: steps ask it."""
    return SyncBatchNorm.was_made and any(isinstance(block, SyncBatchNorm) for block in blocks_of(net))


def check_shards(operation: str, net: gluon.Block, num_shards: int) -> None:
    """Raise `StepError` if one of MXNet's layers would wait forever for devices that have no shard."""
    for block in blocks_of(net):
        options = batch_norm_options(block) if isinstance(block, GluonSyncBatchNorm) else {"use_global_stats": True}
        if not options["use_global_stats"] and options["ndev"] > num_shards:
            raise StepError(
                f"{operation}: got a batch for {num_shards} of the {options['ndev']} devices that {name_of(block)} waits for; "
                "expected one example for each. Leave the batch out, or use nn.BatchNorm and set_batch_norm(net, 'sync')."
            )


def forward_shards(net: gluon.Block, Xs: Sequence[Any]) -> List[Any]:
    """Return the network's output for each shard: `[net(x) for x in Xs]`, also for networks with `SyncBatchNorm`.

    Parameters
    ----------
    net : gluon.Block
    Xs : list of array
        One shard per device, as `split_batch` returns them. Devices without data have none.

    Raises
    ------
    StepError
        The shards do not go through the same synchronised layers.

    Examples
    --------
    >>> net = convert_sync_batchnorm(gluon.nn.BatchNorm(in_channels=1))
    >>> net.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
    >>> with autograd.record():
    ...     outputs = forward_shards(net, [mx.nd.array([[1.0]], ctx=mx.cpu(0)), mx.nd.array([[5.0]], ctx=mx.cpu(1))])
    >>> [y.asnumpy().round(3).tolist() for y in outputs]
    [[[-1.0]], [[1.0]]]
    """
    _blocks("forward_shards", net)
    instance("forward_shards", "Xs", Xs, (list, tuple), "a list, one shard per device", advice="Pass those of split_batch.")
    expected = "shards that the network accepts"
    with explaining("forward_shards", "an error of the network", expected, advice="Try it with one example.", error=StepError):
        return run_shards(net, [partial(net, x) for x in Xs])


def run_shards(net: gluon.Block, tasks: Sequence[Any]) -> List[Any]:
    """Return the results of tasks that each send a shard through the network, in lockstep if the network is synchronised."""
    if autograd.is_training() and is_synchronised(net):
        return run_in_lockstep(tasks)
    return [task() for task in tasks]


def _shard_moments(x: Any, axis: int) -> Tuple[int, Any, Any]:
    """Return, for each channel of a shard, the count, the mean, and the sum of squared deviations."""
    axis %= x.ndim
    count = x.size // x.shape[axis]
    mean = _sum(x, axis) / count
    with autograd.pause():  # deviations sum to 0, so the mean gets no gradient through them
        around = mx.nd.broadcast_to(mean.reshape([-1 if i == axis else 1 for i in range(x.ndim)]), x.shape)
    return count, mean, _sum(mx.nd.square(x - around), axis)


def _sum(x: Any, axis: int) -> Any:
    """Return the sum of each channel. A product with ones is much faster than MXNet's sum, where it is possible."""
    before, channels, after = (int(np.prod(part)) for part in (x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]))
    if after > 1:
        ones = mx.nd.ones((1, after), ctx=x.context, dtype=x.dtype)
        x = mx.nd.FullyConnected(x.reshape((before * channels, after)), ones, num_hidden=1, no_bias=True)
    return mx.nd.sum(x.reshape((before, channels)), axis=0)


def _moments(shards: Sequence[Tuple[int, Any, Any]]) -> Tuple[Any, Any]:
    """Return mean and variance of the batch, on the first device.

    Source: Chan, Golub and LeVeque, "Algorithms for Computing the Sample Variance" (1983): groups of any sizes.
    """
    device = shards[0][1].context
    total = sum(count for count, _, _ in shards)
    counts = [count / total for count, _, _ in shards]
    means = [mean.as_in_context(device) for _, mean, _ in shards]
    squares = [square.as_in_context(device) for _, _, square in shards]
    mean = mx.nd.add_n(*(count * each for count, each in zip(counts, means)))
    between = mx.nd.add_n(*(count * mx.nd.square(each - mean) for count, each in zip(counts, means)))
    return mean, mx.nd.add_n(*squares) / total + between


def _blocks(operation: str, net: Any) -> List[gluon.Block]:
    """Return a network and all blocks in it."""
    instance(operation, "net", net, gluon.Block, "a gluon.Block", advice="Pass the network.")
    return blocks_of(net)


def _check_convertible(block: gluon.Block) -> None:
    kind = type(block)
    is_plain = isinstance(block, BaseBatchNorm) and not isinstance(block, SyncBatchNorm)
    if is_plain and (kind.hybrid_forward, kind.forward) != (BaseBatchNorm.hybrid_forward, BaseBatchNorm.forward):
        found, advice = f"{kind.__module__}.{kind.__name__}, which has its own forward computation", "Use nn.BatchNorm."
    elif isinstance(block, gluon.SymbolBlock) and graph_of(block).list_auxiliary_states():  # BatchNorm's, as a rule
        found, advice = f"{block.name}, a SymbolBlock with statistics in its graph", "Build it in Gluon, then load_parameters."
    else:
        return
    raise TrainerError(f"convert_sync_batchnorm: got {found}; expected layers of nn.BatchNorm. {advice}")

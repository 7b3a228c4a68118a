"""DataParallelModel and DataParallelCriterion: a network and its loss on several devices, called as on one."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any, Callable, List, Optional, Sequence, Tuple

import numpy as np
from mxnet import Context, autograd, gluon

from ..checks import check_function, flag, short
from ..devices.select import check_contexts
from ..errors import ShardError, TrainerError
from ..mxnet_internals.blocks import forget_graph
from ..mxnet_internals.versions import move_params
from ..nested import is_device_array
from ..trainer.parameters import check_initialised
from .batchnorm import check_shards, run_shards
from .passes import call
from .sharding import split_and_load

Call = Tuple[Tuple[Any, ...], Any]  # positional arguments, and those by name


class _Parallel:
    """A network or a loss whose calls split their arrays over the devices; other arguments go to each device."""

    def __init__(
        self, module: Any, ctx_list: Optional[Sequence[Context]] = None, sync: bool = False, *, batch_axis: int = 0
    ) -> None:
        self._name = type(self).__name__
        check_function(self._name, "module", module, advice="Pass a Block, or a function, itself.")
        self.module, self.ctx_list, self.sync = module, ctx_list, flag(self._name, "sync", sync)
        self._batch_axis = batch_axis
        if ctx_list is not None:
            check_contexts(ctx_list, self._name)
            self._move_params(module, list(ctx_list))

    def _move_params(self, module: Any, contexts: List[Context]) -> None:
        """Do nothing: a loss has no parameters."""

    def _split(self, data: Call, contexts: Sequence[Context]) -> List[Call]:
        """Return one call per shard: its part of each array, and all other values unchanged."""
        arrays = _arrays_of(data)
        if not arrays:
            raise ShardError(f"{self._name}: got no array among the arguments; expected at least one. Pass the batch.")
        shards = split_and_load(arrays, contexts, self._batch_axis, even_split=False)
        return [_map_arrays(partial(next, iter(shard)), data) for shard in shards]

    def _on_each(self, calls: Sequence[Call]) -> List[Any]:
        tasks = []
        for shard, (args, named) in enumerate(calls):
            arrays = _arrays_of((args, named))
            tasks.append(partial(call, self._name, "module", shard, arrays, None, self.module, *args, **named))
        return run_shards(self.module, tasks) if isinstance(self.module, gluon.Block) else [task() for task in tasks]

    def __repr__(self) -> str:
        return f"{self._name}(\n{self.module!r}\non {self.ctx_list})"


class DataParallelModel(_Parallel):
    """A network whose calls split their arguments over the devices and return one output per device.

    ```
    net(X):                split ──► X on device i ──► module ──► (output,) of device i ──┐   stays there
    criterion(outputs, y): split ──► y on device i ──────────────────────────────► loss of device i ──► autograd.backward
    ```

    It replaces GluonCV's class in a script: `outputs[i]` is a tuple, `sync` is its third argument. The caller's thread
    dispatches to all devices without waiting, so they work in parallel. Outputs and losses stay on their devices, so no device
    holds more than its part.

    Other attributes are those of the network: `net.collect_params()`, `net.hybridize()`, `net.save_parameters(...)`. Pass
    `net.module` to functions that expect a Block, such as `Trainer` and `evaluate`.

    Parameters
    ----------
    module : gluon.Block, or a callable with `collect_params`
        Initialised. Its parameters are moved to the devices if they are on others: create it before the Trainer.
    ctx_list : list of mxnet.Context, optional
        Without it, calls go to the network unchanged.
    sync : bool
        For compatibility with GluonCV. If the network has MXNet's SyncBatchNorm, a batch in training that leaves one of its
        devices without examples raises, because the others would wait for it indefinitely. Those of this package do not wait.
    batch_axis : int
        The axis of the examples in the arguments.

    Attributes
    ----------
    module, ctx_list, sync
        The arguments.

    Raises
    ------
    TrainerError
        `module` is not a network, or not initialised.
    DeviceError
        The devices are not different contexts.

    Examples
    --------
    >>> import mxnet as mx
    >>> net = gluon.nn.Dense(1, in_units=2)
    >>> net.initialize(mx.init.One())
    >>> ctx = [mx.cpu(0), mx.cpu(1)]
    >>> net, criterion = DataParallelModel(net, ctx), DataParallelCriterion(gluon.loss.L2Loss(), ctx)
    >>> trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.25})
    >>> with autograd.record():
    ...     losses = criterion(net(mx.nd.ones((4, 2))), mx.nd.zeros((4,)))
    >>> autograd.backward(losses)
    >>> trainer.step(4)
    >>> [(loss.context, loss.asnumpy().tolist()) for loss in losses]
    [(cpu(0), [2.0, 2.0]), (cpu(1), [2.0, 2.0])]
    >>> net.module.weight.data(mx.cpu(1)).asnumpy().tolist()
    [[0.5, 0.5]]

    Source: the signature and the form of the outputs are those of `gluoncv.utils.parallel.DataParallelModel`.
    """

    def _move_params(self, module: Any, contexts: List[Context]) -> None:
        """Move the network's parameters to these devices if they are on others."""
        if not hasattr(module, "collect_params"):
            raise TrainerError(
                f"DataParallelModel: got {type(module).__name__} as the network; expected a gluon.Block, or a callable with "
                "collect_params. Pass the network itself."
            )
        params = module.collect_params()
        if list(params):
            check_initialised("DataParallelModel", params)
        if all(param.list_ctx() == contexts for param in params.values()):
            return
        move_params(params, contexts)
        if isinstance(module, gluon.Block):  # a static graph would still write gradients into the old arrays
            module.apply(lambda block: forget_graph(block) if isinstance(block, gluon.HybridBlock) else None)

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the network's outputs: a tuple with a tuple for each device that got examples. It does not wait.

        Parameters
        ----------
        inputs, kwargs : array, or nested data
            Shapes (B, ...). Arrays are split; other values go to each device. With fewer examples than devices, the result
            contains only devices that got examples.

        Raises
        ------
        ShardError
            The arguments cannot be split.
        StepError
            The network does not accept them, and the message names the device; or they leave out one that it waits for.
        """
        if self.ctx_list is None:
            return self.module(*inputs, **kwargs)
        shards = self._split((inputs, kwargs), self.ctx_list)
        if len(shards) < len(self.ctx_list) and autograd.is_training():
            if isinstance(self.module, gluon.Block):
                check_shards("DataParallelModel", self.module, len(shards))
            elif self.sync:  # nobody knows its layers
                raise ShardError("DataParallelModel: got sync=True and an idle device; expected none. Leave out the batch.")
        return tuple(map(_as_tuple, self._on_each(shards)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "module":  # not set yet while this object is being copied
            raise AttributeError(f"DataParallelModel: got {name!r}; expected a public attribute. Use that of net.module.")
        return getattr(self.module, name)


class DataParallelCriterion(_Parallel):
    """A loss that is computed on each device, from the outputs of a `DataParallelModel` and its shard of the labels.

    Parameters
    ----------
    module : callable (outputs, ..., labels, ...) -> NDArray
        For example a Gluon loss.
    ctx_list : list of mxnet.Context, optional
        The model's. Without it, calls go to the loss unchanged.
    sync : bool
        For compatibility with GluonCV; a loss has nothing to synchronise.
    batch_axis : int
        The axis of the examples in the labels.

    Attributes
    ----------
    module, ctx_list, sync
        The arguments.

    Raises
    ------
    TrainerError
        The loss cannot be called.
    DeviceError
        The devices are not different contexts.

    Source: the signature and the form of the losses are those of `gluoncv.utils.parallel.DataParallelCriterion`.
    """

    def __call__(self, inputs: Any, *targets: Any, **kwargs: Any) -> Any:
        """Return the losses, a tuple with one for each device that got examples. It does not wait.

        Parameters
        ----------
        inputs : sequence
            One item per device, as returned by `DataParallelModel`. A tuple or list becomes several arguments of the loss.
        targets, kwargs : array, or nested data
            Shapes (B, ...). Arrays are split; other values go to each device.

        Raises
        ------
        ShardError
            The labels cannot be split, or are for other devices than the outputs.
        StepError
            The loss does not accept them; the message names the device.
        """
        if self.ctx_list is None:
            return self.module(inputs, *targets, **kwargs)
        shards = self._split((targets, kwargs), self.ctx_list)
        if not isinstance(inputs, (list, tuple)) or len(inputs) != len(shards):
            raise ShardError(
                f"DataParallelCriterion: got outputs {short(inputs)} and labels for {len(shards)} devices; expected a list of as "
                "many. Pass the result of DataParallelModel for the same batch."
            )
        calls = []
        for output, (args, named) in zip(inputs, shards):
            outputs = output if isinstance(output, (list, tuple)) else (output,)
            calls.append(((*outputs, *args), named))
        losses = self._on_each(calls)
        # If a loss returns several, GluonCV returns them on one device, and one tuple per device on more.
        return _as_tuple(losses[0]) if losses and len(self.ctx_list) == 1 else tuple(losses)


def _map_arrays(function: Callable[[Any], Any], data: Any) -> Any:
    """Return data with its arrays replaced. Numbers and lists of numbers are not arrays here: GluonCV passes them on."""
    if is_device_array(data) or isinstance(data, np.ndarray):
        return function(data)
    if isinstance(data, dict):
        mapped = copy.copy(data)
        mapped.update((key, _map_arrays(function, value)) for key, value in data.items())
        return mapped
    if isinstance(data, (list, tuple)):
        items = [_map_arrays(function, item) for item in data]
        return type(data)(*items) if hasattr(data, "_fields") else type(data)(items)
    return data


def _arrays_of(data: Any) -> List[Any]:
    found: List[Any] = []
    _map_arrays(found.append, data)
    return found


def _as_tuple(output: Any) -> Any:
    """Return one device's output in GluonCV's form: an array or a list as a tuple, other values unchanged."""
    if is_device_array(output):
        return (output,)
    return tuple(output) if isinstance(output, list) else output

"""Virtual shards: every batch is cut into the same parts, whatever the number of devices, which compute them one by one.

```
batch ─► 8 virtual shards ─► cpu(0): 0, 1, 2, 3    each: seed, forward, backward, added to the tree ─┐
                             cpu(1): 4, 5, 6, 7    the same                                          ─┴─► root ─► one update
```
"""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import mxnet as mx
from mxnet import Context, autograd, gluon

from ..distributed import process_shard
from ..errors import TrainerError
from ..nested import Array, Fields, is_device_array, map_leaves
from ..runtime.engine_push import EngineContext, WrittenWith
from ..trainer.buffers import Buffer, zero
from ..trainer.freshness import as_one_call, history
from ..trainer.running_stats import running_stats
from ..trainer.trainer import Trainer
from .batchnorm import is_synchronised
from .passes import Passes
from .sharding import count_examples, split_batch, split_shards


class VirtualSplit:
    """Cuts batches into virtual shards, and returns those of this process on its devices.

    Parameters
    ----------
    split_f : callable
        `split_batch`, or a `functools.partial` of it with a `batch_axis`, along which it cuts.
    num_shards : int
        Over all processes; with several micro-steps, parts of virtual shards.

    Attributes
    ----------
    keywords : dict
        As of a `functools.partial`.
    num_examples, num_leaves : int
        Examples of the latest batch, and shards that have some, over all processes.

    Raises
    ------
    TrainerError
        The function splits in its own way.
    """

    def __init__(self, split_f: Any, num_shards: int) -> None:
        options = {name: value for name, value in getattr(split_f, "keywords", {}).items() if value is not None}
        self.keywords: Dict[str, Any] = {"batch_axis": 0, **options}
        self.num_shards, self.num_examples, self.num_leaves = num_shards, 0, 0
        if getattr(split_f, "func", split_f) is not split_batch or set(self.keywords) - {"batch_axis", "dtype"}:
            raise TrainerError(
                f"train_batch: got split_f={split_f!r} with virtual_shards; expected split_batch, as virtual shards have equal "
                "sizes. Pass it, or a functools.partial of it with a batch_axis; leave weights out."
            )

    def __call__(self, X: Any, y: Any, devices: Sequence[Context]) -> Tuple[List[Any], List[Any]]:
        """Return this process's virtual shards of a batch: features and labels."""
        axis = self.keywords["batch_axis"]
        axes = tuple(axis) if isinstance(axis, (list, tuple)) else (axis, axis)
        self.num_examples = count_examples("split_batch", y, axes[1])
        self.num_leaves = min(self.num_shards, self.num_examples)
        pairs = split_shards(Fields((X, y)), devices, self.num_shards, axes, dtype=self.keywords.get("dtype"))
        return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


class VirtualPasses(Passes):
    """Passes over virtual shards, several on each device, one after the other.

    Parameters
    ----------
    inner : Passes
        Those of one shard.
    split : VirtualSplit
    trainer : Trainer, optional
        Given, the forward passes also queue the backward passes.
    parts : int
        The parts of each virtual shard, which are computed and added up like shards: micro-steps.
    """

    def __init__(
        self, inner: Passes, net: gluon.Block, loss: Any, split: VirtualSplit, trainer: Optional[Trainer] = None, parts: int = 1
    ) -> None:
        super().__init__(net, loss, trains=trainer is not None)
        self._inner, self._split, self._trainer, self._parts = inner, split, trainer, parts
        self._statistics: Optional[ShardStatistics] = None
        if is_synchronised(net):
            raise TrainerError(
                "virtual_shards: got a BatchNorm that is synchronised over the devices; expected one that normalises each "
                "virtual shard by itself. Call set_batch_norm(net, 'average')."
            )

    def shard_numbers(self, count: int) -> Optional[List[int]]:
        """Return the numbers of this process's first virtual shards."""
        return [(self._first + place) // self._parts for place in range(count)]

    @property
    def _first(self) -> int:
        rank, num_processes = process_shard()
        return rank * (self._split.num_shards // num_processes)

    def forward(self, operation: str, Xs: Sequence[Any], ys: Sequence[Any]) -> Tuple[List[Any], List[Array]]:
        """Queue the passes of all virtual shards, with a trainer also their backward passes. Return outputs and losses."""
        outputs: List[Any] = [None] * len(Xs)
        losses: List[Any] = [None] * len(Xs)
        if self._trainer is not None:
            self._train(self._trainer, operation, Xs, ys, outputs, losses)
            return outputs, losses
        for place in range(len(Xs)):
            (outputs[place],), losses[place : place + 1] = self._inner.forward(
                operation, Xs[place : place + 1], ys[place : place + 1]
            )
        return outputs, losses[: len(Xs)] if self._loss is not None else []

    def backward(self, trainer: Trainer, losses: Sequence[Array]) -> None:
        """Do nothing: the forward passes have queued the backward passes."""

    def _train(
        self, trainer: Trainer, operation: str, Xs: Sequence[Any], ys: Sequence[Any], outputs: List[Any], losses: List[Any]
    ) -> None:
        tree, virtual, contexts = trainer._reduction, trainer._virtual, trainer.contexts
        assert virtual is not None, "the trainer has virtual shards"
        buffers = trainer._replicas.current_buffers()
        gradients = tree.use(buffers)
        virtual.draw_base()
        if self._statistics is None or not self._statistics.is_of(buffers):
            self._statistics = ShardStatistics(self._net, contexts, buffers)
        statistics = self._statistics
        statistics.begin()
        if not Xs:
            history.note_empty()
        with as_one_call():
            for place, replica in _in_turns(len(Xs), self._split.num_shards // process_shard()[1], len(contexts)):
                tree.make_room(replica)
                if self._inner.draws is not False:
                    mx.random.seed(virtual.seed_of(self._first + place), contexts[replica])
                if not self._inner.is_compiled:  # a graph writes all gradients
                    with autograd.pause():
                        for buffer in buffers:
                            zero(buffer.gradients[replica])
                (output,), (loss,) = self._inner.forward(operation, [Xs[place]], [ys[place]])
                self._inner.backward(trainer, [loss])
                outputs[place], losses[place] = map_leaves(_detached, output), loss.detach()
                moved = statistics.take(replica, loss.shape[0] if loss.shape else 1)
                tree.add(self._first + place, replica, gradients[replica] + moved)
        with autograd.pause():
            statistics.move(tree.finish(self._split.num_leaves, statistics.like(gradients[0])), self._split.num_examples)
        if self._inner.draws is not False:  # what a program draws after the batch does not depend on the devices
            mx.random.seed(virtual.seed_of(self._split.num_shards))
        virtual.batches += 1


class ShardStatistics:
    """Lets each virtual shard move BatchNorm's running statistics from the same values, and averages how far they moved.

    Parameters
    ----------
    net : gluon.Block
    contexts : sequence of mxnet.Context
    buffers : list of Buffer
        Of its gradients.
    """

    def __init__(self, net: gluon.Block, contexts: Sequence[Context], buffers: List[Buffer]) -> None:
        self._buffers, self._contexts = buffers, contexts
        self._params = running_stats(net)
        self._data = [param._data for param in self._params]
        self._arrays = [[param.data(context).as_nd_ndarray() for param in self._params] for context in contexts]
        self._flat = [[array.reshape((-1,)) for array in arrays] for arrays in self._arrays]
        ends = [0]
        for array in self._arrays[0]:
            ends.append(ends[-1] + array.size)
        self._bounds = list(zip(ends, ends[1:]))
        self._before: List[Array] = []
        self._written: List[WrittenWith] = []
        for replica, context in enumerate(contexts if self._params else ()):
            others = {id(one.bucket or one): one.gradients[replica] for one in buffers}
            place = EngineContext(context.device_typeid, context.device_id)
            self._written.append(WrittenWith(self._arrays[replica], list(others.values()), place))

    def is_of(self, buffers: List[Buffer]) -> bool:
        """Return whether the gradients and statistics are still in these arrays."""
        return buffers is self._buffers and all(param._data is data for param, data in zip(self._params, self._data))

    def begin(self) -> None:
        """Note the values before a batch."""
        if self._params:
            self._before = [mx.nd.concat(*flat, dim=0) for flat in self._flat]

    def take(self, replica: int, num_examples: int) -> List[Array]:
        """Return how far a shard has moved the statistics of its device, times its examples; move them back."""
        if not self._params:
            return []
        with autograd.pause():
            self._written[replica].push()
            before = self._before[replica]
            moved = (mx.nd.concat(*self._flat[replica], dim=0) - before) * num_examples
            self._write(replica, before)
        return [moved]

    def like(self, gradients: List[Array]) -> List[Array]:
        """Return arrays of the shapes that a shard adds to the tree."""
        return gradients + self._before[:1] if self._params else gradients

    def move(self, root: List[Array], num_examples: int) -> None:
        """Move the statistics of all devices by the mean over the examples of all shards."""
        if self._params and num_examples:
            mean = root[-1] / num_examples
            for replica, context in enumerate(self._contexts):
                self._write(replica, self._before[replica] + mean.as_in_context(context))

    def _write(self, replica: int, values: Array) -> None:
        for (begin, end), flat in zip(self._bounds, self._flat[replica]):
            values[begin:end].copyto(flat)


def _in_turns(count: int, per_process: int, num_devices: int) -> Iterator[Tuple[int, int]]:
    """Yield the place of each shard of this process, and its device: the first one of each device, then the second ones."""
    each = per_process // num_devices
    for turn in range(each):
        for replica in range(num_devices):
            if replica * each + turn < count:
                yield replica * each + turn, replica


def _detached(_: str, leaf: Any) -> Any:
    return leaf.detach() if is_device_array(leaf) else leaf

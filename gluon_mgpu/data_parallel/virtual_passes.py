"""Virtual shards: every batch is cut into the same parts, whatever the number of devices, which compute them one by one.

```
batch ─► 8 virtual shards ─► cpu(0): 0, 1, 2, 3    each: seed, forward, backward, added to the tree ─┐
                             cpu(1): 4, 5, 6, 7    the same                                          ─┴─► root ─► one update
```
"""

from __future__ import annotations

from operator import is_
from typing import Any, List, Optional, Sequence, Tuple

import mxnet as mx
from mxnet import Context, autograd, gluon

from ..distributed import process_shard
from ..mxnet_internals.parameters import has_values, values_of
from ..nested import is_device_array, map_leaves
from ..refusals import refusal
from ..trainer.fresh import Pass
from ..trainer.running_stats import running_stats, statistics_slabs
from ..trainer.slab import Slab, zero
from ..trainer.trainer import Trainer
from .batchnorm import is_synchronised
from .passes import Outputs, Passes, Phase, Trained
from .plan import Plan
from .stats_of_parts import StatsOfParts


class VirtualPasses(Passes):
    """Passes over virtual shards, several on each device, one after the other.

    Parameters
    ----------
    inner : Passes
        Those of one shard.
    num_shards : int
        Over all processes; with several micro-steps, parts of virtual shards.
    parts : int
        The parts of each virtual shard, which are computed and added up like shards: micro-steps.
    """

    in_parts = True  # moves the statistics itself

    def __init__(self, inner: Passes, num_shards: int, parts: int = 1) -> None:
        super().__init__(inner._net, inner._loss, trains=inner._trains)
        self._inner, self._num_shards, self._parts = inner, num_shards, parts
        self._params: List[gluon.Parameter] = []  # the running statistics
        self._known: List[object] = []  # what `_stats` depends on
        self._stats: List[StatsOfParts] = []  # on each device
        if is_synchronised(self._net):
            raise refusal("train_batch", "virtual_shards", "synchronised BatchNorm")

    def forward(self, operation: str, Xs: Sequence[Any], ys: Sequence[Any], plan: Optional[Plan] = None) -> Outputs:
        """Queue the forward passes of all virtual shards."""
        self._number(len(Xs))
        found = [self._inner.forward(operation, [X], [y]) for X, y in zip(Xs, ys)]
        return [output for (output,), _ in found], [loss for _, losses in found for loss in losses]

    def _number(self, count: int) -> Tuple[int, int]:
        """Number the virtual shards of this process; return how many it has, and the first one."""
        rank, num_processes = process_shard()
        num_here = self._num_shards // num_processes
        first = rank * num_here
        self.shard_numbers = [(first + index) // self._parts for index in range(count)]
        return num_here, first

    def run(
        self, operation: str, Xs: Sequence[Any], ys: Sequence[Any], plan: Optional[Plan], trainer: Trainer, on_phase: Phase = bool
    ) -> Trained:
        """Queue the forward and backward passes of all virtual shards, one after the other on each device."""
        num_here, first = self._number(len(Xs))
        outputs: List[Any] = [None] * len(Xs)
        losses: List[Any] = [None] * len(Xs)
        tree, contexts = trainer.steps.tree, trainer.contexts
        assert tree is not None and plan is not None, "the trainer has virtual shards"
        virtual = tree.virtual
        trainer.steps.exchange(plan.num_examples)  # the tree sums over the processes
        if trainer.steps.fresh.running_indices:
            raise refusal("Trainer", "virtual_shards", "grad_req='add'")
        buffers, shapeless = trainer.steps.layout.slabs, [one for one in trainer.params if values_of(one) is None]
        gradients = tree.begin(buffers)
        stats = self._stats_of(contexts, buffers)
        each = num_here // len(contexts)
        passes: List[Pass] = []
        for index in sorted(range(len(Xs)), key=lambda index: index % each):  # each device's first one, then the second ones
            replica = index // each
            if self._inner.draws is not False:
                mx.random.seed(virtual.seed_of(first + index), contexts[replica])
            if index % each == 0 or not self._inner.is_compiled:  # a graph always writes the same gradients
                with autograd.pause():
                    for buffer in buffers:
                        zero(buffer.gradients[replica])
            (output,), (loss,), found = self._inner.run(operation, [Xs[index]], [ys[index]], None, trainer)
            passes.append(found)
            outputs[index] = map_leaves(lambda _, leaf: leaf.detach() if is_device_array(leaf) else leaf, output)
            losses[index] = loss.detach()
            with autograd.pause():
                moved = stats[replica].take(loss.shape[0] if loss.shape else 1)
            tree.add(first + index, replica, gradients[replica] + moved)
        if any(map(has_values, shapeless)):
            raise refusal(operation, "virtual_shards", "layers that only training reaches")
        with autograd.pause():
            num_leaves = min(self._num_shards, plan.num_examples)
            root = tree.finish(num_leaves, self._num_shards, gradients[0] + stats[0].before)
            means = [one / plan.num_examples for one in root[len(gradients[0]) :]]
            for one, context in zip(stats, contexts):
                one.move([mean.as_in_context(context) for mean in means])
        mx.random.seed(virtual.seed_of(self._num_shards))  # what a program draws after the batch does not depend on the devices
        virtual.batches += 1
        return outputs, losses, trainer.steps.recorder.joined(passes)

    def _stats_of(self, contexts: Sequence[Context], buffers: List[Slab]) -> List[StatsOfParts]:
        """Return BatchNorm's running statistics on each device, before a batch whose gradients are in these slabs."""
        known = [buffers, *map(values_of, self._params)]
        if len(known) != len(self._known) or not all(map(is_, known, self._known)):
            self._params = running_stats(self._net)
            slabs = statistics_slabs(self._params)
            self._known = [buffers, *map(values_of, self._params)]
            self._stats = [StatsOfParts(slabs, context, buffers) for context in contexts]
        for stats in self._stats:
            stats.remember()
        return self._stats

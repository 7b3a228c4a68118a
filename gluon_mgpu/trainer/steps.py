"""What the steps of a trainer do with gradients, and what waits between them.

```
step(n):  collect ─► sum over devices and processes ─► running statistics ─► clip ─► update: equal weights on all devices
             └─ inside accumulate(): add to the sums of each device, and wait for the next step outside
```
"""

from __future__ import annotations

import copy
import math
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Dict, Iterator, List, Optional, Sequence

from mxnet import gluon
from mxnet import optimizer as opt

from ..checks import is_number
from ..errors import StateError, TrainerError
from ..mxnet_internals.gluon_trainer import GluonTrainer, overflows
from ..nested import Array
from ..refusals import refusal
from .clip import clip, finite_on_each
from .fresh import Examples, FreshGradients, Pass
from .gradients import Gradients
from .layout import Layout
from .loss_scaler import LossScaler
from .optimizer_config import options_of
from .options import Options, as_number, batch_size_of, check_not_recording, check_virtual
from .parameters import has_values
from .process_sync import ProcessSync
from .recorder import PassRecorder
from .replica_check import ReplicaCheck
from .running_stats import RunningStats, is_running_stat
from .slab import Slab
from .sums import Divisor, Sum, make_sum
from .tree_sum import TreeSum, VirtualShards
from .update import Update


class Steps:
    """The steps of one trainer. Methods of the trainer's names have its arguments, results and errors.

    Parameters
    ----------
    trainer : GluonTrainer
        Its scale and MXNet's AMP are read in each step.
    layout : Layout
    options : Options
    optimizer : mxnet.optimizer.Optimizer
    kvstore : str, KVStore or None
    loss_scaler : LossScaler, optional
    order : list of int
        See `Update`.

    Attributes
    ----------
    fresh, recorder, gradients, running_stats, update, replica_check, process_sync
        The parts of a step: see the classes.
    sum : Sum
    tree : TreeSum or None
        The sum, if it is over virtual shards.
    sharded_data : bool
        Whether every process reads its own batches.
    num_open : int
        Contexts of `accumulate` that are open.
    num_counted : number
        The examples of the steps inside them.
    """

    trains_apart = False  # whether the devices' weights differ between averages, as those of LocalSGD

    def __init__(
        self,
        trainer: GluonTrainer,
        layout: Layout,
        options: Options,
        optimizer: opt.Optimizer,
        kvstore: Any,
        loss_scaler: Optional[LossScaler],
        order: Sequence[int],
    ) -> None:
        self._trainer, self.layout, self.options, self.optimizer = trainer, layout, options, optimizer
        self._rescale_at_first = optimizer.rescale_grad
        self.schedule_at_first = optimizer.lr_scheduler, copy.copy(optimizer.lr_scheduler)
        self.loss_scaler = loss_scaler
        self.sum: Sum = make_sum(kvstore)
        self.tree: Optional[TreeSum] = None
        self.process_sync = ProcessSync(layout)
        self.sharded_data = options.sharded_data and self.process_sync.in_job
        self._divisor = Divisor(layout.devices)
        self.update = Update(optimizer, layout, order)
        every = options.check_replicas_every
        self.replica_check = ReplicaCheck(layout, list(self.update.updaters.values()), every, trains_apart=self.trains_apart)
        self.fresh = FreshGradients(layout)
        self.recorder = PassRecorder(layout, self.fresh)
        self.gradients = Gradients(layout, self.fresh, find_unused=options.find_unused_parameters)
        statistics = [param for param in layout.params if is_running_stat(param)]
        self.running_stats = RunningStats(statistics, make_sum(kvstore), layout.devices)
        self._measures = options.measure_grad_norm or options.clip_norm is not None
        self._clips = self._measures or options.clip_value is not None
        self.grad_norm: Optional[Array] = None
        self.num_open = 0
        self.num_counted: float = 0
        self._summed: Optional[List[Slab]] = None  # summed by allreduce_grads(), not applied by update() yet
        if options.virtual_shards is not None:
            self.use_virtual_shards(options.virtual_shards)

    def use_virtual_shards(self, number: int) -> None:
        """Sum over so many virtual shards from now on."""
        virtual = VirtualShards(number, self.layout.contexts)
        scales, has_counted = self.loss_scaler is not None, bool(self.num_counted)
        modes = {"sharded_data": self.sharded_data, "scales": scales, "trains_apart": self.trains_apart}
        check_virtual(self.layout, **modes, has_counted=has_counted)
        if self.tree is None or self.tree.virtual.number != virtual.number:
            self.sum = self.tree = TreeSum(virtual, self.layout.contexts)

    def place(self) -> None:
        """Put parameters whose shapes are known into buckets; in a job, give all processes the weights of process 0."""
        layout = self.layout
        if has_values(layout.params):
            if layout.shapeless or not layout.slabs:
                layout.place()
            if self.process_sync.in_job:
                self.process_sync.begin(self._facts())

    def resolve_shapes(self) -> None:
        """Do what `place` does after the first batch has decided shapes."""
        if self.process_sync.in_job and has_values(self.layout.params) and self.fresh.has_new():
            self.process_sync.check_begun("Trainer")  # of a generator's pass, before the first one of this network
        self.place()

    def _facts(self) -> Dict[str, object]:
        """Return what all processes must have in common, in addition to the parameters."""
        virtual = None if self.tree is None else self.tree.virtual.number
        num_devices = None if self.sharded_data else len(self.layout.contexts)
        own = {**self.options.shared(), "number of devices": num_devices, "virtual_shards": virtual}
        return {**options_of(self.optimizer), "rescale_grad": self._rescale_at_first, **own}

    # Passes

    def take(self, found: Pass) -> None:
        """Let the next step use a pass."""
        self.fresh.latest = found
        if self.tree is None:  # virtual shards move the statistics themselves
            self.running_stats.count(found.examples)

    def leave_out(self, params: Sequence[gluon.Parameter]) -> None:
        """Let no step or update use gradients of these parameters: another trainer's pass has written over them."""
        self.fresh.leave_out(params)
        others = set(map(id, params))
        if self._summed and any(id(self.layout.params[index]) in others for slab in self._summed for index in slab.indices):
            self._summed = None

    # Steps

    def step(self, batch_size: float, ignore_stale_grad: bool) -> None:
        """Make a step, or count one inside `accumulate`."""
        check_not_recording("Trainer.step")
        batch_size = batch_size_of("Trainer.step", batch_size, may_be_0=self.sharded_data)
        self.process_sync.check_begun("Trainer.step", divides=not self.sharded_data)
        if self.sharded_data:
            self.process_sync.check_size("Trainer.step", batch_size, self.fresh.latest)
        if self.loss_scaler is not None and batch_size:
            self.loss_scaler.check("Trainer.step")
        if batch_size == 0:  # the gradients so far are of other data
            self.fresh.drop_unused()
        if self.num_open:
            self._count_step(batch_size)
        else:
            self.gradients.check_pending()
            self._step(batch_size, ignore_stale_grad)

    def _count_step(self, batch_size: float) -> None:
        if not self.sharded_data:  # of which processes may have other numbers of batches
            self.exchange(batch_size, accumulates=True)
        self._count(self.gradients.count(batch_size, adds=not self.sum.hold()))
        self.num_counted += batch_size
        if not self.sharded_data:
            self._move_statistics()

    def _step(self, batch_size: float, ignore_stale_grad: bool) -> None:
        slabs, examples = self.gradients.collect(ignore_stale_grad, batch_size)
        if self.tree is None and self.process_sync.in_job:
            self.exchange(self.num_counted + batch_size)
        self._reduce(slabs)
        # From here on these gradients are sums: if the optimizer raises, another step must not sum them again.
        self.gradients.mark_used()
        self._count(examples)
        self._summed = slabs
        self._apply(slabs, batch_size)

    def _reduce(self, slabs: List[Slab]) -> None:
        self.sum.run(slabs)

    def _apply(self, slabs: List[Slab], batch_size: float) -> None:
        self._move_statistics()
        num_examples, self.num_counted = self.num_counted + batch_size, 0
        scale = self._loss_scale_of(slabs)
        if self.sharded_data:
            self._divisor.divide(slabs, num_examples)
            num_examples = 1
        if scale is not None:
            self.optimizer.rescale_grad = self._trainer.scale / scale / num_examples
            if self._clips:
                self._clip(slabs)
            try:
                self.update.apply(slabs)
                self.sum.share(slabs)
            except BaseException:  # such as Ctrl-C, or a schedule's: some devices are updated, and others are not
                if not self.trains_apart:
                    with suppress(StateError):  # of options that were changed: they are the error
                        self._make_equal(slabs)
                raise
            if self.replica_check.is_on and self.replica_check.after_update():
                self.check_replicas()
        self.gradients.put_back_running()
        self._summed = None

    def _move_statistics(self) -> None:
        """Move BatchNorm's running statistics after a pass. Virtual shards, and devices that train apart, do it themselves."""
        if self.tree is None and not self.trains_apart:
            self.running_stats.move(self.layout.slabs)

    def _count(self, examples: Examples) -> None:
        """Count the examples of MXNet's own `backward`, if there are any."""
        if examples:
            self.running_stats.count(examples)

    def _clip(self, slabs: List[Slab]) -> None:
        rescale, bounds = self.optimizer.rescale_grad, (self.options.clip_norm, self.options.clip_value)
        limits = (None if bound is None else bound / rescale for bound in bounds)
        norm = clip(slabs, self.layout.contexts[0], *limits, measures=self._measures)
        if norm is not None:
            self.grad_norm = (norm * rescale).as_np_ndarray()  # a legacy array has no float()

    def _loss_scale_of(self, slabs: List[Slab]) -> Optional[float]:
        """Return the loss scale of these gradients, in addition to the trainer's; None if they overflowed and must be skipped."""
        if self.loss_scaler is not None:
            return self.loss_scaler.update([slab.summed[0] for slab in slabs])
        scaler = self._trainer.amp_scaler
        if scaler is None:
            return 1.0
        # It looks at numbers on one device: 1, or infinity if a gradient of a device is not finite.
        finite = finite_on_each([slab.summed[0] for slab in slabs])
        return None if overflows(scaler, [1 / one.as_in_context(self.layout.contexts[0]) for one in finite]) else 1.0

    def _make_equal(self, slabs: List[Slab]) -> None:
        """Give all devices what the first one holds, or the owner."""
        for slab in slabs:
            for weight in slab.weights[1:] if slab.owner is None else ():
                slab.weights[0].copyto(weight)
        if self.update.is_local:
            self.update.restore(self.update.states(), self.update.counts())
        self.sum.share(slabs)

    # Steps in two parts

    def allreduce_grads(self) -> None:
        """Sum the gradients, for a program that changes the sum before `apply_summed`."""
        check_not_recording("Trainer.allreduce_grads")
        self.process_sync.check_begun("Trainer.allreduce_grads", divides=not self.sharded_data)
        self._check_sums("Trainer.allreduce_grads")
        slabs, examples = self.gradients.collect(ignore_stale_grad=True)
        self.exchange(0)
        if self._summed and not slabs:
            raise TrainerError(
                "Trainer.allreduce_grads: got gradients that it has already summed; expected a pass in between. Call update()."
            )
        is_all = slabs is self.layout.slabs  # each device gets the sum, which the program may change
        self.sum.run(self.layout.everywhere if is_all else [replace(slab, owner=None) for slab in slabs])
        self.gradients.mark_used()
        self._count(examples)
        self._summed = slabs

    def apply_summed(self, batch_size: Any, ignore_stale_grad: bool) -> None:
        """Do what the trainer's `update` does."""
        check_not_recording("Trainer.update")
        self._check_sums("Trainer.update")
        number = as_number(batch_size)
        if number is not batch_size and is_number(number) and not math.isfinite(number):  # it was an array
            self.discard()
            return
        batch_size = batch_size_of("Trainer.update", number)
        if self.loss_scaler is not None:
            self.loss_scaler.check("Trainer.update")
        if self._summed is not None:
            self.gradients.check_summed(self._summed, ignore_stale_grad)
            self._apply(self._summed, batch_size)
            return
        if self.layout.needs_sum or self.process_sync.in_job:
            where = "the processes" if self.process_sync.in_job else f"{len(self.layout.devices)} devices"
            raise TrainerError(
                f"Trainer.update: got gradients that were not summed over {where}; expected allreduce_grads() before. Call "
                "step(), which does both."
            )
        self._step(batch_size, ignore_stale_grad)

    def _check_sums(self, operation: str) -> None:
        """Raise where devices train apart, and inside `accumulate`, where more passes follow."""
        other = "LocalSGD" if self.trains_apart else "accumulate()" if self.num_open else ""
        if other:
            raise refusal(operation, other, "allreduce_grads()", f"{operation.split('.')[1]}()")

    # Several batches for one update

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Count the steps inside, instead of making them."""
        if self._summed is not None:
            raise TrainerError(
                "Trainer.accumulate: got gradients that were summed and not applied; expected an update first. Call update() to "
                "apply them, or discard() to drop them."
            )
        had_new = self.fresh.has_new()
        self.num_open += 1
        try:
            yield
        except BaseException:
            self.discard()
            raise
        finally:
            self.num_open -= 1
        if not had_new and not self.num_open and not self.gradients.has_counted and self.fresh.has_new():
            raise TrainerError(
                "Trainer.accumulate: got backward passes that no step() counted; expected a step after each. Call step(n) inside."
            )

    def flush(self, ignore_stale_grad: bool) -> None:
        """Update with the gradients that were counted."""
        check_not_recording("Trainer.flush")
        if self.num_open or not self.gradients.has_counted:
            return
        if self.fresh.has_new():
            raise TrainerError(
                "Trainer.flush: got a backward pass after the last step(); expected the number of its examples. Call step(n) "
                "instead, or discard() to drop all that was accumulated."
            )
        self.fresh.drop_unused()  # flags that compiled steps have not looked at
        self._step(0, ignore_stale_grad)

    def discard(self) -> None:
        """Drop all gradients that no step has used."""
        if self.tree is None and not self.trains_apart and not (self.process_sync.in_job or self.running_stats.has_counted):
            self.catch_up()
        self.drop()

    def drop(self) -> None:
        """Drop all gradients and sums, and leave the running statistics as they are."""
        self.gradients.drop()
        self.sum.drop()
        self.num_counted, self._summed = 0, None

    def check_applied(self, operation: str) -> None:
        """Raise `TrainerError` if gradients were accumulated and not applied."""
        if self.num_counted:
            raise TrainerError(
                f"{operation}: got gradients of {self.num_counted} examples that were not applied; expected an update "
                "first. Call flush() outside of accumulate()."
            )

    # Devices and processes

    def catch_up(self) -> None:
        """Move BatchNorm's running statistics if a pass came that no step has used. Jobs do not know MXNet's `backward`."""
        in_job = self.process_sync.in_job
        self._count(self.fresh.unused() if not in_job else {})
        if self.running_stats.has_counted:
            self.running_stats.move(self.layout.slabs, anew=not in_job)

    def average_replicas(self) -> None:
        """Make the running statistics of all devices equal, and weights that train apart."""
        if self.tree is None:
            self.catch_up()

    def end_apart(self) -> None:
        """Make devices equal that train apart: their state is saved, or replaced."""

    def check_replicas(self) -> None:
        """Compare all devices and processes, and wait for them."""
        self.process_sync.settle()
        if not self.trains_apart:
            self.replica_check.verify()

    def exchange(self, batch_size: float, *, accumulates: bool = False) -> None:
        """Check that all processes sum the same gradients, before they do: see `ProcessSync.step`."""
        if self.process_sync.in_job:
            shared = {} if self.sharded_data else {"inside accumulate()": accumulates, "batch size": batch_size}
            self.process_sync.step({**self._facts(), **shared}, divides=not self.sharded_data)

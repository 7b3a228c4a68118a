"""The gradients of a step: those that a pass has written, zeros elsewhere, and the sums of passes that were counted before."""

from __future__ import annotations

from itertools import filterfalse
from typing import Iterable, List, Optional, Sequence, Tuple

from mxnet import autograd

from ..distributed import group
from ..errors import StaleGradientError, TrainerError
from ..refusals import refusal
from .accumulation import GradientSums, RunningSums
from .fresh import Examples, FreshGradients, Table
from .layout import Layout
from .slab import Slab, zero

_MOST_NAMES = 5  # in an error
_TWO_KINDS = "compile_step() or trainer.backward()", "loss.backward()"


class Gradients:
    """Collects the gradients of a network on all devices for its steps.

    Parameters
    ----------
    layout : Layout
    fresh : FreshGradients
    find_unused : bool
        Leave out parameters that got no gradient on any device, instead of raising, if others got some.

    Attributes
    ----------
    all_take_part : bool
        Also parameters without a gradient in this process take part in a step: other processes may have one.
    """

    def __init__(self, layout: Layout, fresh: FreshGradients, *, find_unused: bool) -> None:
        self._layout, self._fresh, self._find_unused = layout, fresh, find_unused
        self.all_take_part = group() is not None
        self._sums, self._running = GradientSums(), RunningSums()

    @property
    def has_counted(self) -> bool:
        """Whether passes were counted that no update has used."""
        return self._sums.has_counted

    def collect(self, ignore_stale_grad: bool, num_examples: Optional[float] = None) -> Tuple[List[Slab], Examples]:
        """Return the slabs that take part in this step, with zeros where a device has no gradient; and examples of flags.

        A device whose data did not reach a parameter, or that got no data, still holds the gradient of an earlier step. It adds
        zero to this step's sum. A parameter without a gradient on any device is left out.

        Returns
        -------
        list of Slab, mapping of Context to number
            The same list while every parameter takes part and none was moved. After MXNet's own `backward`, one example for each
            device that has a gradient; none for a `Pass`, which has its own.

        Raises
        ------
        StaleGradientError
            A parameter is left out and `ignore_stale_grad` is false. Nothing was changed.
        TrainerError
            The passes of the gradients are ambiguous. Nothing was changed.
        """
        layout, fresh = self._layout, self._fresh
        table, examples = self._of_step(num_examples)
        slabs = layout.slabs
        is_whole = not (self._sums.has_counted or layout.shapeless) and bool(table is fresh.all or table.all())
        if not is_whole and (layout.shapeless or not self.all_take_part):
            used = self._used(table)
            self._check_unused(used, ignore_stale_grad)
            slabs = slabs if used == layout.trainable else layout.one_each(used)
        if fresh.running_indices:
            self._running.keep(filter(fresh.is_running, slabs))
        if not is_whole:
            fresh.zero(~table & ~fresh.running, layout.slabs if self._sums.has_counted else slabs)
            self._sums.add_to(layout.slabs)
        return slabs, examples

    def count(self, num_examples: float, *, adds: bool) -> Examples:
        """Add the gradients of the latest pass to the sums; without `adds`, only note which ones. See `collect`.

        Raises
        ------
        StaleGradientError
            There are none. Nothing was changed.
        """
        fresh = self._fresh
        table, examples = self._of_step(num_examples)
        if len(table) and not table.any() and not self.all_take_part:
            raise StaleGradientError(
                "Trainer.step: got no gradient on any device since the last step; expected a backward pass for each step that is "
                "accumulated. Call flush() to update with the gradients so far."
            )
        self._sums.has_counted = True
        self._sums.reached.update(fresh.indices_of(table))
        if adds:
            with autograd.pause():
                fresh.zero(~table & ~fresh.running, self._layout.slabs)
            self._sums.add(filterfalse(fresh.is_running, self._layout.slabs))
        fresh.clear()
        return examples

    def check_pending(self) -> None:
        """Raise `StaleGradientError` for a step outside `accumulate` after which only counted passes would be applied."""
        if self._sums.has_counted and not self.all_take_part and not self._fresh.has_new():
            raise StaleGradientError(
                "Trainer.step: got no new gradient on any device; expected a backward pass. Call flush() to update without one."
            )

    def check_summed(self, slabs: Sequence[Slab], ignore_stale_grad: bool) -> None:
        """Raise unless these slabs, whose gradients were summed and marked as used, can be applied.

        Raises
        ------
        StaleGradientError
            Another parameter is trainable, and `ignore_stale_grad` is false.
        TrainerError
            A backward pass or a change of a parameter came after the sum.
        """
        summed = {index for slab in slabs for index in slab.indices}
        if self._layout.has_changed() or summed.intersection(self._used(self._fresh.read())):
            raise TrainerError(
                "Trainer.update: got a backward pass, or parameters that were frozen, initialised or cast after allreduce_grads()"
                "; expected the gradients that were summed. Call allreduce_grads() after the pass, or step(), which does both."
            )
        self._check_unused(summed, ignore_stale_grad)

    def mark_used(self) -> None:
        """Note that all gradients were applied or dropped: they are stale until the next backward pass."""
        self._fresh.clear()
        if self._sums.has_counted:
            self._sums.drop()

    def put_back_running(self) -> None:
        """Restore each device's own running sums after an update."""
        if self._running.kept:
            self._running.put_back()

    def drop(self) -> None:
        """Drop all gradients that no step has used, also running sums."""
        self._running.kept = []
        self._fresh.look()
        self._fresh.clear(everything=True)
        self._sums.drop()
        with autograd.pause():
            for index in self._fresh.running_indices:  # which may have no place in a slab yet
                for gradient in self._layout.params[index].list_grad():
                    zero(gradient)

    def _of_step(self, num_examples: Optional[float]) -> Tuple[Table, Examples]:
        """Return which gradients a step uses, and examples: see `collect`. Raise `TrainerError` if that is ambiguous."""
        fresh, latest = self._fresh, self._fresh.latest
        may_have_changed = latest is None or not latest.is_current
        is_lost = fresh.follow(looks=may_have_changed, by_hand=may_have_changed)
        table = fresh.table()
        if latest is None and fresh.are_ambiguous():
            raise refusal("Trainer.step", *_TWO_KINDS)
        if is_lost and latest is None and table.any():
            raise refusal("Trainer.step", "static_shape", "a loop by hand after a change of grad_req")
        if self._running.kept and table.any():
            raise refusal("Trainer.step", "allreduce_grads()", "another pass with grad_req='add'")
        if latest is not None:
            if not latest.is_current and fresh.flags().any():
                raise refusal("Trainer.step", *_TWO_KINDS)
            return table, {}
        devices = fresh.devices_of(table)
        num_replicas = self._layout.num_replicas(fresh.devices_of(table & ~fresh.running))
        if num_examples is not None and num_replicas > max(num_examples, 1):
            raise TrainerError(
                f"Trainer.step: got gradients on {len(devices)} devices for {num_examples} examples; expected at most as many "
                "devices, as others hold those of another pass. Call trainer.backward(losses) instead of "
                "autograd.backward(losses), also where losses are averaged and this number is 1; or trainer.discard() after a "
                "pass that no step uses."
            )
        return table, dict.fromkeys(devices, 1.0)

    def _used(self, table: Table) -> List[int]:
        """Return the parameters that have a fresh gradient, or a sum, on some device."""
        fresh = self._fresh
        return sorted(self._sums.reached.union(fresh.indices_of(table)).intersection(fresh.indices_of(fresh.all)))

    def _check_unused(self, used: Iterable[int], ignore_stale_grad: bool) -> None:
        """Raise `StaleGradientError` if a trainable parameter is not used."""
        used, names = set(used), self._layout.names
        unused = [names[index] for index in sorted({*self._layout.trainable, *self._layout.shapeless}.difference(used))]
        if unused and not (ignore_stale_grad or (self._find_unused and used)):  # with no gradient at all, the pass is missing
            more = f" and {len(unused) - _MOST_NAMES} more" if len(unused) > _MOST_NAMES else ""
            raise StaleGradientError(
                f"Trainer.step: got no gradient for {', '.join(unused[:_MOST_NAMES])}{more} on any device since the last step; "
                "expected a backward pass through every parameter. If this network uses only a part of them, pass "
                "ignore_stale_grad=True, or make the trainer with find_unused_parameters=True. After "
                "building it again, make a new Trainer."
            )

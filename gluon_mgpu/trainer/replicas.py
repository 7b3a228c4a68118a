"""One network on all devices: the gradients that a step applies, with zeros for idle devices."""

from __future__ import annotations

from typing import Any, List, Mapping, Optional, Sequence, Set, Tuple

from mxnet import Context, autograd, gluon

from ..errors import StaleGradientError, TrainerError
from ..runtime.gradient_flags import Flags
from .accumulation import Accumulation
from .buckets import BUCKET_BYTES
from .buffers import Buffer, zero
from .fresh_gradients import FreshGradients
from .freshness import Watcher, Writers, history, watch, watchers
from .parameters import Params, has_values
from .placement import Placement
from .running_sums import RunningSums
from .unused import UnusedParameters


class Replicas(Watcher):
    """The parameters of a network, with one replica per device. It decides which gradients a step takes.

    ```
    Placement        where parameters are       FreshGradients   which gradients passes have written
    Accumulation     sums over several passes   RunningSums      sums that the user keeps over steps
    ```

    Parameters
    ----------
    params : gluon.Block, dict of gluon.Parameter, or sequence of gluon.Parameter
        In structural order: in the order of the layers, not sorted by name (where `dense10_` comes before `dense9_`).
    bucket_bytes : int
        See `buckets.place`.
    static_graph : bool
        Every step uses the same parameters, which are not changed: watch one of them on each device instead of all.
    find_unused : bool
        Leave out parameters that got no gradient on any device, and log their names once, instead of raising.
    shards_optimizer : bool
        See `Placement`.

    Attributes
    ----------
    names, structural, params, contexts
        See `Placement`.
    all_take_part : bool
        Also parameters without a gradient in this process take part in a step: other processes may have one.

    Raises
    ------
    TrainerError
        The parameters are not parameters, not initialised, or not all on the same devices.
    """

    def __init__(
        self,
        params: Params,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        static_graph: bool = False,
        find_unused: bool = False,
        shards_optimizer: bool = False,
    ) -> None:
        self._placement = Placement(params, bucket_bytes, shards_optimizer=shards_optimizer)
        self.names, self.structural = self._placement.names, self._placement.structural
        self.params, self.contexts = self._placement.params, self._placement.contexts
        self.devices = self.contexts
        self.all_take_part = False
        self._static_graph = static_graph
        self._unused = UnusedParameters(self.names, find_unused=find_unused)
        self._running = RunningSums(self.params)
        self._sums = Accumulation(self.params, len(self.contexts))
        self._fresh = FreshGradients(self._placement, self._sums)
        self._was_asked_for_shapes = False
        if has_values(self.params):
            self._place()
        watch(self)

    @property
    def writers(self) -> Writers:
        """The passes that wrote the gradients."""
        return self._fresh.writers

    def resolve_shapes(self) -> bool:
        """Return whether all shapes are known; put the parameters in their places when they become known.

        From the second call on it returns True: parameters whose shapes one batch has not decided are not used.
        """
        if not self._placement.is_complete and has_values(self.params):
            self._place()
        was_asked, self._was_asked_for_shapes = self._was_asked_for_shapes, True
        return self._placement.is_complete or was_asked

    def collect(self, ignore_stale_grad: bool) -> List[Buffer]:
        """Return the buffers that take part in this step, with zeros where a device has no gradient.

        A device whose data did not reach a parameter, or that got no data, still holds the gradient of an earlier step. It adds
        zero to this step's sum. A parameter without a gradient on any device is left out.

        Returns
        -------
        list of Buffer
            The same list while every parameter takes part and none was moved.

        Raises
        ------
        StaleGradientError
            A parameter is left out and `ignore_stale_grad` is false. Nothing was changed.
        """
        self._follow()
        self._sums.check_alone("Trainer.step")
        placement = self._placement
        if self._fresh.flags.all() and not placement.shapeless and self._fresh.writers.is_one_each():
            self._running.keep(placement.buffers)
            return placement.buffers
        fresh = self._of_step(self._fresh.read())
        if self._sums.is_on:
            fresh = fresh | self._sums.reached(self._fresh.watched)
            self._sums.put_back()
        buffers = placement.buffers
        if not self.all_take_part or placement.shapeless:
            used = self._fresh.used(fresh)
            self._check_unused(used, ignore_stale_grad)
            buffers = buffers if used == placement.trainable else placement.one_each(used)
        self._running.keep(buffers)
        self._zero_idle(fresh, buffers)
        return buffers

    def collect_summed(self, buffers: List[Buffer], ignore_stale_grad: bool) -> List[Buffer]:
        """Return these buffers, whose gradients were summed and marked as used.

        Raises
        ------
        StaleGradientError
            Another parameter is trainable, and `ignore_stale_grad` is false.
        TrainerError
            A backward pass or a change of a parameter came after the sum.
        """
        if self._placement.has_changed():
            raise TrainerError(
                "Trainer.update: got parameters that were frozen, initialised or cast after allreduce_grads(); expected "
                "the arrays that were summed. Call step(), or do it before the backward pass."
            )
        summed = {index for buffer in buffers for index in buffer.indices}
        if summed.intersection(self._fresh.used(self._fresh.flags.read())):
            raise TrainerError(
                "Trainer.update: got gradients of a backward pass after allreduce_grads(); expected their sum over the devices. "
                "Call allreduce_grads() again, or step(), which does both."
            )
        self._check_unused(summed, ignore_stale_grad)
        self._running.before_update()
        return buffers

    def mark_used(self, buffers: List[Buffer]) -> None:
        """Note that these gradients were applied: they are stale until the next backward pass."""
        if buffers is not self._placement.buffers:
            self._fresh.clear_used({index for buffer in buffers for index in buffer.indices})
        else:
            self._fresh.clear()
            if self._static_graph and len(self._fresh.watched) > 1:  # all took part: from now on one is watched for all
                last = self._placement.trainable[-1]
                self._fresh.watch_one(last)
                self._placement.follow_one(last)
        self.stop_adding()
        history.begin_era()

    def put_back_running(self) -> None:
        """Restore each device's own running sums (`grad_req="add"`)."""
        self._running.restore()

    def drop(self) -> None:
        """Drop all gradients that no step has used, also running sums."""
        self.stop_adding()
        self._sums.give_up()
        self._fresh.watch_present()
        self._fresh.clear()
        self._running.drop()
        history.begin_era()

    def before_call(self) -> List[Flags]:
        """Prepare the gradients for a backward call, and return the flags that it may set."""
        if self._fresh.is_outdated():
            self._fresh.watch_present()
        self._running.before_backward()
        if self._sums.has_earlier:
            self._drop_earlier()
        return self._fresh.all_flags()

    def mark_written(self, params: Mapping[int, gluon.Parameter], contexts: Sequence[Context]) -> Set[int]:
        """Set the flags of gradients that a call has written without autograd, and return the trainable parameters' ids."""
        self._fresh.mark(params, [context in contexts for context in self.contexts])
        return {id(self.params[index]) for index in self._placement.trainable}

    def after_call(self, written: Any, late: List[Any]) -> None:
        """Note which gradients a backward call has written."""
        if self._sums.is_on:
            self._sums.note_call(written, self._fresh.replaced(written, late), history.latest_pass())

    @property
    def needs_sum(self) -> bool:
        """Whether there are several devices, whose gradients must be summed."""
        return len(self.contexts) > 1

    @property
    def is_adding(self) -> bool:
        """Whether backward passes add to the gradients that are there."""
        return self._sums.is_on

    def start_adding(self) -> None:
        """Let the coming backward passes add to zero, and to what is there if a step comes before them."""
        self._follow()
        self._sums.check_alone("Trainer.accumulate")
        if not self._sums.is_on:
            fresh = self._fresh.read()
            with autograd.pause():
                self._zero_idle(fresh, self._placement.buffers)
            self._fresh.mark_again(self._sums.start)
            self._sums.has_earlier = bool(fresh.any())
        self._sums.is_open = True
        history.begin_era()

    def stop_adding(self) -> None:
        """Let backward passes replace gradients again; what has been added up is stale."""
        if self._sums.is_on:
            self._fresh.mark_again(self._sums.stop)

    def close(self) -> None:
        """Note the end of an `accumulate` context: a step must count each pass that comes now."""
        self._sums.is_open = False
        history.begin_era()

    def take_over(self) -> None:
        """End the accumulation of other trainers of these parameters."""
        history.begin_era()
        self._sums.take_over()

    def drop_earlier(self) -> None:
        """Drop gradients that no step has used or counted, except for running sums: they are not of the coming pass."""
        if self._sums.has_earlier:
            self._drop_earlier()
        elif not self._sums.is_on:
            if self._fresh.is_outdated():
                self._fresh.watch_present()
            if self._fresh.flags.read().any():
                self._fresh.clear_used(set(self._fresh.watched) - self._running.indices)

    def check_own(self, operation: str) -> None:
        """Raise `TrainerError` if another trainer has ended this accumulation."""
        self._sums.check_own(operation)

    def note_pass(self, ignore_stale_grad: bool = True) -> None:
        """Count the gradients that were added since the last call.

        Raises
        ------
        StaleGradientError
            There are none; or a parameter has had none on any device, and `ignore_stale_grad` is false. Nothing was changed.
        """
        self._follow()
        self._sums.check_sum()
        fresh = self._fresh.read()
        if self._sums.has_earlier:
            fresh = self._of_step(fresh)
        if not fresh.any() and not self.all_take_part:
            raise StaleGradientError(
                "Trainer.step: got no gradient on any device since the last step; expected a backward pass for each step that is "
                "accumulated. Call flush() to update with the gradients so far."
            )
        watched = self._fresh.watched
        if not self.all_take_part:
            self._check_unused(self._fresh.used(fresh | self._sums.reached(watched)), ignore_stale_grad)
        if self._sums.has_earlier:
            with autograd.pause():
                self._zero_idle(fresh, self._placement.buffers)
            self._sums.has_earlier = False
        watches_one = len(watched) < len(self._placement.trainable)
        self._sums.note(self._placement.trainable if watches_one else watched, fresh)
        self._fresh.clear()
        self._fresh.clear_former()
        history.begin_era()

    def has_trainable(self) -> bool:
        """Return whether a parameter is trained."""
        return any(param.grad_req != "null" for param in self.params)

    def check_reached(self) -> None:
        """Raise `StaleGradientError` if counted passes have not reached a parameter on any device."""
        watched = self._fresh.watched
        self._check_unused(self._fresh.used(self._fresh.read() | self._sums.reached(watched)), ignore_stale_grad=False)

    def has_new(self) -> bool:
        """Return whether there is a gradient that was not used or counted."""
        self._follow()
        return bool(self._fresh.read().any()) and not self._sums.has_earlier

    def weight_buffers(self) -> List[Buffer]:
        """Return buffers of all trainable parameters."""
        return self._placement.buffers

    def current_buffers(self) -> List[Buffer]:
        """Return buffers of all trainable parameters, where they are now."""
        self._follow()
        return self._placement.buffers

    @property
    def is_sharded(self) -> bool:
        """Whether each parameter is updated by one device, which copies it to the others."""
        return self._placement.is_sharded

    def owner_of(self, index: int) -> Optional[int]:
        """Return the replica that updates a parameter; None if all do, or if it was not chosen yet."""
        return self._placement.owner_of(index)

    def bytes_held(self) -> List[Tuple[int, int]]:
        """Return the bytes of weights and of gradients on each device."""
        held = zip(self._placement.bytes_held(), self._sums.bytes_held())
        return [(weights, gradients + sums) for (weights, gradients), sums in held]

    def _follow(self) -> None:
        """Update the places where Gluon has made new arrays, or the first batch has decided shapes."""
        placement = self._placement
        if not placement.has_begun or placement.has_changed():
            placement.check_unmoved()
            self._place()
        elif self._fresh.is_outdated():
            self._fresh.watch(self._fresh.watched)
        if placement.former_weights:
            placement.check_former_weights()

    def _place(self) -> None:
        """Put every trainable parameter in its place, and group them."""
        placement = self._placement
        placement.check_dense()
        if self._sums.is_on:
            self._sums.extend()
        placement.move()
        self._fresh.clear_unwatched()
        placement.regroup()
        self._running.indices = {index for index in placement.trainable if self._sums.adds_by_itself(self.params[index])}
        self._fresh.watch(placement.trainable)

    def _of_step(self, fresh: Any) -> Any:
        """Return which fresh gradients are in this step's sum."""
        if self._sums.is_on and not self._sums.has_earlier:
            return fresh
        return self._fresh.of_step(fresh, self._running.indices, has_empty=self.all_take_part, may_be_of_others=self._has_others)

    def _has_others(self) -> bool:
        """Return whether there are trainers with other parameters only."""
        own = set(map(id, self.params))
        return any(isinstance(one, Replicas) and own.isdisjoint(map(id, one.params)) for one in watchers())

    def _check_unused(self, used: Any, ignore_stale_grad: bool) -> None:
        trainable = [*self._placement.trainable, *self._placement.shapeless]
        self._unused.check(trainable, used, ignore_stale_grad)

    def _drop_earlier(self) -> None:
        """Start a sum with zeros instead of the gradients of an earlier pass that no step has counted."""
        self._sums.has_earlier = False
        with autograd.pause():
            self._zero_idle(~self._fresh.read(), self._placement.buffers)
        self._fresh.flags.clear()
        self._fresh.clear_former()

    def _zero_idle(self, fresh: Any, buffers: List[Buffer]) -> None:
        """Set the gradients of each device to zero where it has no fresh one."""
        for replica in range(len(self.contexts)):
            idle = self._fresh.idle(fresh[:, replica]).difference(self._running.indices)
            for buffer in buffers:
                if idle.issuperset(buffer.indices):
                    zero(buffer.gradients[replica])
                else:
                    for index in idle.intersection(buffer.indices):
                        zero(self.params[index].list_grad()[replica])

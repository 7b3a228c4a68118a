"""One network on all devices: its weights and gradients side by side, idle devices, BatchNorm statistics."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from operator import attrgetter, is_not
from typing import Any, Callable, Dict, Iterable, List, MutableSet, Optional, Sequence, Set, Tuple
from weakref import WeakSet

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from ..errors import StaleGradientError, TrainerError
from ..nested import Array, num_bytes
from ..runtime.gradient_flags import Flags
from .accumulation import Accumulation, RunningSums
from .buckets import BUCKET_BYTES, Bucket, BucketSlice, place, place_of
from .freshness import Watcher, Writers, history, watch, watchers
from .parameters import Params, blocks_of, common_contexts, has_values, named_params

logger = logging.getLogger("gluon_mgpu")


@dataclass(frozen=True, eq=False)
class Buffer:
    """What is reduced, clipped and updated in one operation a device: a run of parameters that lie side by side, or one.

    Attributes
    ----------
    indices : tuple of int
        The places of its parameters in the network, in the order of memory; keys of their optimizer states.
    weights : list of NDArray, shapes (size,)
        One a replica, in the order of the contexts. Empty for a parameter alone: see `Replicas._alone`.
    gradients : list of NDArray
        One a replica; of shapes (size,) but for a parameter alone that has no place in a bucket.
    bucket : Bucket or None
    begin, end : int
        Which part of the bucket.
    """

    indices: Tuple[int, ...]
    weights: List[Array]
    gradients: List[Array]
    bucket: Optional[Bucket] = None
    begin: int = 0
    end: int = 0


class Replicas(Watcher):
    """The parameters of a network, one replica a device.

    Parameters
    ----------
    params : gluon.Block, dict of gluon.Parameter, or sequence of gluon.Parameter
        In structural order: as the layers were made, not as their names sort (`dense10_` comes before `dense9_` there).
    bucket_bytes : int
        See `buckets.place`.
    static_graph : bool
        Every step uses the same parameters, which stay as they are: look at one of them on each device instead of at all.
    find_unused : bool
        Leave out parameters that got no gradient on any device, and log their names once, instead of raising.

    Attributes
    ----------
    names : list of str
        Structural names (`0.weight`) for a Block, the parameters' own (`dense7_weight`) otherwise.
    structural : bool
        Which of the two.
    params : list of gluon.Parameter
    contexts : list of mxnet.Context

    Raises
    ------
    TrainerError
        The parameters are not parameters, not initialised, or not all on the same devices.
    """

    def __init__(
        self, params: Params, *, bucket_bytes: int = BUCKET_BYTES, static_graph: bool = False, find_unused: bool = False
    ) -> None:
        named = named_params(params)
        self.names = list(named)
        self.structural = isinstance(params, gluon.Block)
        self.params = list(named.values())
        self.contexts = common_contexts(named)
        self._dense = [block for block in blocks_of(params) if isinstance(block, gluon.nn.Dense)] if self.structural else []
        self._bucket_bytes = bucket_bytes
        self._static_graph = static_graph
        self.all_take_part = False  # also what got no gradient here: other processes may have one
        self._find_unused = find_unused
        self._told: Set[str] = set()  # names of unused parameters that were logged
        self._initialised: Dict[int, Tuple[Any, Any]] = {}  # of each parameter: what Gluon makes anew when it initialises, dtype
        self._seen: List[Tuple[gluon.Parameter, Any, float, float]] = []  # each with its list of gradients and its multipliers
        self._trainable: List[int] = []
        self._shapeless: List[int] = []  # trainable too, but the first batch has yet to decide their shapes
        self._watched: List[int] = []  # whose flags are looked at
        self._all: List[Buffer] = []
        self._flags, self.writers = Flags([]), Writers(0, self.contexts)
        self._watched_params: List[gluon.Parameter] = []
        self._arrays: List[Any] = []  # each watched parameter's list of gradients, when its flags were found
        self._num_marked = 0  # how often parameters had been marked by then
        self._running: Set[int] = set()  # parameters whose gradients the user lets add up, from step to step
        self._running_sums = RunningSums()
        # What graphs set that were recorded before backward passes began or ended to add, and for which of the watched.
        self._outdated: Optional[Tuple[Flags, List[bool]]] = None
        self._sums = Accumulation(self.params, len(self.contexts))
        self._settled = False  # with all shapes known
        self._asked = False  # for them, by know_shapes
        self._before: List[Array] = []  # weights before they got their places, for the next steps
        self._num_steps_before = 0
        if has_values(self.params):
            self._settle()
        watch(self)

    def resolve_shapes(self) -> bool:
        """Return whether all shapes are known, and give the parameters their places when they come to be.

        Asked again, it says yes: what one batch has left without a shape is not used.
        """
        if not self._settled and has_values(self.params):
            self._settle()
        asked_before, self._asked = self._asked, True
        return self._settled or asked_before

    def check_unmoved(self) -> None:
        """Raise `TrainerError` if a parameter was put on other devices since, initialised again, or cast.

        A network hybridized with `static_alloc` and `static_shape` would go on writing gradients into the old arrays, and what
        the optimizer knows would not fit.
        """
        for index, (name, param) in enumerate(zip(self.names, self.params)):
            known = (param._ctx_list, param.dtype)
            contexts, dtype = self._initialised.setdefault(index, known) if param._data is not None else known
            if contexts is not param._ctx_list:
                raise TrainerError(
                    f"Trainer: got parameter {name} initialised again on {param.list_ctx()}; expected the arrays of the "
                    "first step. "
                    "Call net.hybridize() again and make a new Trainer after initialize(force_reinit=True) or reset_ctx()."
                )
            if param.list_ctx() != self.contexts:
                raise TrainerError(
                    f"Trainer: got parameter {name} on {param.list_ctx()}; expected {self.contexts}, where it was when the "
                    "trainer was made. Make a new Trainer after reset_ctx()."
                )
            if np.dtype(dtype) != np.dtype(param.dtype):
                raise TrainerError(
                    f"Trainer: got parameter {name} of dtype {np.dtype(param.dtype)}; expected {np.dtype(dtype)}, as at the "
                    "first step. Make a new Trainer after net.cast()."
                )

    def collect(self, ignore_stale_grad: bool) -> List[Buffer]:
        """Return the buffers that take part in this step, with zeros where a device has no gradient.

        A device that got no data, or whose data did not reach a parameter, still holds the gradient of an earlier step there.
        Its share of this step's sum is zero. A parameter that got no gradient on any device is left out.

        Returns
        -------
        list of Buffer
            The same list as long as every parameter takes part and nothing was moved.

        Raises
        ------
        StaleGradientError
            A parameter is left out and `ignore_stale_grad` is false. Nothing was changed.
        """
        self._follow()
        self._sums.check_alone("Trainer.step")
        if self._flags.all() and not self._shapeless and self.writers.is_one_each():
            return self._keep_running(self._all)
        fresh = self._counted(self._fresh())
        if self._sums.is_on:
            fresh = fresh | self._sums.reached(self._watched)
            self._sums.put_back()
        buffers = self._all
        if not self.all_take_part or self._shapeless:
            used = self._used(fresh)
            self._check_unused(used, ignore_stale_grad)
            buffers = self._all if used == self._trainable else self._alone(used)
        self._keep_running(buffers)
        self._zero_idle(fresh, buffers)
        return buffers

    def collect_summed(self, buffers: List[Buffer], ignore_stale_grad: bool) -> List[Buffer]:
        """Return these buffers, whose gradients have been summed, and are marked as used.

        Raises
        ------
        StaleGradientError
            Another parameter is trainable, and `ignore_stale_grad` is false.
        TrainerError
            There was a backward pass after the sum, or something was moved.
        """
        if self._changed():
            raise TrainerError(
                "Trainer.update: got parameters that were frozen, initialised or cast after allreduce_grads(); expected "
                "the arrays that were summed. Call step(), or do it before the backward pass."
            )
        summed = {index for buffer in buffers for index in buffer.indices}
        if summed.intersection(self._used(self._flags.read())):
            raise TrainerError(
                "Trainer.update: got gradients of a backward pass after allreduce_grads(); expected their sum over the devices. "
                "Call allreduce_grads() again, or step(), which does both."
            )
        self._check_unused(summed, ignore_stale_grad)
        self._running_sums.step_aside()
        return buffers

    def mark_used(self, buffers: List[Buffer]) -> None:
        """Note that these gradients have been applied: until the next backward pass, which writes, they are stale."""
        if buffers is not self._all:
            used = {index for buffer in buffers for index in buffer.indices}
            which = [index in used for index in self._watched]
            self._flags.clear(which)
            self.writers.forget(which)
        else:
            self._flags.clear()
            self.writers.forget()
            if self._static_graph and len(self._watched) > 1:  # every one was there: from now on, one speaks for all
                self._watch(self._trainable[-1:])
                _watching_one.add(self)
                param = self.params[self._trainable[-1]]
                self._seen = [(param, param._grad, param.lr_mult, param.wd_mult)]
        self.stop_adding()
        history.begin_era()

    def put_back_running(self) -> None:
        """Give the devices their own sums back, where the user lets gradients add up from step to step."""
        self._running_sums.put_back()

    def drop(self) -> None:
        """Drop all gradients that no step has used, also where the user lets them add up."""
        self.stop_adding()
        self._sums.give_up()
        self._watch(self._present())
        self._flags.clear()
        self.writers.forget()
        self._running_sums.forget()
        with autograd.pause():
            for index in self._running:
                for gradient in self.params[index]._grad or []:
                    _zero(gradient)
        history.begin_era()

    def before_call(self) -> List[Flags]:
        """Return the flags that a backward call may set, when all is as it is to be before it."""
        if self._has_other_flags():
            self._watch(self._present())
        self._running_sums.step_in()
        if self._sums.has_earlier:
            self._drop_earlier()
        return [self._flags] if self._outdated is None else [self._flags, self._outdated[0]]

    def after_call(self, written: Any, late: List[Any]) -> None:
        """Take note of what a backward call has written."""
        if self._sums.is_on:
            replaced = written & np.array([self.params[index]._grad_stype != "default" for index in self._watched])[:, None]
            if self._outdated is not None and late:
                replaced |= late[0] & np.array(self._outdated[1])[:, None]
            self._sums.note_call(written, replaced, history.latest_pass())

    @property
    def is_adding(self) -> bool:
        """Whether backward passes add to the gradients that are there."""
        return self._sums.is_on

    def start_adding(self) -> None:
        """Let the coming backward passes add to zero, and to what is there if a step comes before them."""
        self._follow()
        self._sums.check_alone("Trainer.accumulate")
        if not self._sums.is_on:
            fresh = self._fresh()
            with autograd.pause():
                self._zero_idle(fresh, self._all)
            self._mark_anew(self._sums.start)
            self._sums.has_earlier = bool(fresh.any())
        self._sums.is_open = True
        history.begin_era()

    def close(self) -> None:
        """Take note that passes which are made from now on are each to be counted by a step."""
        self._sums.is_open = False
        history.begin_era()

    def take_over(self) -> None:
        """End what another trainer of these parameters accumulates: this one takes its place."""
        history.begin_era()
        self._sums.take_over()

    def drop_earlier(self) -> None:
        """Drop gradients that no step has used or counted: this trainer's pass has no data in this process of several."""
        if self._sums.has_earlier:
            self._drop_earlier()
        elif self._initialised and not self._sums.is_on:
            self._follow()
            self._flags.clear()
            self.writers.forget()

    def check_own(self, operation: str) -> None:
        """Raise `TrainerError` if what was accumulated here was ended by another trainer."""
        self._sums.check_own(operation)

    def note_pass(self, ignore_stale_grad: bool = True) -> None:
        """Remember which gradients have been added to since the last time.

        Raises
        ------
        StaleGradientError
            None have; or one never was, on no device, and `ignore_stale_grad` is false. Nothing was changed.
        """
        self._follow()
        self._sums.check_sum()
        fresh = self._fresh()
        if self._sums.has_earlier:
            fresh = self._counted(fresh)
        if not fresh.any() and not self.all_take_part:
            raise StaleGradientError(
                "Trainer.step: got no gradient on any device since the last step; expected a backward pass for each step that is "
                "accumulated. Call flush() to update with those that there are."
            )
        if not self.all_take_part:
            self._check_unused(self._used(fresh | self._sums.reached(self._watched)), ignore_stale_grad)
        if self._sums.has_earlier:
            with autograd.pause():
                self._zero_idle(fresh, self._all)
            self._sums.has_earlier = False
        speaks_for_all = len(self._watched) < len(self._trainable)
        self._sums.note(self._trainable if speaks_for_all else self._watched, fresh)
        self._flags.clear()
        self.writers.forget()
        if self._outdated is not None:
            self._outdated[0].clear(self._outdated[1])
        history.begin_era()

    def has_new(self) -> bool:
        """Return whether there is a gradient that was not used or noted."""
        self._follow()
        return bool(self._fresh().any()) and not self._sums.has_earlier

    def stop_adding(self) -> None:
        """Let backward passes write again; what has been added up is stale."""
        if self._sums.is_on:
            self._mark_anew(self._sums.stop)

    def weight_buffers(self) -> List[Buffer]:
        """Return buffers of all parameters that are trained, with their weights, also where a parameter is alone."""
        return [
            buffer if buffer.weights else replace(buffer, weights=self.params[buffer.indices[0]].list_data())
            for buffer in self._all
        ]

    def bytes_held(self) -> List[Tuple[int, int]]:
        """Return the bytes of weights and of gradients on each device."""
        held = []
        for replica in range(len(self.contexts)):
            weights, gradients = {}, {}  # by array, as several parameters lie in one
            for param in self.params:
                found = place_of(param)
                weight = found.bucket.weights if found else param._data
                gradient = found.bucket.gradients if found else param._grad
                weights.update({id(array): num_bytes(array) for array in (weight or [])[replica : replica + 1]})
                gradients.update({id(array): num_bytes(array) for array in (gradient or [])[replica : replica + 1]})
            held.append((sum(weights.values()), sum(gradients.values()) + self._sums.bytes_held()[replica]))
        return held

    def _follow(self) -> None:
        """Settle anew where Gluon has made new arrays, or the first batch has decided shapes."""
        if not self._initialised or self._changed():
            self.check_unmoved()
            self._settle()
        elif self._has_other_flags():
            self._watch(self._watched)
        if self._before:
            self._check_recorded_since()

    def _fresh(self) -> Any:
        """Return the flags, with those that graphs of the time before `start_adding` have set.

        Raises
        ------
        TrainerError
            Such a graph has replaced what was added up, or one of the time before `stop_adding` has added to what is stale.
        """
        fresh = self._flags.read().reshape(len(self._watched), len(self.contexts))  # also of none
        if self._outdated is None:
            return fresh
        late = self._outdated[0].read() & np.array(self._outdated[1])[:, None]
        if late.any() and (not self._sums.is_on or self._sums.reached(self._watched).any()):
            self._outdated = None
            raise TrainerError(
                "Trainer.step: got gradients of a graph that was recorded before accumulate() or before the last update; "
                "expected one that was recorded after. Record, go backward and step for one batch after the other."
            )
        return fresh | late

    def _mark_anew(self, mark: Callable[[], List[gluon.Parameter]]) -> None:
        """Let `mark` mark parameters anew, and watch what it gives them, but also what graphs of the time before will set."""
        flags, marked = self._flags, set(map(id, mark()))
        which = [id(self.params[index]) in marked for index in self._watched]
        self._watch(self._watched)
        if any(which):
            flags.clear(which)
            self._outdated = flags, which

    def _used(self, fresh: Any) -> List[int]:
        """Return the parameters that have a gradient on some device."""
        used = [index for index, flags in zip(self._watched, fresh.any(axis=1)) if flags]
        return self._trainable if used == self._watched else used

    def _changed(self) -> bool:
        """Return whether Gluon made new arrays, or somebody set a multiplier, since `_settle`."""
        for param, gradients, lr_mult, wd_mult in self._seen:
            if param._grad is not gradients or param.lr_mult != lr_mult or param.wd_mult != wd_mult:
                return True
        return False

    def _settle(self) -> None:
        """Give every trainable parameter its place, and group them anew."""
        params = self.params
        self._check_dense()
        if self._sums.is_on:
            self._sums.extend()
        moved = place(params, self._bucket_bytes)
        if moved:
            self._before, self._num_steps_before = moved, _STEPS_BEFORE
        _clear_unwatched(self)
        self._seen = [(param, param._grad, param.lr_mult, param.wd_mult) for param in params]
        wanted = [index for index, param in enumerate(params) if param.grad_req != "null"]
        self._trainable = [index for index in wanted if params[index]._data is not None]
        self._shapeless = [index for index in wanted if params[index]._data is None]
        self._settled = not self._shapeless
        self._running = {index for index in self._trainable if self._sums.adds_by_itself(params[index])}
        self._all = self._grouped(self._trainable)
        self._watch(self._trainable)

    def _check_dense(self) -> None:
        """Raise `TrainerError` where a Dense layer trains its bias alone: on a CPU, MXNet computes no gradient for it.

        It says that it has, so that the gradient of the steps before would be applied again and again.
        """
        for block in self._dense if self.contexts[0].device_type == "cpu" else ():
            if block.bias is not None and block.weight.grad_req == "null" and block.bias.grad_req != "null":
                raise TrainerError(
                    f"Trainer: got {block.weight.name} frozen and {block.bias.name} trained; expected both or none on a "
                    "CPU, where "
                    "MXNet computes no gradient of such a bias. Freeze both, or set lr_mult and wd_mult of the weight to 0."
                )

    def _check_recorded_since(self) -> None:
        """Raise `TrainerError` if a graph of the time before wrote gradients into the arrays of that time."""
        if any(weight._fresh_grad for weight in self._before):
            self._before = []
            raise TrainerError(
                "Trainer.step: got gradients of a graph that was recorded before the parameters got their places; expected "
                "one that "
                "was recorded after. Make the Trainer before recording, and pass one batch through a network whose shapes are "
                "decided by its first batch before that."
            )
        self._num_steps_before -= 1
        if not self._num_steps_before:
            self._before = []

    def _watch(self, indices: List[int]) -> None:
        known = {index: row for row, index in enumerate(self._watched)}
        writers = Writers(len(indices), self.contexts)
        writers.take(self.writers, [(row, known[index]) for row, index in enumerate(indices) if index in known])
        self._watched, self.writers = indices, writers
        self._flags = Flags([self.params[index]._data for index in indices])
        self._watched_params = [self.params[index] for index in indices]
        self._arrays = list(map(_GRAD, self._watched_params))
        self._num_marked = self._sums.num_marked
        self._outdated = None
        history.note_unseen(writers, self._flags.read().reshape(writers.calls.shape))

    def _present(self) -> List[int]:
        """Return which parameters can be watched, whatever has happened to them since `_settle`."""
        indices = self._watched if self in _watching_one else range(len(self.params))
        trained = [i for i in indices if self.params[i].grad_req != "null"]
        return [i for i in trained if len(self.params[i]._grad or []) == len(self.contexts)]

    def _has_other_flags(self) -> bool:
        """Return whether parameters were marked anew since their flags were found, or got their first arrays."""
        if self._num_marked != self._sums.num_marked:
            return True
        params = self.params if self._shapeless or not self._initialised else ()
        if sum(param._grad is not None for param in params) > len(self._watched):
            return True
        return any(map(is_not, map(_GRAD, self._watched_params), self._arrays))

    def _counted(self, fresh: Any) -> Any:
        """Return which fresh gradients are in this step's sum. Gradients that always add up are, also where no data came."""
        if not self._sums.is_on or self._sums.has_earlier:
            names = [self.names[index] for index in self._watched]
            always = np.array([index in self._running for index in self._watched])[:, None] & fresh
            fresh = self.writers.of_latest(fresh & ~always, names)
            if self.all_take_part and history.empty:
                own = set(map(id, self.params))
                others = [one for one in watchers() if isinstance(one, Replicas) and own.isdisjoint(map(id, one.params))]
                fresh = self.writers.since_empty(fresh, names, may_be_of_others=bool(others))
            fresh = fresh | always
        return fresh

    def _drop_earlier(self) -> None:
        """Begin a sum with zeros, and not with the gradients of a pass before it that no step has counted."""
        self._sums.has_earlier = False
        with autograd.pause():
            self._zero_idle(~self._fresh(), self._all)
        self._flags.clear()
        if self._outdated is not None:
            self._outdated[0].clear(self._outdated[1])

    def _keep_running(self, buffers: List[Buffer]) -> List[Buffer]:
        """Keep what each device has added up by itself, where the user lets it: the sum over devices takes its place."""
        self._running_sums.put_back()
        for buffer in buffers if self._running else ():
            own = self._running.intersection(buffer.indices)
            is_whole = len(own) == len(buffer.indices)
            self._running_sums.keep(buffer.gradients if is_whole else [one for i in own for one in self.params[i].list_grad()])
        return buffers

    def _grouped(self, indices: Sequence[int]) -> List[Buffer]:
        """Return runs of neighbours with the same multipliers, in the order in which the backward pass fills them."""
        runs: List[Tuple[Bucket, List[Tuple[int, BucketSlice]]]] = []
        last: Dict[Bucket, List[Tuple[int, BucketSlice]]] = {}
        alone = []
        for index in reversed(indices):
            param, found = self.params[index], place_of(self.params[index])
            if found is None:
                alone.append(index)
                continue
            run = last.get(found.bucket)
            before = self.params[run[-1][0]] if run else None
            multipliers = (param.lr_mult, param.wd_mult)
            if run and before and run[-1][1].end == found.begin and (before.lr_mult, before.wd_mult) == multipliers:
                run.append((index, found))
            else:
                last[found.bucket] = [(index, found)]
                runs.append((found.bucket, last[found.bucket]))
        buffers = [_run(bucket, run) for bucket, run in runs]
        # what is full first is reduced first
        position = {index: at for at, index in enumerate(indices)}
        buffers.sort(key=lambda buffer: -position[buffer.indices[-1]])
        return buffers + self._alone(alone)

    def _alone(self, indices: Sequence[int]) -> List[Buffer]:
        """Return one buffer for each parameter: where only some take part, or one has no place in a bucket."""
        return [Buffer((index,), [], self.params[index].list_grad()) for index in indices]

    def _zero_idle(self, fresh: Any, buffers: List[Buffer]) -> None:
        for replica in range(len(self.contexts)):
            idle = {index for index, flag in zip(self._watched, fresh[:, replica]) if not flag}
            if len(idle) == len(self._watched):
                idle = set(self._trainable)
            idle -= self._running
            for buffer in buffers:
                if idle.issuperset(buffer.indices):
                    _zero(buffer.gradients[replica])
                else:
                    for index in idle.intersection(buffer.indices):
                        _zero(self.params[index].list_grad()[replica])

    def _check_unused(self, used: Iterable[int], ignore_stale_grad: bool) -> None:
        used = set(used)
        unused = [self.names[index] for index in sorted({*self._trainable, *self._shapeless}.difference(used))]
        if self._find_unused and used:  # with no gradient at all, somebody has forgotten the backward pass
            self._tell_unused(unused)
        elif unused and not ignore_stale_grad:
            raise StaleGradientError(
                f"Trainer.step: got no gradient for {_some(unused)} on any device since the last step; expected a backward pass "
                "through every parameter. If this network uses only a part of them, pass ignore_stale_grad=True, or make the "
                "trainer with find_unused_parameters=True."
            )

    def _tell_unused(self, unused: Sequence[str]) -> None:
        new = [name for name in unused if name not in self._told]
        if new:
            self._told.update(new)
            logger.warning(
                "Trainer: %d parameters got no gradient on any device, and are left alone: %s", len(new), ", ".join(new)
            )


def _zero(gradient: Array) -> None:
    if gradient.stype == "default":
        classic = gradient.as_nd_ndarray()
        mx.nd.zeros_like(classic, out=classic)  # np's scalars take no [:]
    else:
        # without rows: to assign 0 would give it all, and lazy optimizers would move them
        mx.nd.sparse.zeros(gradient.stype, gradient.shape, ctx=gradient.context, dtype=gradient.dtype).copyto(gradient)


def _run(bucket: Bucket, run: Sequence[Tuple[int, BucketSlice]]) -> Buffer:
    begin, end = run[0][1].begin, run[-1][1].end
    weights = [flat[begin:end] for flat in bucket.weights]
    gradients = [flat[begin:end] for flat in bucket.gradients]
    return Buffer(tuple(index for index, _ in run), weights, gradients, bucket, begin, end)


_STEPS_BEFORE = 2
_GRAD = attrgetter("_grad")
_watching_one: MutableSet[Replicas] = WeakSet()  # whose other parameters' flags nobody clears


def _clear_unwatched(replicas: Replicas) -> None:
    """Clear the flags that a static graph left unset, before somebody looks at all of them."""
    for other in list(_watching_one):
        shared = {id(param) for param in replicas.params}.intersection(map(id, other.params))
        if shared and not other._flags.read().any():  # else a backward pass has just set them
            Flags([other.params[index]._data for index in other._trainable if other.params[index]._grad]).clear()
            _watching_one.discard(other)
            other._watch(other._trainable)


def average_replicas(params: Params) -> None:
    """Average the weights over the devices, where a `LocalSGD` has let them train apart."""
    for trainer in {id(trainer): trainer for trainer in _trainers_of(params)}.values():
        trainer.average_replicas()


def _trainers_of(params: Params) -> List[Any]:
    """Return the trainers, as Gluon notes them, that let the devices of these parameters train apart."""
    trainers = [param._trainer for param in named_params(params).values()]
    return [trainer for trainer in trainers if hasattr(trainer, "average_replicas")]


def replica_difference(params: Params) -> float:
    """Return the largest absolute difference between the weights of any two devices; 0.0 when replicas are identical.

    It reads all weights. BatchNorm's running statistics are not counted: they differ by design.

    Examples
    --------
    >>> net = gluon.nn.Dense(2, in_units=3)
    >>> net.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
    >>> replica_difference(net)
    0.0
    """
    largest = 0.0
    for param in named_params(params).values():
        if param._differentiable and param._data:
            first, *others = [array.asnumpy() for array in param.list_data()]
            for other in others:
                if not np.array_equal(first, other):
                    largest = max(largest, float(np.abs(first.astype(np.float64) - other).max()))
    return largest


def _some(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")

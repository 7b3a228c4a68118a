"""One network on all devices: its weights and gradients side by side, idle devices, BatchNorm statistics."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any, Callable, Dict, Iterable, List, MutableSet, Optional, Sequence, Set, Tuple
from weakref import WeakSet

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from .accumulation import Accumulation
from .buckets import BUCKET_BYTES, Bucket, Place, place, place_of
from .calls import Flags
from .errors import StaleGradientError, TrainerError
from .nested import Leaf, num_bytes
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
    weights: List[Leaf]
    gradients: List[Leaf]
    bucket: Optional[Bucket] = None
    begin: int = 0
    end: int = 0


class Replicas:
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
        self._flags = Flags([])
        # What graphs set that were recorded before backward passes began or ended to add, and for which of the watched.
        self._outdated: Optional[Tuple[Flags, List[bool]]] = None
        self._sums = Accumulation(self.params, len(self.contexts))
        self._settled = False  # with all shapes known
        self._asked = False  # for them, by know_shapes
        self._before: List[Leaf] = []  # weights before they got their places, for the next steps
        self._num_steps_before = 0
        if has_values(self.params):
            self._settle()

    def know_shapes(self) -> bool:
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
                    f"Trainer: got parameter {name} initialised again on {param.list_ctx()}; need the arrays of the first step. "
                    "Call net.hybridize() again and make a new Trainer after initialize(force_reinit=True) or reset_ctx()."
                )
            if param.list_ctx() != self.contexts:
                raise TrainerError(
                    f"Trainer: got parameter {name} on {param.list_ctx()}; need {self.contexts}, where it was when the "
                    "trainer was made. Make a new Trainer after reset_ctx()."
                )
            if np.dtype(dtype) != np.dtype(param.dtype):
                raise TrainerError(
                    f"Trainer: got parameter {name} of dtype {np.dtype(param.dtype)}; need {np.dtype(dtype)}, as at the first "
                    "step. Make a new Trainer after net.cast()."
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
        if self._flags.all() and not self._shapeless:
            return self._all
        fresh = self._fresh()
        if self._sums.is_on:
            fresh = fresh | self._sums.reached(self._watched)
            self._sums.put_back()
        if self.all_take_part and not self._shapeless:
            self._zero_idle(fresh, self._all)
            return self._all
        used = self._used(fresh)
        self._check_unused(used, ignore_stale_grad)
        buffers = self._all if used == self._trainable else self._alone(used)
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
                "Trainer.update: got parameters that were frozen, initialised or cast after allreduce_grads(); need the arrays "
                "that were summed. Call step(), or do it before the backward pass."
            )
        summed = {index for buffer in buffers for index in buffer.indices}
        if summed.intersection(self._used(self._flags.read())):
            raise TrainerError(
                "Trainer.update: got gradients of a backward pass after allreduce_grads(); need their sum over the devices. "
                "Call allreduce_grads() again, or step(), which does both."
            )
        self._check_unused(summed, ignore_stale_grad)
        return buffers

    def mark_used(self, buffers: List[Buffer]) -> None:
        """Note that these gradients have been applied: until the next backward pass, which writes, they are stale."""
        if buffers is not self._all:
            used = {index for buffer in buffers for index in buffer.indices}
            self._flags.clear([index in used for index in self._watched])
        else:
            self._flags.clear()
            if self._static_graph and len(self._watched) > 1:  # every one was there: from now on, one speaks for all
                self._watch(self._trainable[-1:])
                _watching_one.add(self)
                param = self.params[self._trainable[-1]]
                self._seen = [(param, param._grad, param.lr_mult, param.wd_mult)]
        self.stop_adding()

    def forget_unused(self) -> None:
        """Take gradients that were not used for stale, unless they are being added up."""
        if not self._sums.is_on:
            self._follow()
            self._flags.clear()

    @property
    def is_adding(self) -> bool:
        """Whether backward passes add to the gradients that are there."""
        return self._sums.is_on

    def start_adding(self) -> None:
        """Let the coming backward passes add to what the last one gave, and to zero where that has been used."""
        if not self._sums.is_on:
            self._follow()
            self._sums.check_alone()
            with autograd.pause():
                self._zero_idle(self._fresh(), self._all)
            self._mark_anew(self._sums.start)

    def note_pass(self, ignore_stale_grad: bool = True) -> None:
        """Remember which gradients have been added to since the last time.

        Raises
        ------
        StaleGradientError
            None have; or one never was, on no device, and `ignore_stale_grad` is false. Nothing was changed.
        """
        self._follow()
        fresh = self._fresh()
        if not fresh.any() and not self.all_take_part:
            raise StaleGradientError(
                "Trainer.step: got no gradient on any device since the last step; need a backward pass for each step that is "
                "accumulated. Call flush() to update with those that there are."
            )
        if not self.all_take_part:
            self._check_unused(self._used(fresh | self._sums.reached(self._watched)), ignore_stale_grad)
        speaks_for_all = len(self._watched) < len(self._trainable)
        self._sums.note(self._trainable if speaks_for_all else self._watched, fresh)
        self._flags.clear()
        if self._outdated is not None:
            self._outdated[0].clear(self._outdated[1])

    def has_new(self) -> bool:
        """Return whether there is a gradient that was not used or noted."""
        self._follow()
        return bool(self._fresh().any())

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
        if not self._initialised or self._sums.is_outdated or self._changed():
            self.check_unmoved()
            self._settle()
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
                "need one that was recorded after. Record, go backward and step for one batch after the other."
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
        self._sums.is_outdated = False
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
        self._all = self._grouped(self._trainable)
        self._watch(self._trainable)

    def _check_dense(self) -> None:
        """Raise `TrainerError` where a Dense layer trains its bias alone: on a CPU, MXNet computes no gradient for it.

        It says that it has, so that the gradient of the steps before would be applied again and again.
        """
        for block in self._dense if self.contexts[0].device_type == "cpu" else ():
            if block.bias is not None and block.weight.grad_req == "null" and block.bias.grad_req != "null":
                raise TrainerError(
                    f"Trainer: got {block.weight.name} frozen and {block.bias.name} trained; need both or none on a CPU, where "
                    "MXNet computes no gradient of such a bias. Freeze both, or set lr_mult and wd_mult of the weight to 0."
                )

    def _check_recorded_since(self) -> None:
        """Raise `TrainerError` if a graph of the time before wrote gradients into the arrays of that time."""
        if any(weight._fresh_grad for weight in self._before):
            self._before = []
            raise TrainerError(
                "Trainer.step: got gradients of a graph that was recorded before the parameters got their places; need one that "
                "was recorded after. Make the Trainer before recording, and pass one batch through a network whose shapes are "
                "decided by its first batch before that."
            )
        self._num_steps_before -= 1
        if not self._num_steps_before:
            self._before = []

    def _watch(self, indices: List[int]) -> None:
        self._watched = indices
        self._flags = Flags([self.params[index]._data for index in indices])
        self._outdated = None

    def _grouped(self, indices: Sequence[int]) -> List[Buffer]:
        """Return runs of neighbours with the same multipliers, in the order in which the backward pass fills them."""
        runs: List[Tuple[Bucket, List[Tuple[int, Place]]]] = []
        last: Dict[Bucket, List[Tuple[int, Place]]] = {}
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
                f"Trainer.step: got no gradient for {_some(unused)} on any device since the last step; need a backward pass "
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


def _zero(gradient: Leaf) -> None:
    if gradient.stype == "default":
        classic = gradient.as_nd_ndarray()
        mx.nd.zeros_like(classic, out=classic)  # np's scalars take no [:]
    else:
        gradient[:] = 0


def _run(bucket: Bucket, run: Sequence[Tuple[int, Place]]) -> Buffer:
    begin, end = run[0][1].begin, run[-1][1].end
    weights = [flat[begin:end] for flat in bucket.weights]
    gradients = [flat[begin:end] for flat in bucket.gradients]
    return Buffer(tuple(index for index, _ in run), weights, gradients, bucket, begin, end)


_STEPS_BEFORE = 2
_watching_one: MutableSet[Replicas] = WeakSet()  # whose other parameters' flags nobody clears


def _clear_unwatched(replicas: Replicas) -> None:
    """Clear the flags that a static graph left unset, before somebody looks at all of them."""
    for other in list(_watching_one):
        shared = {id(param) for param in replicas.params}.intersection(map(id, other.params))
        if shared and not other._flags.read().any():  # else a backward pass has just set them
            Flags([other.params[index]._data for index in other._trainable if other.params[index]._grad]).clear()
            _watching_one.discard(other)
            other._watch(other._trainable)


def average_running_stats(params: Params) -> None:
    """Set BatchNorm's running means and variances, on every device, to their mean over the devices.

    And the weights, where a `LocalSGD` has let the devices train apart.

    Each device sees its own shards, so each has its own statistics; Gluon evaluates with those of one device and saves
    their mean. Averaging is linear, as their running update is, so that doing it now does not change what it gives later.

    Devices count alike, also where their shards are not of one size.

    It waits for the devices: a network hybridized with `static_alloc` and `static_shape` writes these arrays without
    telling the engine.
    """
    average_replicas(params)
    stats = [param for param in running_stats(params) if len(param._data) > 1]
    if not stats:
        return
    mx.nd.waitall()
    for param in stats:
        arrays = param.list_data()
        wide = [array.as_in_context(arrays[0].context).astype("float64") for array in arrays]
        mean = (sum(wide[1:], wide[0]) / len(arrays)).astype(arrays[0].dtype)
        for array in arrays:
            mean.copyto(array)


def running_stats(params: Params) -> List[gluon.Parameter]:
    """Return BatchNorm's running means and variances, where they have values."""
    # Not differentiable is how Gluon marks them; a frozen weight has grad_req "null" but is differentiable.
    # Counters and masks, of whole numbers, are none of BatchNorm's.
    unlearnt = [param for param in named_params(params).values() if not param._differentiable and param._data]
    return [param for param in unlearnt if np.issubdtype(np.dtype(param.dtype), np.floating)]


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

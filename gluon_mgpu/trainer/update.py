"""The update of the weights: one operation per slab and device where possible, otherwise one per parameter."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import mxnet as mx
import numpy as np
from mxnet import Context, gluon
from mxnet import optimizer as opt

from ..checks import short
from ..errors import StateError, TrainerError
from ..nested import Array, is_device_array, leaves
from ..runtime.c_api import Operator, converted
from ..runtime.environment import logger
from ..runtime.mxnet2 import is_mxnet2, update_one
from .adamw import AdamW
from .layout import Layout
from .slab import Bucket, BucketSlice, Slab, place_of

# They work element by element, so many parameters are updated as one. Adam and AdamW also depend on the number of updates.
_ELEMENTWISE = (opt.SGD, opt.NAG, opt.Adam, AdamW, opt.RMSProp)
_COUNTING = (opt.Adam, AdamW)
# LAMB computes a norm per parameter; MXNet's operator for it takes up to 45. Its states are contiguous as well.
_CONTIGUOUS = (*_ELEMENTWISE, opt.LAMB)
# Their update depends only on weight, gradient, state, count and rate, so every replica computes its own. Others (nadam has a
# shared schedule, sgld draws noise, a user's class may do anything) update one replica, exactly as gluon.Trainer does on one
# device, and the result is copied.
_REPLICABLE = (*_CONTIGUOUS, opt.AdaGrad, opt.AdaDelta, opt.Ftrl, opt.Adamax, opt.FTML, opt.Signum)
# Their states are float32, also of float16 weights.
_OF_FLOAT32 = (opt.AdaDelta, opt.AdaGrad, opt.Ftrl, opt.RMSProp, opt.contrib.GroupAdaGrad)

_CONTAINERS = (list, tuple, dict, np.ndarray)
State = Any  # an optimizer's state of a parameter: None, an array, or nested tuples of arrays


@dataclass
class _Device:
    """What an update does on one device, in this order; `single`: (parameter, replica) pairs that MXNet updates.

    Attributes
    ----------
    joint : list
        Slabs that are updated as one: their first parameter, weights, gradients and states.
    operators : list
        The same for SGD and Adam, prepared: parameters and operator.
    """

    context: Context
    updater: opt.Updater
    joint: List[Tuple[int, Array, Array, State]] = field(default_factory=list)
    operators: List[Tuple[int, Operator]] = field(default_factory=list)
    single: List[Tuple[int, int]] = field(default_factory=list)


class Update:
    """Applies an optimizer to all replicas, and keeps its states and counts.

    Parameters
    ----------
    optimizer : mxnet.optimizer.Optimizer
    layout : Layout
    order : list of int
        The positions of the parameters in Gluon's order; see `gluon_order`. On one device the weights are then bit-identical to
        Gluon's, also for optimizers that pass values from one parameter to the next: nadam its schedule, LARS the last rate,
        LBSGD the first one.

    Attributes
    ----------
    updaters : list of mxnet.optimizer.Updater
        One per device. Their states are per parameter, by index; for some optimizers they are views of one array per bucket.
    order : list of int
        The argument, when the training of these states began.
    is_local : bool
        Whether the optimizer updates each parameter from its own gradient, state and count alone, on every replica or its owner.
        Otherwise the first replica is updated, and copied to the others.
    """

    def __init__(self, optimizer: opt.Optimizer, layout: Layout, order: Sequence[int]) -> None:
        _check_dtypes(optimizer, layout.params)
        self._optimizer, self._layout, self.order = optimizer, layout, list(order)
        self._by_index = dict(enumerate(layout.params))
        self.updaters = [opt.get_updater(optimizer) for _ in layout.devices]
        self._devices = [_Device(context, updater) for context, updater in zip(layout.devices, self.updaters)]
        self._by_context = dict(zip(layout.devices, self._devices))
        self._counts: Dict[int, int] = {}  # updates of each parameter
        self._memory: Dict[Tuple[Bucket, int], State] = {}  # states of a bucket, by replica
        self._views: Dict[Tuple[int, int], BucketSlice] = {}  # parameters whose states are views of it, by replica
        self._converted: Dict[int, Tuple[List[Tuple[str, Any]], Tuple[Any, ...]]] = {}  # the latest attributes
        self._slabs: List[Slab] = []
        self._taking_part: List[int] = []  # their parameters, in Gluon's order
        self.is_local = is_replicable(optimizer)

    def apply(self, slabs: List[Slab]) -> None:
        """Update the weights of these slabs with their gradients, on every replica or on their owners."""
        optimizer = self._optimizer
        if slabs is not self._slabs:
            self._prepare(slabs)
        optimizer.param_dict = self._by_index
        before = dict(self._counts)
        if self.is_local:
            for index in self._taking_part:
                self._counts[index] = before.get(index, optimizer.begin_num_update) + 1
            # Advance the schedule before the first update reads a rate, so that all replicas get the same rate.
            optimizer.num_update = max(optimizer.num_update, *map(self._counts.__getitem__, self._taking_part), 0)
        known: Dict[int, Tuple[Any, ...]] = {}  # attributes of the operators
        for device in self._devices:
            for first, operator in device.operators:
                if first not in known:
                    known[first] = self._attributes(first)
                operator.run(known[first])
            if device.joint or device.single:
                # MXNet counts updates by device number, which cpu(0) and gpu(0) share; each replica counts the same ones
                counts = dict(before) if self.is_local else self._counts
                optimizer._all_index_update_counts = {device.context.device_id: counts}
                optimizer._set_current_context(device.context.device_id)
            for first, weight, gradient, state in device.joint:
                update_one(optimizer, first, weight, gradient, state)
            if device.single:
                self._run_updater(device.single, device)
        if not self.is_local:
            for slab in slabs:
                for weight in slab.weights[1:]:
                    slab.weights[0].copyto(weight)

    def arrays(self) -> List[List[Array]]:
        """Return the arrays of the optimizer's states, one list per state with one array per replica."""
        held: List[List[Array]] = []
        for replica, device in enumerate(self._devices):
            alone = [state for index, state in sorted(device.updater.states.items()) if (index, replica) not in self._views]
            together = [memory for (_, where), memory in self._memory.items() if where == replica]
            held.append([array for _, array in leaves([alone, together]) if is_device_array(array)])
        return [list(arrays) for arrays in zip(*held)]

    def states(self) -> Dict[int, State]:
        """Return the states of the first replica, by parameter, or of its owner."""
        found: Dict[int, State] = {}
        for updater in self.updaters:
            found = {**updater.states, **found}
        return dict(sorted(found.items()))

    def counts(self) -> Dict[int, int]:
        """Return the number of updates of each parameter that has a state."""
        known = self.states()
        return {index: count for index, count in sorted(self._counts.items()) if index in known}

    def restore(self, states: Sequence[Dict[int, State]], counts: Dict[int, int], order: Optional[Sequence[int]] = None) -> None:
        """Set states, one dict per replica, counts, and the order if it is known: names may sort differently now."""
        self.order = self.order if order is None else list(order)
        held: Dict[int, Dict[int, State]] = {id(updater): {} for updater in self.updaters}
        for replica, known in enumerate(states if self.is_local else states[:1]):
            for index, state in known.items():
                held[id(self._on(index, replica).updater)][index] = state
        for updater in self.updaters:  # at the end: an exception must not leave parts
            updater.states, updater.states_synced = held[id(updater)], dict.fromkeys(held[id(updater)], True)
        # for files without counts
        begun = {index: self._optimizer.begin_num_update for known in states for index in known}
        self._counts = {**begun, **counts}
        self._memory.clear()
        self._views.clear()
        self._slabs = []

    def _on(self, index: int, replica: int) -> _Device:
        """Return the device of a replica of a parameter."""
        return self._by_context[self._layout.contexts_of[index][replica]]

    def _run_updater(self, pairs: List[Tuple[int, int]], device: _Device) -> None:
        params = self._layout.params
        weights = [params[index]._data[replica] for index, replica in pairs]
        gradients = [params[index]._grad[replica] for index, replica in pairs]
        indices = [index for index, _ in pairs]
        if type(self._optimizer) is not opt.NAG or device.context.device_type != "cpu":
            device.updater(indices, gradients, weights)
            return
        # NAG's operator reads a weight again after it has written it. But of a weight that oneDNN keeps in a layout of its own,
        # MXNet lets operators read a copy: the replicas would differ.
        plain = [weight * 1 for weight in weights]
        device.updater(indices, gradients, plain)
        for weight, new in zip(weights, plain):
            new.copyto(weight)

    def _attributes(self, first: int) -> Tuple[Any, ...]:
        """Return the attributes of the operator that updates the slab of this parameter.

        Source: MXNet 1.9.1, python/mxnet/optimizer/optimizer.py, SGD and Adam.
        """
        optimizer, count = self._optimizer, self._counts[first]
        (rate,), (decay,) = optimizer._get_lrs([first]), optimizer._get_wds([first])
        found: List[Tuple[str, Any]] = [("rescale_grad", optimizer.rescale_grad)]
        if type(optimizer) is opt.Adam:
            rate *= math.sqrt(1.0 - optimizer.beta2**count) / (1.0 - optimizer.beta1**count)
            found += [("lr", rate), ("wd", decay), ("beta1", optimizer.beta1), ("beta2", optimizer.beta2)]
            found += [("epsilon", optimizer.epsilon), ("lazy_update", optimizer.lazy_update)]
        else:
            found += [("lrs", (rate,)), ("wds", (decay,)), ("num_weights", 1)]
            if optimizer.momentum > 0:
                found.append(("momentum", optimizer.momentum))
        if optimizer.clip_gradient:
            found.append(("clip_gradient", optimizer.clip_gradient))
        former = self._converted.get(first)
        if former is None or former[0] != found:
            former = self._converted[first] = found, converted(found)
        return former[1]

    def _prepare(self, slabs: List[Slab]) -> None:
        """Choose the slabs that are updated as one, and put their states into contiguous arrays."""
        layout = self._layout
        _check_dtypes(self._optimizer, layout.params)  # cast since the trainer was made
        taking_part = {index for slab in slabs for index in slab.indices}
        self._taking_part = [index for index in self.order if index in taking_part]
        single: Dict[int, Sequence[int]] = {}  # the replicas of parameters that are updated one by one
        for device in self._devices:
            device.joint, device.operators, device.single = [], [], []
        for slab in slabs:
            replicas: Sequence[int] = range(len(slab.contexts) if self.is_local else 1)
            if slab.owner is not None:
                replicas = (slab.owner,)
                self._move_states(slab, slab.owner)
            if slab.bucket is not None and type(self._optimizer) in _CONTIGUOUS:
                states = [self._contiguous_states(slab, replica) for replica in replicas]
                if self._is_joint(slab):
                    for replica, state in zip(replicas, states):
                        self._add_joint(slab, replica, state)
                    continue
            single.update(dict.fromkeys(slab.indices, replicas))
        for index in self._taking_part:
            for replica in single.get(index, ()):
                self._on(index, replica).single.append((index, replica))
        self._slabs = slabs
        current = {place.bucket for place in self._views.values()}
        self._memory = {key: memory for key, memory in self._memory.items() if key[0] in current}
        if single:
            logger.debug("Trainer: %s updates %d parameters one by one", type(self._optimizer).__name__, len(single))

    def _add_joint(self, slab: Slab, replica: int, state: State) -> None:
        device, weight, gradient = self._on(slab.indices[0], replica), slab.weights[replica], slab.gradients[replica]
        if self._has_operator(weight, state):  # a call through `mxnet.optimizer.SGD` takes the host three times as long
            device.operators.append((slab.indices[0], _operator(weight, gradient, state, self._optimizer)))
        else:
            device.joint.append((slab.indices[0], weight, gradient, state))

    def _has_operator(self, weight: Array, state: State) -> bool:
        optimizer = self._optimizer
        if weight.dtype == np.float16 and optimizer.multi_precision:
            return False
        if type(optimizer) is opt.SGD:
            return (state is None) == (optimizer.momentum <= 0)
        return type(optimizer) is opt.Adam and not is_mxnet2()  # where it has other options

    def _is_joint(self, slab: Slab) -> bool:
        counts = {self._counts.get(index, self._optimizer.begin_num_update) for index in slab.indices}
        return isinstance(self._optimizer, _ELEMENTWISE) and (len(counts) == 1 or not isinstance(self._optimizer, _COUNTING))

    def _contiguous_states(self, slab: Slab, replica: int) -> State:
        """Return a slab's part of the states of its bucket; make the states of its parameters views of it."""
        bucket, updater = slab.bucket, self._on(slab.indices[0], replica).updater
        assert bucket is not None, "only slabs in a bucket have flat weights"
        if (bucket, replica) not in self._memory:
            weights = bucket.weights[replica]
            self._memory[bucket, replica] = self._optimizer.create_state_multi_precision(slab.indices[0], weights)
        memory = self._memory[bucket, replica]
        for index in slab.indices:
            param = self._layout.params[index]
            place = place_of(param)
            assert place is not None and place.bucket is bucket, "slabs are divided again when a parameter has moved"
            if self._views.get((index, replica)) is not place:
                view, former = _part(memory, place.begin, place.begin + place.size, param.shape), updater.states
                updater.states[index] = filled(view, former[index], f"parameter {index}") if index in former else view
                updater.states_synced[index] = True
                self._views[index, replica] = place
        return _part(memory, slab.begin, slab.end, (slab.end - slab.begin,))

    def _move_states(self, slab: Slab, owner: int) -> None:
        """Move states to the replica that owns these parameters now: a frozen parameter is trained again, in another bucket."""
        target = self._on(slab.indices[0], owner).updater
        for replica in range(len(slab.contexts)):
            former = self._on(slab.indices[0], replica).updater
            for index in slab.indices if replica != owner else ():
                if index in former.states:
                    weight = self._layout.params[index]._data[owner].as_nd_ndarray()
                    moved = self._optimizer.create_state_multi_precision(index, weight)
                    target.states[index] = filled(moved, former.states.pop(index), f"parameter {index}")
                    target.states_synced[index] = former.states_synced.pop(index, True)
                    self._views.pop((index, replica), None)


def is_replicable(optimizer: Union[str, opt.Optimizer]) -> bool:
    """Return whether an optimizer updates each parameter from its own gradient, state and count alone."""
    kind = opt.Optimizer.opt_registry[optimizer.lower()] if isinstance(optimizer, str) else type(optimizer)
    return kind in _REPLICABLE


def _check_dtypes(optimizer: opt.Optimizer, params: Sequence[gluon.Parameter]) -> None:
    """Raise `TrainerError` for float16 weights whose states would be float32, which MXNet's operators reject."""
    if optimizer.multi_precision or not isinstance(optimizer, _OF_FLOAT32):
        return
    for param in params:
        if np.dtype(param.dtype) == np.float16:
            raise TrainerError(
                f"Trainer: got {param.name} of float16 and {type(optimizer).__name__}, whose states are float32; expected "
                "weights of one dtype with their states. Pass multi_precision=True in optimizer_params."
            )


def _operator(weight: Array, gradient: Array, state: State, optimizer: opt.Optimizer) -> Operator:
    """Return MXNet's operator of SGD or Adam for a slab."""
    name = "multi_sgd_update" if state is None else "multi_sgd_mom_update"
    arrays = [array for _, array in leaves([weight, gradient, state]) if is_device_array(array)]
    return Operator("adam_update" if type(optimizer) is opt.Adam else name, arrays, [weight])


def filled(state: State, value: State, where: str) -> State:
    """Return an optimizer state after copying the values of another into its arrays. The values are MXNet's or NumPy's.

    Raises
    ------
    StateError
        The two differ in form.
    """
    has_shape = is_device_array(state) and getattr(value, "shape", None) == state.shape
    if has_shape and (is_device_array(value) or value.dtype.kind in "fiub" or value.dtype == state.dtype):  # bfloat16's is V
        state[:] = value if is_device_array(value) else mx.nd.array(value, ctx=state.context, dtype=state.dtype)
        return state
    is_nest = isinstance(state, (list, tuple))
    if is_nest and isinstance(value, (list, tuple)) and len(value) == len(state):
        return type(state)(filled(*pair, where) for pair in zip(state, value))
    is_other = (state is None) != (value is None) or isinstance(state, str) != isinstance(value, str)
    if is_device_array(state) or is_nest or is_other or isinstance(value, _CONTAINERS):
        raise StateError(
            f"load_states: got {short(value)} in {where}; expected {short(state)}, as this network's optimizer has it. Make both "
            "as they were when the state was saved, with the same options, such as momentum."
        )
    return value


def _part(state: State, begin: int, end: int, shape: Tuple[int, ...]) -> State:
    """Return views of elements [begin, end) of every array."""
    if isinstance(state, (list, tuple)):
        return type(state)(_part(one, begin, end, shape) for one in state)
    return state[begin:end].reshape(shape) if is_device_array(state) else state

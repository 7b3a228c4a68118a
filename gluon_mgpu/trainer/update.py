"""The update of the weights: one operation per slab and device where possible, otherwise one per parameter."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Set, Tuple

import mxnet as mx
import numpy as np
from mxnet import Context, gluon
from mxnet import optimizer as opt

from ..checks import is_number, short
from ..errors import StateError, TrainerError
from ..mxnet_internals.c_calls import Operator, converted
from ..mxnet_internals.optimizers import learning_rates, use_counts, weight_decays
from ..mxnet_internals.parameters import gradients_of, has_values, values_of
from ..nested import Array, is_device_array, leaves, map_leaves, num_bytes
from ..runtime.environment import logger
from .layout import Layout
from .slab import Slab, slice_of

# They work element by element, so many parameters are updated as one. Adam also depends on the number of updates.
_ELEMENTWISE = (opt.SGD, opt.NAG, opt.Adam, opt.RMSProp)
# Their update depends only on weight, gradient, state, count and rate, so every replica computes its own. Others (nadam has a
# shared schedule, sgld draws noise, a user's class may do anything) update one replica, exactly as gluon.Trainer does on one
# device, and the result is copied.
_REPLICABLE = (*_ELEMENTWISE, opt.LAMB, opt.AdaGrad, opt.AdaDelta, opt.Ftrl, opt.Adamax, opt.FTML, opt.Signum)
# Their states are float32, also of float16 weights.
_OF_FLOAT32 = (opt.AdaDelta, opt.AdaGrad, opt.Ftrl, opt.RMSProp, opt.contrib.GroupAdaGrad)

_LARGEST_RATE = 3.4e38  # float32
_KINDS = (type(None), str, list, tuple, dict, np.ndarray)  # of values in states; all others are numbers
_converted = lru_cache(maxsize=64)(converted)  # slabs and steps often have the same attributes
State = Any  # an optimizer's state of a parameter: None, an array, or nested tuples of arrays


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
    updaters : dict of mxnet.Context to mxnet.optimizer.Updater
        By device. Their states are per parameter, by index; for some optimizers they are views of one array per slab.
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
        self.updaters: Dict[Context, opt.Updater] = {device: opt.get_updater(optimizer) for device in layout.devices}
        self._operators: Dict[int, List[Operator]] = {}  # of slabs, by their first parameter: one per replica
        self._calls: List[Tuple[Context, Callable[[], None]]] = []  # other updates, which MXNet's updaters make
        self._counts = dict.fromkeys(self._by_index, optimizer.begin_num_update)  # updates of each parameter
        self._flat: Dict[Tuple[Slab, int], State] = {}  # states of a slab, by replica; those of its parameters are views of it
        self._slabs: List[Slab] = []
        self._keeps_velocity = False  # SGD whose momentum is set to 0 leaves the one that it has summed as it is
        self._taking_part: List[int] = []  # their parameters, in Gluon's order
        self.is_local = is_replicable(optimizer)

    def apply(self, slabs: List[Slab]) -> None:
        """Update the weights of these slabs with their gradients, on every replica or on their owners."""
        optimizer = self._optimizer
        keeps_velocity = getattr(optimizer, "momentum", 1) <= 0
        if slabs is not self._slabs or keeps_velocity != self._keeps_velocity:
            self._keeps_velocity = keeps_velocity
            self._prepare(slabs)
        optimizer.param_dict = self._by_index
        before = dict(self._counts)
        if self.is_local:
            for index in self._taking_part:
                self._counts[index] += 1
            # Advance the schedule before the first update reads a rate, so that all replicas get the same rate.
            optimizer.num_update = max(optimizer.num_update, *map(self._counts.__getitem__, self._taking_part), 0)
        for first, operators in self._operators.items():
            attributes = self._attributes(first)
            for operator in operators:
                operator.run(attributes)
        if self._calls:
            checked_rate("Trainer.step", optimizer.learning_rate)
        for context, call in self._calls:
            # MXNet counts updates by device number, which cpu(0) and gpu(0) share; each replica counts the same ones
            counts = dict(before) if self.is_local else self._counts
            use_counts(optimizer, context.device_id, counts)
            call()
        if not self.is_local:
            for slab in slabs:
                for weight in slab.weights[1:]:
                    slab.weights[0].copyto(weight)

    def arrays(self) -> List[List[Array]]:
        """Return the arrays of the optimizer's states, one list per state with one array per replica."""
        held: List[List[Array]] = []
        together = {index for slab, _ in self._flat for index in slab.indices}
        for replica, updater in enumerate(self.updaters.values()):
            own = [state for index, state in sorted(updater.states.items()) if index not in together]
            own += [state for (_, where), state in self._flat.items() if where == replica]
            held.append([array for _, array in leaves(own) if is_device_array(array)])
        return [list(arrays) for arrays in zip(*held)]

    def states(self) -> Dict[int, State]:
        """Return the states of the first replica, by parameter, or of its owner, or joined from those of its parts."""
        found: Dict[int, State] = {}
        for index in self._with_states():
            held = self._held(index)
            is_cut = len(held) > 1 and self._layout.owner_of(index) is not None
            found[index] = _joined(list(held.values()), self._by_index[index].shape) if is_cut else next(iter(held.values()))
        return found

    def counts(self) -> Dict[int, int]:
        """Return the number of updates of each parameter that has a state."""
        return {index: self._counts[index] for index in self._with_states()}

    def _with_states(self) -> List[int]:
        return sorted(set().union(*(updater.states for updater in self.updaters.values())))

    def _held(self, index: int) -> Dict[int, State]:
        """Return the states of a parameter, by replica."""
        updaters = [self.updaters[context] for context in self._layout.contexts_of[index]]
        return {replica: updater.states[index] for replica, updater in enumerate(updaters) if index in updater.states}

    def bytes_per_device(self) -> Dict[str, Dict[str, int]]:
        """Return the bytes of weights, gradients and states: see `Trainer.bytes_per_device`."""
        held = {str(device): {"weights": 0, "gradients": 0, "states": 0} for device in self._layout.devices}
        for param in self._layout.params:
            for kind, arrays in (("weights", values_of(param)), ("gradients", gradients_of(param))):
                for array in arrays or ():
                    held[str(array.context)][kind] += num_bytes(array)
        for device, updater in self.updaters.items():
            arrays = [leaf for _, leaf in leaves(list(updater.states.values())) if is_device_array(leaf)]
            held[str(device)]["states"] = sum(map(num_bytes, arrays))
        return held

    def restore(self, states: Mapping[int, State], counts: Dict[int, int], order: Optional[Sequence[int]] = None) -> None:
        """Set the states of parameters, counts, and the order if it is known: names may sort differently now."""
        created = states_on(self._layout, self._optimizer, states, "a saved state", {})
        self.order = self.order if order is None else list(order)
        for context, updater in self.updaters.items():
            updater.states = created.get(context, {})
            updater.states_synced = dict.fromkeys(updater.states, True)
        self._counts = {**dict.fromkeys(self._by_index, self._optimizer.begin_num_update), **counts}  # some files have no counts
        self._slabs, self._flat = [], {}

    def _run_updater(self, context: Context, indices: List[int], weights: List[Array], gradients: List[Array]) -> None:
        """Update parameters of this device one by one."""
        # NAG's operator reads a weight again after it has written it. But of a weight that oneDNN keeps in a layout of its own,
        # MXNet lets operators read a copy: the replicas would differ.
        is_read_again = type(self._optimizer) is opt.NAG and context.device_type == "cpu"
        written = [weight * 1 for weight in weights] if is_read_again else weights
        self.updaters[context](indices, gradients, written)
        if is_read_again:
            for weight, new in zip(weights, written):
                new.copyto(weight)

    def _attributes(self, first: int) -> Tuple[Any, ...]:
        """Return the attributes of the operator that updates the slab of this parameter; a schedule may return NumPy's numbers.

        Source: MXNet 1.9.1, python/mxnet/optimizer/optimizer.py, SGD.
        """
        optimizer = self._optimizer
        (rate,), (decay,) = learning_rates(optimizer)([first]), weight_decays(optimizer)([first])
        if not -_LARGEST_RATE < rate < _LARGEST_RATE:  # of a schedule; a call for each slab and step would cost
            checked_rate("Trainer.step", rate)
        found: Dict[str, Any] = {"rescale_grad": optimizer.rescale_grad}
        found.update(lrs=(float(rate),), wds=(float(decay),), num_weights=1)
        if optimizer.momentum > 0:
            found["momentum"] = float(optimizer.momentum)
        if optimizer.clip_gradient:
            found["clip_gradient"] = float(optimizer.clip_gradient)
        return _converted(tuple(found.items()))

    def _prepare(self, slabs: List[Slab]) -> None:
        """Choose the slabs that are updated as one, and put their states into contiguous arrays."""
        _check_dtypes(self._optimizer, self._layout.params)  # cast since the trainer was made
        taking_part = {index for slab in slabs for index in slab.indices}
        self._taking_part = [index for index in self.order if index in taking_part]
        single: Dict[Context, Set[int]] = {}  # by the device: parameters that are updated one by one
        self._slabs, self._operators, self._calls = [], {}, []  # if something here raises, the next step prepares anew
        self._flat = {key: state for key, state in self._flat.items() if key[0] in self._layout.slabs}
        if any(map(self._has_new_owner, slabs)):
            self.restore(self.states(), self._counts)
        for slab in slabs:
            is_flat, owner = self._is_flat(slab), slab.owner if self.is_local else 0
            for replica, context in enumerate(slab.contexts):
                if owner in (None, replica) and is_flat:
                    self._add_flat(slab, replica)
                elif owner == replica and self._layout.parts_of(slab.indices[0]):
                    arrays = list(slab.indices), [slab.weights[replica]], [slab.gradients[replica]]
                    self._calls.append((context, partial(self._run_updater, context, *arrays)))
                elif owner in (None, replica):
                    single.setdefault(context, set()).update(slab.indices)
        for context, own in single.items():
            indices = [index for index in self._taking_part if index in own]
            replicas = [self._layout.contexts_of[index].index(context) for index in indices]
            # data() of GluonNLP's weight drop returns a copy
            weights = [self._by_index[index].list_data()[replica] for index, replica in zip(indices, replicas)]
            gradients = [self._by_index[index].list_grad()[replica] for index, replica in zip(indices, replicas)]
            self._calls.append((context, partial(self._run_updater, context, indices, weights, gradients)))
            logger.debug("Trainer: %d parameters on %s are updated one by one", len(indices), context)
        self._slabs = slabs

    def _is_flat(self, slab: Slab) -> bool:
        """Return whether a slab is updated as one."""
        if slab.bucket is None or not self.is_local or type(self._optimizer) not in _ELEMENTWISE:
            return False
        if self._keeps_velocity and any(
            (state[0] if isinstance(state, (list, tuple)) else state) is not None
            for updater in self.updaters.values()
            for state in map(updater.states.get, slab.indices)
        ):
            return False
        has_one_count = len({self._counts[index] for index in slab.indices}) == 1
        return has_one_count or type(self._optimizer) is not opt.Adam

    def _add_flat(self, slab: Slab, replica: int) -> None:
        first, weight, gradient = slab.indices[0], slab.weights[replica], slab.gradients[replica]
        state = self._flat_state(slab, replica)
        operator = self._operator(weight, gradient, state)
        if operator is None:
            updater = opt.get_updater(self._optimizer)
            updater.states, updater.states_synced = {first: state}, {first: True}
            self._calls.append((slab.contexts[replica], partial(updater, first, gradient, weight)))
        else:
            self._operators.setdefault(first, []).append(operator)

    def _operator(self, weight: Array, gradient: Array, state: State) -> Optional[Operator]:
        """Return MXNet's operator of SGD: a step through `mxnet.optimizer.SGD` makes half as many Python calls again."""
        optimizer = self._optimizer
        if type(optimizer) is not opt.SGD or (state is None) != (optimizer.momentum <= 0):
            return None
        if weight.dtype == np.float16 and optimizer.multi_precision:
            return None
        arrays = [array for _, array in leaves([weight, gradient, state]) if is_device_array(array)]
        return Operator("multi_sgd_update" if state is None else "multi_sgd_mom_update", arrays, [weight])

    def _flat_state(self, slab: Slab, replica: int) -> State:
        """Return the states of a slab's parameters as one."""
        if (slab, replica) not in self._flat:
            updater = self.updaters[slab.contexts[replica]]
            flat = self._optimizer.create_state_multi_precision(slab.indices[0], slab.weights[replica])
            for index in slab.indices:
                found, former = slice_of(self._by_index[index]), updater.states
                assert found is not None and found.bucket is slab.bucket, "slabs are divided again when a parameter has moved"
                begin, end = max(found.begin, slab.begin), min(found.begin + found.size, slab.end)
                shape = self._by_index[index].shape if end - begin == found.size else (end - begin,)
                view = _part(flat, begin - slab.begin, end - begin, shape)
                updater.states[index] = filled(view, former[index], f"parameter {index}") if index in former else view
                updater.states_synced[index] = True
            self._flat[slab, replica] = flat
        return self._flat[slab, replica]

    def _has_new_owner(self, slab: Slab) -> bool:
        """Return whether other replicas have states: a parameter that was frozen is trained again, in another bucket."""
        parts = self._layout.parts_of(slab.indices[0])
        owners = set(range(len(parts))) if parts else {slab.owner}
        return slab.owner is not None and any(set(self._held(index)) not in (set(), owners) for index in slab.indices)


def is_replicable(optimizer: opt.Optimizer) -> bool:
    """Return whether an optimizer updates each parameter from its own gradient, state and count alone."""
    is_wrapped = not {"update", "update_multi_precision"}.isdisjoint(vars(optimizer))  # by a program's own function
    return type(optimizer) in _REPLICABLE and not is_wrapped


def is_elementwise(optimizer: opt.Optimizer) -> bool:
    """Return whether an optimizer updates each element from its own values and the parameter's count and rate alone."""
    return type(optimizer) in _ELEMENTWISE and is_replicable(optimizer)


def checked_rate(operation: str, rate: Any) -> float:
    """Return a learning rate; raise `TrainerError` unless it is a finite number, also as a float32."""
    if not is_number(rate) or not -_LARGEST_RATE < rate < _LARGEST_RATE:
        raise TrainerError(f"{operation}: got learning_rate={short(rate)}; expected a finite number. Pass 0.1, for example.")
    return rate


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


def states_on(
    layout: Layout, optimizer: opt.Optimizer, states: Mapping[int, State], fname: str, shapes: Mapping[int, Sequence[int]]
) -> Dict[Context, Dict[int, State]]:
    """Return newly created states on each device, or on the one that updates the parameter, with the values of others.

    Parameters
    ----------
    fname : str
        Where the values were read, for errors.
    shapes : mapping of int to shape
        By the ids of parameters that have no values yet.

    Raises
    ------
    StateError
        The states do not fit the parameters.
    """
    created: Dict[Context, Dict[int, State]] = {}
    for index, value in states.items():
        name, param = layout.names[index], layout.params[index]
        owner = layout.owner_of(index) if is_replicable(optimizer) else 0
        parts = layout.parts_of(index)
        if not has_values(param) and id(param) not in shapes:
            raise StateError(f"load_states: got {name} without a shape yet; expected values. Pass one batch through the network.")
        for replica, context in enumerate(param.list_ctx()):
            if parts or owner in (None, replica):
                if has_values(param):
                    weight = param.list_data()[replica].as_nd_ndarray()
                else:
                    weight = mx.nd.zeros(shapes[id(param)], ctx=context, dtype=param.dtype)
                own = value
                if parts:
                    begin, end = parts[replica]
                    weight, own = weight.reshape((-1,))[begin:end], _cut(value, param.shape, begin, end)
                state = optimizer.create_state_multi_precision(index, weight)
                created.setdefault(context, {})[index] = filled(state, own, f"{fname}, {name}")
    return created


def filled(state: State, value: State, where: str) -> State:
    """Return an optimizer state after copying the values of another into its arrays. The values are MXNet's or NumPy's.

    Raises
    ------
    StateError
        The two differ in form.
    """
    if is_device_array(state):
        is_of_mxnet, has_shape = is_device_array(value), getattr(value, "shape", None) == state.shape
        if has_shape and (is_of_mxnet or value.dtype == np.dtype(state.dtype)):
            state[:] = value if is_of_mxnet else mx.nd.array(value, ctx=state.context, dtype=state.dtype)
            return state
    elif isinstance(state, (list, tuple)):
        if isinstance(value, (list, tuple)) and len(value) == len(state):
            return type(state)(filled(*pair, where) for pair in zip(state, value))
    elif all(isinstance(state, kind) == isinstance(value, kind) for kind in _KINDS):
        return value
    raise StateError(
        f"load_states: got {short(value)} in {where}; expected {short(state)}, as this network's optimizer has it. Make both "
        "as they were when the state was saved, with the same options, such as momentum."
    )


def _cut(state: State, shape: Tuple[int, ...], begin: int, end: int) -> State:
    """Return so many elements of every array of this shape; None, which fits no part, for others."""
    return map_leaves(lambda _, leaf: leaf.reshape((-1,))[begin:end] if getattr(leaf, "shape", None) == shape else None, state)


def _joined(parts: Sequence[State], shape: Tuple[int, ...]) -> State:
    """Return the state of a parameter from those of its parts."""

    def join(_: str, first: Any, *others: Any) -> Any:
        arrays = [one.as_nd_ndarray().as_in_context(first.context) for one in (first, *others)]
        return mx.nd.concat(*arrays, dim=0).reshape(shape)

    return map_leaves(join, *parts)


def _part(state: State, begin: int, size: int, shape: Tuple[int, ...]) -> State:
    """Return views of so many elements of every array."""
    return map_leaves(lambda _, leaf: leaf[begin : begin + size].reshape(shape) if is_device_array(leaf) else leaf, state)

"""The update of the weights: one operation per buffer and device where possible, otherwise one per parameter."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product, takewhile
from typing import Any, Dict, Iterator, List, Optional, Sequence, Set, Tuple

import mxnet as mx
import numpy as np
from mxnet import Context, gluon
from mxnet import optimizer as opt

from ..errors import StateError
from ..nested import Array, is_device_array, leaves, num_bytes
from ..runtime.c_api import Operator
from ..runtime.environment import logger
from ..runtime.mxnet2 import update_one
from .buckets import Bucket, BucketSlice, place_of
from .buffers import Buffer
from .optimizers import AdamW

# They work element by element, so many parameters are updated as one. Adam and AdamW also depend on the number of updates.
_ELEMENTWISE = (opt.SGD, opt.NAG, opt.Adam, AdamW, opt.RMSProp)
_COUNTING = (opt.Adam, AdamW)
# LAMB computes a norm per parameter; MXNet's operator for it takes up to 45. Its states are contiguous as well.
_CONTIGUOUS = (*_ELEMENTWISE, opt.LAMB)
# Their update depends only on weight, gradient, state, count and rate, so every replica computes its own. Others (nadam has a
# shared schedule, sgld draws noise, a user's class may do anything) update one replica, exactly as gluon.Trainer does on one
# device, and the result is copied.
_REPLICABLE = (*_CONTIGUOUS, opt.AdaGrad, opt.AdaDelta, opt.Ftrl, opt.Adamax, opt.FTML, opt.Signum)

_MOST_ELEMENTS = 2**20  # of one update: about 4 ms
_CONTAINERS = (list, tuple, dict, np.ndarray)
State = Any  # an optimizer's state of a parameter: None, an array, or nested tuples of arrays


@dataclass
class _Prepared:
    """Operators for parameters of one replica, each with the parameters that it updates; [] if some cannot have one.

    `states` are those of all the parameters when they were prepared.
    """

    states: List[State]
    operators: List[Tuple[Sequence[int], Operator]]


class Update:
    """Applies an optimizer to all replicas, and keeps its states and counts.

    Parameters
    ----------
    optimizer : mxnet.optimizer.Optimizer
    params : list of gluon.Parameter
    contexts : list of mxnet.Context
    order : list of int
        The positions of the parameters in Gluon's order; see `gluon_order`. On one device the weights are then bit-identical to
        Gluon's, also for optimizers that pass values from one parameter to the next: nadam its schedule, LARS the last rate,
        LBSGD the first one.
    is_sharded : bool
        Each buffer has an owner: the replica that alone keeps its states and updates it.

    Attributes
    ----------
    updaters : list of mxnet.optimizer.Updater
        One per replica. Their states are per parameter, by index; for some optimizers they are views of one array per bucket.
    """

    def __init__(
        self,
        optimizer: opt.Optimizer,
        params: Sequence[gluon.Parameter],
        contexts: Sequence[Context],
        order: Sequence[int],
        *,
        is_sharded: bool = False,
    ) -> None:
        self.updaters = [opt.get_updater(optimizer) for _ in contexts]
        self._optimizer = optimizer
        self._params = list(params)
        self._by_index = dict(enumerate(self._params))  # for an optimizer that updates other groups of parameters, too
        self._contexts = list(contexts)
        self._order = list(order)
        self._is_sharded = is_sharded
        self._counts = self._new_counts({})  # updates of each parameter, by replica
        self._memory: Dict[Tuple[Bucket, int], State] = {}  # states of a bucket, by replica
        self._views: Dict[Tuple[int, int], BucketSlice] = {}  # parameters whose states are views of it, by replica
        self._buffers: List[Buffer] = []
        # The buffers that are updated as one, each with its states by replica, and its operators where they are prepared.
        self._joint: List[Tuple[Buffer, Dict[int, State], Dict[int, Operator]]] = []
        self._early: List[List[int]] = []  # of each replica, parameters that Gluon updates before the schedule advances
        self._single: List[List[int]] = []  # other parameters that are updated one by one
        self._prepared: Dict[int, _Prepared] = {}  # their operators, by replica
        self._most_updates = 0  # of all parameters that take part, when these buffers were prepared
        self._has_schedule = False  # when they were prepared
        self._num_uncounted = 0  # updates since, counted only for the first parameter of each joint buffer
        self._is_known = type(optimizer) in _REPLICABLE
        self._num_updated = len(self._contexts) if self._is_known else 1

    def apply(self, buffers: List[Buffer]) -> None:
        """Update the weights of these buffers with their gradients, on every replica or on their owners."""
        if buffers is not self._buffers or self._has_schedule != (self._optimizer.lr_scheduler is not None):
            self._prepare(buffers)
        self._num_uncounted += 1
        optimizer = self._optimizer
        for replica, early in enumerate(self._early):
            if early:
                self._start(replica)
                self._run_single(early, replica)
        if self._is_known:
            # Advance the schedule before the first update reads a rate, so that all replicas get the same rate.
            optimizer.num_update = max(optimizer.num_update, self._most_updates + self._num_uncounted)
        for replica in range(self._num_updated):
            self._start(replica)
            for buffer, states, operators in self._joint:
                if replica not in states:
                    continue
                if operators:
                    self._run_sgd(buffer.indices[:1], operators[replica])
                    continue
                first, weight, gradient = buffer.indices[0], buffer.weights[replica], buffer.gradients[replica]
                update_one(optimizer, first, weight, gradient, states[replica])
            if self._single[replica] and not self._run_prepared(replica):
                self._run_single(self._single[replica], replica)
        if self._num_updated < len(self._contexts):
            for buffer in buffers:
                for weight in buffer.weights[1:]:
                    buffer.weights[0].copyto(weight)

    def _start(self, replica: int) -> None:
        # MXNet counts updates by device number, which cpu(0) and gpu(0) share; we count by replica.
        device_id = self._contexts[replica].device_id
        self._optimizer._all_index_update_counts = {device_id: self._counts[replica]}
        self._optimizer.param_dict = self._by_index
        self._optimizer._set_current_context(device_id)

    def _run_single(self, indices: List[int], replica: int) -> None:
        weights = [self._params[index]._data[replica] for index in indices]
        gradients = [self._params[index]._grad[replica] for index in indices]
        self.updaters[replica](list(indices), gradients, weights)

    @property
    def order(self) -> List[int]:
        """The positions of the parameters in Gluon's order, when the training of these states began."""
        return list(self._order)

    @property
    def is_alike_anywhere(self) -> bool:
        """Whether the optimizer updates each parameter from its own gradient, state and count alone."""
        return self._is_known

    @property
    def is_alike(self) -> bool:
        """Whether every replica computes its own update; otherwise one replica is updated and copied to the others."""
        return self._num_updated == len(self._contexts)

    def arrays(self) -> List[List[Any]]:
        """Return the arrays of the optimizer's states, one list per state with one array per replica."""
        held: List[List[Any]] = []
        for replica, updater in enumerate(self.updaters):
            alone = [state for index, state in sorted(updater.states.items()) if (index, replica) not in self._views]
            together = [memory for (_, where), memory in self._memory.items() if where == replica]
            held.append([array for _, array in leaves([alone, together]) if is_device_array(array)])
        return [list(arrays) for arrays in zip(*held)]

    def states(self) -> Dict[int, State]:
        """Return the states, by parameter: of the first replica that has them."""
        return {index: state for updater in reversed(self.updaters) for index, state in updater.states.items()}

    def counts(self) -> Dict[int, int]:
        """Return the number of updates of each parameter."""
        self._count()
        return dict(self._counts[0])

    def bytes_held(self) -> List[int]:
        """Return the bytes of the optimizer's states on each device."""
        held = []
        for replica, updater in enumerate(self.updaters):
            alone = [state for index, state in updater.states.items() if (index, replica) not in self._views]
            together = [memory for (_, where), memory in self._memory.items() if where == replica]
            held.append(_num_bytes([alone, together]))
        return held

    def restore(self, states: Sequence[Dict[int, State]], counts: Dict[int, int], order: Optional[Sequence[int]] = None) -> None:
        """Set states, one dict per replica, counts, and the order if it is known: names may sort differently now."""
        self._order = self._order if order is None else list(order)
        for updater, known in zip(self.updaters, states):
            updater.states = dict(known)
            updater.states_synced = dict.fromkeys(known, True)
        # for files without counts
        begun = {index: self._optimizer.begin_num_update for known in states for index in known}
        self._counts = self._new_counts({**begun, **counts})
        self._memory.clear()
        self._views.clear()
        self._buffers, self._joint, self._num_uncounted = [], [], 0

    def _prepare(self, buffers: List[Buffer]) -> None:
        """Choose the buffers that are updated as one, and put their states into contiguous arrays."""
        self._count()
        taking_part = {index for buffer in buffers for index in buffer.indices}
        in_order = [index for index in self._order if index in taking_part]
        early = self._before_schedule(in_order)
        single: Set[int] = set()
        self._joint, self._prepared = [], {}
        replicas = range(self._num_updated)
        owners = {index: replicas if buffer.owner is None else (buffer.owner,) for buffer in buffers for index in buffer.indices}
        for buffer in buffers:
            if buffer.owner is not None:
                self._move_states(buffer, buffer.owner)
            if early.isdisjoint(buffer.indices) and buffer.bucket is not None and type(self._optimizer) in _CONTIGUOUS:
                states = {replica: self._contiguous_states(buffer, replica) for replica in owners[buffer.indices[0]]}
                if self._is_joint(buffer):
                    self._joint.append((buffer, states, self._sgd(buffer, states)))
                    continue
            single.update(buffer.indices)
        own = [[index for index in in_order if replica in owners[index]] for replica in replicas]
        self._early = [[index for index in indices if index in early] for indices in own]
        self._single = [[index for index in indices if index in single and index not in early] for indices in own]
        self._most_updates = max(map(self._num_updates, in_order), default=0)
        self._has_schedule = self._optimizer.lr_scheduler is not None
        self._buffers = buffers
        current = {place.bucket for place in self._views.values()}
        self._memory = {key: memory for key, memory in self._memory.items() if key[0] in current}
        if single:
            logger.debug("Trainer: %s updates %d parameters one by one", type(self._optimizer).__name__, len(single))

    def _before_schedule(self, in_order: Sequence[int]) -> Set[int]:
        """Return the parameters that Gluon updates at the rate of the previous step.

        Gluon's schedule follows the count of the parameter with the most updates. Parameters with fewer updates, because some
        steps left them out, get the previous rate if they come before it. MXNet's SGD counts for several parameters at once.
        """
        if self._optimizer.lr_scheduler is None or not self._is_known or len(set(map(self._num_updates, in_order))) <= 1:
            return set()
        most = max(map(self._num_updates, in_order))
        size = max(1, self._optimizer.aggregate_num) if isinstance(self._optimizer, opt.SGD) else 1
        by_dtype: Dict[Any, List[int]] = {}  # MXNet's Updater sorts them like this if it takes several
        for index in in_order:
            by_dtype.setdefault(np.dtype(self._params[index].dtype) if size > 1 else None, []).append(index)
        groups = [same[begin : begin + size] for same in by_dtype.values() for begin in range(0, len(same), size)]
        before = takewhile(lambda group: most not in map(self._num_updates, group), groups)
        return {index for group in before for index in group}

    def _num_updates(self, index: int) -> int:
        return self._counts[0].get(index, self._optimizer.begin_num_update)

    def _sgd(self, buffer: Buffer, states: Dict[int, State]) -> Dict[int, Operator]:
        """Return MXNet's operator of SGD for each replica with states; {} for other optimizers and dtypes.

        A call through `mxnet.optimizer.SGD` takes the host three times as long.
        """
        return {
            replica: _sgd_operator([(buffer.weights[replica], buffer.gradients[replica], state)])
            for replica, state in states.items()
            if self._has_sgd_operator(buffer.weights[replica], state)
        }

    def _has_sgd_operator(self, weight: Array, state: State) -> bool:
        half = weight.dtype == np.float16 and self._optimizer.multi_precision
        return type(self._optimizer) is opt.SGD and not half and (state is None) == (self._optimizer.momentum <= 0)

    def _run_prepared(self, replica: int) -> bool:
        """Run the operators of the single parameters that are prepared; return whether there are any.

        They have their states after the first update.
        """
        prepared, states = self._prepared.get(replica), self.updaters[replica].states
        if prepared is None:
            if type(self._optimizer) is not opt.SGD or any(index not in states for index in self._single[replica]):
                return False
            prepared = self._prepared[replica] = self._prepare_single(replica)
        if any(states.get(index) is not state for index, state in zip(self._single[replica], prepared.states)):
            del self._prepared[replica]  # the user has replaced them
            return False
        for indices, operator in prepared.operators:
            self._run_sgd(indices, operator)
        return bool(prepared.operators)

    def _prepare_single(self, replica: int) -> _Prepared:
        """Return MXNet's operators of SGD for the parameters that are not in buckets: as Gluon groups them."""
        updater, optimizer = self.updaters[replica], self._optimizer
        prepared = _Prepared([updater.states[index] for index in self._single[replica]], [])
        by_dtype: Dict[Any, List[Tuple[int, Tuple[Array, Array, State]]]] = {}
        for index, state in zip(self._single[replica], prepared.states):
            weight, gradient = self._params[index]._data[replica], self._params[index]._grad[replica]
            is_dense = all(array.stype == "default" for array in (weight, gradient, state) if array is not None)
            is_ready = updater.aggregate_updates and updater.states_synced[index]
            if not (is_dense and is_ready and self._has_sgd_operator(weight, state)):
                return prepared
            by_dtype.setdefault(weight.dtype, []).append((index, (weight, gradient, state)))
        for same in by_dtype.values():
            for some in _in_groups(same, optimizer.aggregate_num):
                indices, arrays = zip(*some)
                prepared.operators.append((indices, _sgd_operator(arrays)))
        return prepared

    def _run_sgd(self, indices: Sequence[int], operator: Operator) -> None:
        optimizer = self._optimizer
        optimizer._update_count(list(indices))
        rates: List[Tuple[str, Any]] = [("lrs", tuple(optimizer._get_lrs(indices))), ("wds", tuple(optimizer._get_wds(indices)))]
        attributes = [*rates, ("num_weights", len(indices)), ("rescale_grad", optimizer.rescale_grad)]
        if optimizer.momentum > 0:
            attributes.append(("momentum", optimizer.momentum))
        if optimizer.clip_gradient:
            attributes.append(("clip_gradient", optimizer.clip_gradient))
        operator.run(*attributes)

    def _is_joint(self, buffer: Buffer) -> bool:
        counts = {self._counts[0].get(index, 0) for index in buffer.indices}
        return isinstance(self._optimizer, _ELEMENTWISE) and (len(counts) == 1 or not isinstance(self._optimizer, _COUNTING))

    def _contiguous_states(self, buffer: Buffer, replica: int) -> State:
        """Return a buffer's part of the states of its bucket; make the states of its parameters views of it."""
        bucket, states = buffer.bucket, self.updaters[replica].states
        assert bucket is not None, "only buffers in a bucket have flat weights"
        if (bucket, replica) not in self._memory:
            weights = bucket.weights[replica]
            self._memory[bucket, replica] = self._optimizer.create_state_multi_precision(buffer.indices[0], weights)
        memory = self._memory[bucket, replica]
        for index in buffer.indices:
            place = place_of(self._params[index])
            assert place is not None and place.bucket is bucket, "buffers are grouped again when a parameter has moved"
            if self._views.get((index, replica)) is not place:
                view = _part(memory, place.begin, place.begin + place.size, self._params[index].shape)
                states[index] = filled(view, states[index], f"parameter {index}") if index in states else view
                self.updaters[replica].states_synced[index] = True
                self._views[index, replica] = place
        return _part(memory, buffer.begin, buffer.end, (buffer.end - buffer.begin,))

    def _move_states(self, buffer: Buffer, owner: int) -> None:
        """Move states to the replica that owns these parameters now: a frozen parameter is trained again, in another bucket."""
        for replica, index in product(range(len(self.updaters)), buffer.indices):
            former = self.updaters[replica]
            if replica != owner and index in former.states:
                weight = self._params[index]._data[owner].as_nd_ndarray()
                moved = self._optimizer.create_state_multi_precision(index, weight)
                self.updaters[owner].states[index] = filled(moved, former.states.pop(index), f"parameter {index}")
                self.updaters[owner].states_synced[index] = former.states_synced.pop(index, True)
                self._views.pop((index, replica), None)

    def _new_counts(self, counts: Dict[int, int]) -> List[Dict[int, int]]:
        """Return the counts of each replica: one dict for all, if each parameter is updated by one of them."""
        return [counts] * len(self._contexts) if self._is_sharded else [dict(counts) for _ in self._contexts]

    def _count(self) -> None:
        """Count the latest updates for every parameter of the joint buffers."""
        for buffer, _, _ in self._joint:
            for counts in self._counts[: 1 if self._is_sharded else self._num_updated]:
                for index in buffer.indices[1:]:
                    counts[index] = counts.get(index, self._optimizer.begin_num_update) + self._num_uncounted
        self._num_uncounted = 0


def _in_groups(parameters: Sequence[Tuple[int, Any]], most: int) -> Iterator[List[Tuple[int, Any]]]:
    """Yield groups of neighbours, with at most so many parameters and, if there are several, `_MOST_ELEMENTS`.

    A device computes its share of a sum between two updates, and the other devices wait for it.
    """
    some: List[Tuple[int, Any]] = []
    size = 0
    for one in parameters:
        weight = one[1][0]
        if some and (len(some) == most or size + weight.size > _MOST_ELEMENTS):
            yield some
            some, size = [], 0
        some.append(one)
        size += weight.size
    if some:
        yield some


def _sgd_operator(parameters: Sequence[Tuple[Array, Array, State]]) -> Operator:
    """Return MXNet's operator of SGD for some parameters, each as (weight, gradient, momentum or None)."""
    name = "multi_sgd_update" if parameters[0][2] is None else "multi_sgd_mom_update"
    arrays = [array for one in parameters for array in one if array is not None]
    return Operator(name, arrays, [weight for weight, _, _ in parameters])


def filled(state: State, value: State, where: str) -> State:
    """Return an optimizer state after copying the values of another into its arrays. The values are MXNet's or NumPy's.

    Raises
    ------
    StateError
        The two differ in form.
    """
    if is_device_array(state):
        if getattr(value, "shape", None) != state.shape:
            found = getattr(value, "shape", type(value).__name__)
            raise StateError(
                f"load_states: got {found} in {where}; expected shape {state.shape}. The file belongs to another network."
            )
        if isinstance(value, np.ndarray) and value.dtype.kind not in "fiub" and value.dtype != state.dtype:
            raise StateError(
                f"load_states: got {value.dtype} in {where}; expected numbers. The file is damaged: use another one."
            )
        state[:] = value if is_device_array(value) else mx.nd.array(value, ctx=state.context, dtype=state.dtype)
        return state
    if isinstance(state, (list, tuple)):
        if not isinstance(value, (list, tuple)) or len(value) != len(state):
            raise StateError(
                f"load_states: got another form of state in {where}; expected {len(state)} arrays. Use the same optimizer "
                "options."
            )
        return type(state)(filled(*pair, where) for pair in zip(state, value))
    if (state is None) != (value is None) or isinstance(state, str) != isinstance(value, str) or isinstance(value, _CONTAINERS):
        raise StateError(
            f"load_states: got another form of state in {where}; expected the optimizer options of the file, such as momentum. "
            "Make the trainer with them."
        )
    return value


def _num_bytes(state: State) -> int:
    if isinstance(state, (list, tuple)):
        return sum(map(_num_bytes, state))
    return num_bytes(state) if is_device_array(state) else 0


def _part(state: State, begin: int, end: int, shape: Tuple[int, ...]) -> State:
    """Return views of elements [begin, end) of every array."""
    if isinstance(state, (list, tuple)):
        return type(state)(_part(one, begin, end, shape) for one in state)
    return state[begin:end].reshape(shape) if is_device_array(state) else state

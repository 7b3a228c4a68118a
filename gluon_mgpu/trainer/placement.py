"""Where the parameters of a network are in memory, and what has changed since they were put there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np
from mxnet import gluon

from ..errors import TrainerError
from ..nested import Array, num_bytes
from .buckets import place, place_of
from .buffers import Buffer, group, one_each
from .parameters import Params, blocks_of, common_contexts, named_params

_NUM_STEPS_CHECKED = 2  # after parameters were moved into buckets


class Placement:
    """Puts parameters into buckets, groups them into buffers, and notices when Gluon or the user changes them.

    Parameters
    ----------
    params : gluon.Block, dict of gluon.Parameter, or sequence of gluon.Parameter
        In structural order.
    bucket_bytes : int
        See `buckets.place`.
    shards_optimizer : bool
        Each bucket, and each parameter outside of buckets, has one device that updates it: its owner. Buckets are smaller by the
        number of devices.

    Attributes
    ----------
    names : list of str
        Structural names (`0.weight`) for a Block, the parameters' own (`dense7_weight`) otherwise.
    structural : bool
        Whether the names are structural.
    params : list of gluon.Parameter
    contexts : list of mxnet.Context
    trainable : list of int
        Parameters with values and a gradient.
    shapeless : list of int
        Other trainable parameters: the first batch has yet to decide their shapes.
    buffers : list of Buffer
        Of all trainable parameters.
    is_complete : bool
        All shapes are known, and all parameters are in their places.
    has_begun : bool
        A step or a pass has used the parameters: from then on they must keep their devices and dtypes.

    Raises
    ------
    TrainerError
        The parameters are not parameters, not initialised, or not all on the same devices.
    """

    def __init__(self, params: Params, bucket_bytes: int, *, shards_optimizer: bool = False) -> None:
        named = named_params(params)
        self.names = list(named)
        self.structural = isinstance(params, gluon.Block)
        self.params = list(named.values())
        self.contexts = common_contexts(named)
        self.trainable: List[int] = []
        self.shapeless: List[int] = []
        self.buffers: List[Buffer] = []
        self.is_complete = self.has_begun = False
        self.is_sharded = shards_optimizer and len(self.contexts) > 1
        self._owners: Dict[Any, int] = {}  # by bucket, or by the index of a parameter that is not in one
        self._bucket_bytes = max(1, bucket_bytes // len(self.contexts)) if self.is_sharded else bucket_bytes
        self._dense = [block for block in blocks_of(params) if isinstance(block, gluon.nn.Dense)] if self.structural else []
        self._at_first: Dict[int, Tuple[Any, Any]] = {}  # of each parameter: Gluon's list of its devices, and its dtype
        self._seen: List[Tuple[gluon.Parameter, Any, float, float]] = []  # each with its list of gradients and its multipliers
        self.former_weights: List[Array] = []  # weights before they were moved, checked in the next steps
        self._num_checks_left = 0

    def move(self) -> None:
        """Put parameters into buckets that have no place yet."""
        former = place(self.params, self._bucket_bytes)
        if former:
            self.former_weights, self._num_checks_left = former, _NUM_STEPS_CHECKED

    def regroup(self) -> None:
        """Find the trainable parameters and group them into buffers."""
        params = self.params
        self._seen = [(param, param._grad, param.lr_mult, param.wd_mult) for param in params]
        wanted = [index for index, param in enumerate(params) if param.grad_req != "null"]
        self.trainable = [index for index in wanted if params[index]._data is not None]
        self.shapeless = [index for index in wanted if params[index]._data is None]
        self.is_complete = not self.shapeless
        if self.is_sharded:
            self._choose_owners()
        self.buffers = self._owned(group(params, self.trainable))

    def one_each(self, indices: Sequence[int]) -> List[Buffer]:
        """Return one buffer per parameter."""
        return self._owned(one_each(self.params, indices))

    def owner_of(self, index: int) -> Optional[int]:
        """Return the replica that updates a parameter; None if all do, or if it was not chosen yet."""
        found = place_of(self.params[index])
        return self._owners.get(found.bucket if found else index)

    def has_changed(self) -> bool:
        """Return whether Gluon made new arrays, or the user set a multiplier, since `regroup`."""
        for param, gradients, lr_mult, wd_mult in self._seen:
            if param._grad is not gradients or param.lr_mult != lr_mult or param.wd_mult != wd_mult:
                return True
        return False

    def follow_one(self, index: int) -> None:
        """Check only one parameter for changes from now on."""
        param = self.params[index]
        self._seen = [(param, param._grad, param.lr_mult, param.wd_mult)]

    def check_unmoved(self) -> None:
        """Raise `TrainerError` if a parameter was put on other devices, initialised again, or cast since the first step.

        A network hybridized with `static_alloc` and `static_shape` would still write gradients into the old arrays, and the
        optimizer's states would not fit.
        """
        for index, (name, param) in enumerate(zip(self.names, self.params)):
            known = (param._ctx_list, param.dtype)
            contexts, dtype = known
            if param._data is not None:
                contexts, dtype = self._at_first.setdefault(index, known)
                self.has_begun = True
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

    def check_dense(self) -> None:
        """Raise `TrainerError` if a Dense layer on a CPU trains only its bias: MXNet computes no gradient for it there.

        MXNet still marks that gradient as fresh, so every step would apply an old gradient again.
        """
        for block in self._dense if self.contexts[0].device_type == "cpu" else ():
            if block.bias is not None and block.weight.grad_req == "null" and block.bias.grad_req != "null":
                raise TrainerError(
                    f"Trainer: got {block.weight.name} frozen and {block.bias.name} trained; expected both or none on a "
                    "CPU, where "
                    "MXNet computes no gradient of such a bias. Freeze both, or set lr_mult and wd_mult of the weight to 0."
                )

    def check_former_weights(self) -> None:
        """Raise `TrainerError` if a graph that was recorded before `move` wrote gradients into the former arrays."""
        if any(weight._fresh_grad for weight in self.former_weights):
            self.former_weights = []
            raise TrainerError(
                "Trainer.step: got gradients of a graph that was recorded before the Trainer moved the parameters into its "
                "buckets; expected one that was recorded after. Make the Trainer before recording, and pass one batch through a "
                "network whose shapes are decided by its first batch before that."
            )
        self._num_checks_left -= 1
        if not self._num_checks_left:
            self.former_weights = []

    def bytes_held(self) -> List[Tuple[int, int]]:
        """Return the bytes of weights and of gradients on each device."""
        held = []
        for replica in range(len(self.contexts)):
            weights, gradients = {}, {}  # by array, as several parameters are in one
            for param in self.params:
                found = place_of(param)
                weight = found.bucket.weights if found else param._data
                gradient = found.bucket.gradients if found else param._grad
                weights.update({id(array): num_bytes(array) for array in (weight or [])[replica : replica + 1]})
                gradients.update({id(array): num_bytes(array) for array in (gradient or [])[replica : replica + 1]})
            held.append((sum(weights.values()), sum(gradients.values())))
        return held

    def _owned(self, buffers: List[Buffer]) -> List[Buffer]:
        return [replace(one, owner=self.owner_of(one.indices[0])) for one in buffers] if self.is_sharded else buffers

    def _choose_owners(self) -> None:
        """Give each new bucket or parameter to the device that has the fewest bytes so far, the largest first.

        MXNet's store chooses the device of each sum by the same rule, except among equals. A sum on another device than the owner
        is copied there.
        """
        sizes: Dict[Any, int] = {}
        for index in self.trainable:
            found = place_of(self.params[index])
            sizes[found.bucket if found else index] = num_bytes((found.bucket.weights if found else self.params[index]._data)[0])
        self._owners = {key: owner for key, owner in self._owners.items() if key in sizes}
        held = [0] * len(self.contexts)
        for key in sorted(sizes, key=lambda key: (key not in self._owners, -sizes[key])):
            owner = self._owners.setdefault(key, held.index(min(held)))
            held[owner] += sizes[key]

"""Where the parameters of a network are in memory, in groups with the same devices, and what has changed since."""

from __future__ import annotations

from dataclasses import replace
from operator import is_not
from typing import Any, Dict, Iterable, List, Optional, Sequence, Set, Tuple, Union

import numpy as np
from mxnet import Context, gluon

from ..errors import TrainerError
from ..mxnet_internals.blocks import compiled_graph, compiled_with
from ..mxnet_internals.parameters import contexts_of, gradients_of, has_dense_gradient, has_values, values_of
from ..nested import Array, num_bytes
from .parameters import Params, blocks_of, check_initialised, named_params, spans_devices
from .slab import Bucket, Slab, cut, multipliers_of, parts_of, place, slab_of, slabs_of, slice_of
from .wrong_graphs import check_graphs, hybrid_blocks


class Layout:
    """Puts parameters into buckets, divides them into slabs, and notices when Gluon or the user changes them.

    ```
    Pipeline on [[gpu0, gpu1], [gpu2, gpu3]]      weights of stage 0     on gpu0, gpu2     one group
                                                  weights of stage 1     on gpu1, gpu3     another
                                                  an embedding in both   on all four       a third
    other networks                                all parameters are one group
    ```

    Parameters
    ----------
    params : gluon.Block, dict of gluon.Parameter, or sequence of gluon.Parameter
        In structural order: in the order of the layers, not sorted by name (where `dense10_` comes before `dense9_`).
    bucket_bytes : int
        See `slab.place`.
    shards_optimizer : bool
        Each bucket, and each parameter outside of buckets, has one device that updates it: its owner.
    cut_bytes : int, optional
        Larger parameters that are alone in their bucket are cut into parts, one for each device, each with an owner.

    Attributes
    ----------
    names : list of str
        Structural names (`0.weight`) for a Block, the parameters' own (`dense7_weight`) otherwise.
    structural : bool
        Whether the names are structural.
    params : list of gluon.Parameter
    groups : dict of tuple of Context to list of int
        The parameters that share devices, by the devices of their replicas: usually one group of all.
    contexts : list of mxnet.Context
        One per replica: where its data go.
    devices : list of mxnet.Context
        All devices, each once.
    contexts_of : dict of int to list
        By parameter: the devices of its replicas.
    trainable : list of int
        Parameters with values and a gradient.
    shapeless : list of int
        Other trainable parameters: the first batch has yet to decide their shapes.
    spans_devices : bool
        Whether it is a network such as a `Pipeline`, whose parameters may be on different devices.
    is_sharded : bool
        Whether there are owners.
    slabs : list of Slab
        Of all trainable parameters.
    everywhere : list of Slab
        The same without owners: all devices get the sum.
    has_new_graphs : bool
        Whether a block of the network was traced since its graphs were checked.
    version : int
        It has grown if `look` has found parameters with new arrays or other memory, or that the user has set a multiplier.

    Raises
    ------
    TrainerError
        The parameters are not parameters, not initialised, or not all on the same devices.
    """

    def __init__(self, params: Params, bucket_bytes: int, *, shards_optimizer: bool, cut_bytes: Optional[int] = None) -> None:
        named = named_params(params)
        self.names = list(named)
        self.structural = isinstance(params, gluon.Block)
        self.params = list(named.values())
        self.spans_devices = spans_devices(params)
        self.groups: Dict[Tuple[Context, ...], List[int]] = {}
        check_initialised("Trainer", named)
        for index, param in enumerate(self.params):
            self.groups.setdefault(tuple(param.list_ctx()), []).append(index)
        first, *others = self.groups
        if others and not self.spans_devices:
            name = self.names[self.groups[others[0]][0]]
            raise TrainerError(
                f"Trainer: got {name} on {list(others[0])} and others on {list(first)}; expected all parameters on the same "
                "devices. Call net.collect_params().reset_ctx(ctx)."
            )
        self.contexts: List[Context] = list(getattr(params, "replica_contexts", first))
        self.devices: List[Context] = list(getattr(params, "all_contexts", self.contexts))
        # by the device of a pipeline's recorded output: those of the stages before it
        self.stages_before: Dict[Context, Set[Context]] = {}
        self._last_of: Dict[Context, Context] = {}  # by device of a pipeline: the last one of its replica
        for stages in params.devices if self.spans_devices else ():  # type: ignore[union-attr]
            self.stages_before[stages[-1]] = set(stages) - {stages[-1]}
            for device in stages:
                self._last_of.setdefault(device, stages[-1])
        self.contexts_of = {index: list(contexts) for contexts, indices in self.groups.items() for index in indices}
        self.trainable: List[int] = []
        self.shapeless: List[int] = []
        self.slabs: List[Slab] = []
        self.everywhere: List[Slab] = []
        self.needs_sum = max(map(len, self.groups)) > 1
        self.is_sharded = shards_optimizer and self.needs_sum
        self._owners: Dict[Union[Bucket, int], int] = {}  # by bucket, or by the index of a parameter that is not in one
        self._bucket_bytes, self._cut_bytes = bucket_bytes, cut_bytes
        self._parts: Dict[int, List[Slab]] = {}  # by parameter that is cut
        self._dense = [block for block in blocks_of(params) if isinstance(block, gluon.nn.Dense)] if self.structural else []
        self._at_first: Dict[int, Tuple[object, object]] = {}  # of each parameter: Gluon's list of its devices, and its dtype
        self._seen: List[Optional[List[Array]]] = []  # Gluon's lists of gradients
        self._multipliers: List[Tuple[float, float]] = []
        self.version = self._placed = 0
        self._roots: List[Any] = [params] if self.structural else []
        self._hybrid: List[gluon.HybridBlock] = []
        self._graphs: List[object] = []  # theirs, which were checked
        self.has_new_graphs, self._is_searched = True, False

    def num_replicas(self, devices: Iterable[Context]) -> int:
        """Return how many replicas are on these devices, at least: one on each, or on all devices of a pipeline."""
        return len({self._last_of.get(device, device) for device in devices})

    def follow(self, *, looks: bool = True, by_hand: bool = False) -> None:
        """Update the places where Gluon has made new arrays, or the first batch has decided shapes.

        Without `looks`, as `look` has found it before. With `by_hand`, any block may have computed the gradients.

        Raises
        ------
        TrainerError
            A parameter was moved to other devices, or MXNet computes wrong gradients in a graph of the network.
        """
        if (looks and self.has_changed()) or self.version != self._placed or not self._at_first:
            self._check_unmoved()
            self.place()
        if self.has_new_graphs:
            self.check_graphs()
        if by_hand and not self._is_searched:  # once: it looks at all objects of the process
            check_graphs("Trainer", compiled_with(set(map(id, self.params))), trains=True)
            self._is_searched = True

    def watch(self, *blocks: Any) -> None:
        """Check the graphs of these blocks in addition to those of the network."""
        self._roots, self.has_new_graphs = [*self._roots[: self.structural], *blocks], True

    def check_graphs(self) -> None:
        """Raise `ModesError` if MXNet computes wrong gradients in a graph of the network; again if there is another one."""
        self._hybrid = hybrid_blocks(self._roots)
        check_graphs("Trainer", self._hybrid, trains=True)
        self._graphs, self.has_new_graphs = list(map(compiled_graph, self._hybrid)), False

    def place(self) -> None:
        """Put parameters into buckets that have no place yet, and divide the trainable ones into slabs."""
        params = self.params
        self._check_dense()
        for indices in self.groups.values():
            place([params[i] for i in indices], self._bucket_bytes)
        self._placed = self.look()
        wanted = [index for index, param in enumerate(params) if param.grad_req != "null"]
        self.trainable = [index for index in wanted if has_values(params[index])]
        self.shapeless = [index for index in wanted if not has_values(params[index])]
        if self.is_sharded:
            self._choose_owners()
        trained, slabs = set(self.trainable), []
        for contexts, indices in self.groups.items():
            slabs += slabs_of(params, [index for index in indices if index in trained], contexts)
        self._parts = {}
        self.slabs = self._owned(slabs)
        self.everywhere = [replace(slab, owner=None) for slab in self.slabs]

    def one_each(self, indices: Sequence[int]) -> List[Slab]:
        """Return one slab per parameter, or its parts."""
        found: List[Slab] = []
        for index in indices:
            found += self._parts.get(index) or self._owned([slab_of(self.params[index], index, self.contexts_of[index])])
        return found

    def owner_of(self, index: int) -> Optional[int]:
        """Return the replica that updates a parameter, 0 if it was not chosen yet; None if all do."""
        param = self.params[index]
        if not self.is_sharded or not has_dense_gradient(param):  # a sparse update writes few rows; a copy would write all
            return None
        found = slice_of(param)
        return self._owners.get(found.bucket if found else index, 0)

    def parts_of(self, index: int) -> List[Tuple[int, int]]:
        """Return the elements of a parameter that each replica updates; none if they are not divided."""
        num = len(self.contexts_of[index])
        if self._cut_bytes is None or not self.is_sharded or num < 2:
            return []
        return parts_of(self.params[index], num, self._cut_bytes)

    def look(self) -> int:
        """Look at all parameters, and return their `version`."""
        multipliers = list(map(multipliers_of, self.params))  # no Python call for each
        if any(map(is_not, map(gradients_of, self.params), self._seen)) or multipliers != self._multipliers:
            self._seen, self._multipliers = list(map(gradients_of, self.params)), multipliers
            self.version += 1
            self.has_new_graphs = True  # PReLU's slope may be trained now
        self.has_new_graphs = self.has_new_graphs or any(map(is_not, map(compiled_graph, self._hybrid), self._graphs))
        return self.version

    def has_changed(self) -> bool:
        """Return whether parameters have changed since `place`."""
        return self.look() != self._placed

    def _check_unmoved(self) -> None:
        """Raise `TrainerError` if a parameter was put on other devices, initialised again, or cast since the first step.

        A network hybridized with `static_alloc` and `static_shape` would still write gradients into the old arrays, and the
        optimizer's states would not fit.
        """
        for index, (name, param) in enumerate(zip(self.names, self.params)):
            now = (contexts_of(param), param.dtype)
            contexts, dtype = self._at_first.setdefault(index, now) if has_values(param) else now
            is_there = contexts is contexts_of(param) and param.list_ctx() == self.contexts_of[index]
            if not (is_there and np.dtype(dtype) == np.dtype(param.dtype)):
                raise TrainerError(
                    f"Trainer: got parameter {name} initialised again, moved or cast, as {np.dtype(param.dtype)} on "
                    f"{param.list_ctx()}; expected the arrays of the first step, {np.dtype(dtype)} on {self.contexts_of[index]}. "
                    "Call net.hybridize() again and make a new Trainer after initialize(force_reinit=True), reset_ctx(), cast()."
                )

    def _check_dense(self) -> None:
        """Raise `TrainerError` if a Dense layer on a CPU trains only its bias: MXNet computes no gradient for it there.

        MXNet still marks that gradient as fresh, so every step would apply an old gradient again.
        """
        for block in self._dense if self.contexts[0].device_type == "cpu" else ():
            if block.bias is not None and block.weight.grad_req == "null" and block.bias.grad_req != "null":
                raise TrainerError(
                    f"Trainer: got {block.weight.name} frozen and {block.bias.name} trained; expected both or none on a "
                    "CPU, where MXNet computes no such gradient. Freeze both, or set lr_mult and wd_mult of the weight to 0."
                )

    def _owned(self, slabs: List[Slab]) -> List[Slab]:
        found: List[Slab] = []
        for slab in slabs:
            first = slab.indices[0]
            parts = self.parts_of(first)
            if parts:
                self._parts[first] = cut(slab, parts)
            found += self._parts[first] if parts else [replace(slab, owner=self.owner_of(first))]
        return found

    def _choose_owners(self) -> None:
        """Give each new bucket or parameter to the device that has the fewest bytes so far, the largest first.

        MXNet's store chooses the device of each sum by the same rule, except among equals. A sum on another device than the owner
        is copied there.
        """
        known: Dict[Union[Bucket, int], Tuple[int, Tuple[Context, ...]]] = {}  # bytes and devices
        for index in self.trainable:
            if self.owner_of(index) is not None and not self.parts_of(index):
                found = slice_of(self.params[index])
                weights = found.bucket.weights if found else values_of(self.params[index])
                known[found.bucket if found else index] = num_bytes(weights[0]), tuple(self.contexts_of[index])
        self._owners = {key: owner for key, owner in self._owners.items() if key in known}
        held: Dict[Tuple[Context, ...], List[int]] = {}  # bytes on the devices of a group
        for key in sorted(known, key=lambda key: (key not in self._owners, -known[key][0])):
            size, contexts = known[key]
            own = held.setdefault(contexts, [0] * len(contexts))
            owner = self._owners.setdefault(key, own.index(min(own)))
            own[owner] += size

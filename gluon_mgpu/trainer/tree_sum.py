"""Gradients summed by one binary tree over virtual shards: the sum has the same bits on any number of devices.

```
8 virtual shards on 2 devices       ((0+1) + (2+3))  +  ((4+5) + (6+7))
                                     └── cpu(0) ──┘     └── cpu(1) ──┘
```

A device adds up its shards like a binary counter: two sums of the same size become one as soon as both are complete. So it holds
one sum of each size at most, and its last sum is a part of the common tree.
"""

from __future__ import annotations

import hashlib
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

import mxnet as mx
from mxnet import Context

from ..checks import whole_number
from ..distributed import Group, group
from ..distributed.membership import QueuedSum
from ..errors import TrainerError
from ..nested import Array
from ..refusals import refusal
from ..runtime.device_threads import in_own_thread
from ..runtime.openmp_threads import ask_threads
from .slab import Slab, Summand
from .sums import DeviceSum


class Node(NamedTuple):
    """The sum over some virtual shards, in arrays of one device.

    Attributes
    ----------
    part : tuple of int
        The first shard, and the number of shards.
    arrays : list of NDArray
    """

    part: Tuple[int, int]
    arrays: List[Array]


def append(nodes: List[Node], node: Node) -> None:
    """Append the sum of the shards that follow, and add it to the one before as long as they are siblings."""
    while nodes and are_siblings(nodes[-1].part, node.part):
        left = nodes.pop()
        add_to(left.arrays, node.arrays)
        node = Node((left.part[0], 2 * left.part[1]), left.arrays)
    nodes.append(node)


def are_siblings(left: Tuple[int, int], right: Tuple[int, int]) -> bool:
    """Return whether two subtrees (first shard, size) have one parent."""
    return left[1] == right[1] and left[0] + left[1] == right[0] and left[0] % (2 * left[1]) == 0


def joined(nodes: Iterable[Node]) -> List[Node]:
    """Return these sums, in the order of the shards, added up as far as they are siblings."""
    found: List[Node] = []
    for node in nodes:
        append(found, node)
    return found


def add_to(sums: List[Array], others: List[Array]) -> None:
    """Queue sums on the device of the first arrays; the others may be on another one.

    It has its own thread for them: MXNet keeps memory for each operator in turn, 128 times in other threads.
    """
    if not sums:
        return
    context = sums[0].context
    copies = [one.as_in_context(context) for one in others]

    def add() -> None:
        for one, other in zip(sums, copies):
            mx.nd.elemwise_add(one, other, out=one)

    in_own_thread(context, add)


def complete_parts(begin: int, end: int) -> List[Tuple[int, int]]:
    """Return the largest complete subtrees that cover the shards from `begin` to `end`: pairs of first shard and size.

    Examples
    --------
    >>> complete_parts(0, 6), complete_parts(3, 8)
    ([(0, 4), (4, 2)], [(3, 1), (4, 4)])
    """
    return [node.part for node in joined(Node((number, 1), []) for number in range(begin, end))]


def draw_base(context: Context) -> Tuple[int, bool]:
    """Draw a number from MXNet's generator of a device, in process 0 for the whole job. Waits for it.

    The state of MXNet's generators cannot be read, so virtual shards and checkpoints reseed them. The seeds are derived from this
    number, which is the same for every program with the same initial seed. Also return whether all processes drew the same one.
    """
    drawn = int(mx.nd.random.randint(0, 2**31 - 1, shape=(1,), ctx=context).asscalar())
    processes = group()  # generators with the same seed diverge if processes draw for parts of different sizes
    found = [drawn] if processes is None else list(map(int, processes.all_gather_bytes(str(drawn).encode())))
    return found[0], len(set(found)) == 1


def seed_of(base: int, step: int, rank: int = 0) -> int:
    """Return the seed of MXNet's generators for a step, of a process or a virtual shard.

    Examples
    --------
    >>> seed_of(7, 100) == seed_of(7, 100) != seed_of(7, 200)
    True
    """
    digest = hashlib.sha256(f"{base} {step} {rank}".encode()).digest()
    return int.from_bytes(digest[:4], "little") & 0x7FFFFFFF


class VirtualShards:
    """The virtual shards of a trainer: how many, and where their random numbers come from.

    Parameters
    ----------
    number : int
    contexts : sequence of mxnet.Context

    Attributes
    ----------
    base : int, optional
        The seeds of a run are derived from it. The first batch draws it.
    batches : int
        Batches so far.
    """

    def __init__(self, number: object, contexts: Sequence[Context]) -> None:
        self.number = whole_number("Trainer", "virtual_shards", number, high=2**16, advice="8 fits 1, 2, 4 and 8 devices.")
        self.base: Optional[int] = None
        self.batches = 0
        processes = group()
        num_processes = 1 if processes is None else processes.process.num_processes
        num_devices = len(contexts) * num_processes
        if self.number % num_devices:
            where = f"{num_devices} devices" + (f" of {num_processes} processes" if num_processes > 1 else "")
            raise TrainerError(
                f"Trainer: got virtual_shards={self.number} on {where}; expected a multiple of {num_devices}, so that each "
                "device computes equally many. 8 fits 1, 2, 4 and 8 devices."
            )
        for context in contexts:
            threads = ask_threads(context.device_id) if context.device_type == "cpu" else 1
            if threads > 1:
                raise TrainerError(
                    f"Trainer: got virtual_shards={self.number} and {context}, which computes with {threads} threads; expected "
                    "one: with several, operators round differently on another number of devices. Pass "
                    "use_devices(..., one_thread=True), or set OMP_NUM_THREADS=1 before the program starts."
                )

    def seed_of(self, shard: int) -> int:
        """Return the seed of a virtual shard of the current batch; `number` stands for what comes after the batch."""
        assert self.base is not None, "it was drawn before the batch"
        return seed_of(self.base, self.batches, shard)

    def state(self) -> Dict[str, Any]:
        """Return what `restore` takes, as values for JSON."""
        return {"number": self.number, "base": self.base, "batches": self.batches}

    def restore(self, state: Dict[str, Any]) -> None:
        """Continue from the result of `state`; anything else raises an error, and changes nothing."""
        for number in (state["batches"], 0 if state["base"] is None else state["base"]):
            whole_number("load_states", "a number of virtual shards", number, low=0, advice="Save it again.")
        self.base, self.batches = state["base"], state["batches"]


class TreeSum(DeviceSum):
    """A `Sum` over virtual shards in the order of one tree; the devices share weights as without.

    Over processes, each complete subtree is sent to all, and all add them up in the same order: with n processes, n times the
    gradients are sent, where an ordinary sum sends them twice.

    Parameters
    ----------
    virtual : VirtualShards
    contexts : sequence of mxnet.Context
    """

    def __init__(self, virtual: VirtualShards, contexts: Sequence[Context]) -> None:
        super().__init__("device")
        self.virtual, self._contexts = virtual, list(contexts)
        self._group: Optional[Group] = group()
        self._nodes: List[List[Node]] = [[] for _ in self._contexts]
        # arrays that are sent to all processes, and what sends them; by the place of the part, and their shapes
        self._slots: Dict[Tuple[object, ...], Tuple[List[Array], List[QueuedSum]]] = {}
        self._root: Optional[List[Array]] = None  # of the latest batch, on the first device
        self._total: Optional[List[Array]] = None  # of earlier batches of the same update
        self._targets: List[List[Array]] = []  # the gradients of each device
        self._slabs: List[Slab] = []  # of the latest batch

    def begin(self, slabs: List[Slab]) -> List[List[Array]]:
        """Begin a batch with gradients in these slabs, and return their arrays: a list for each device."""
        if self.virtual.base is None:
            self.virtual.base, _ = draw_base(self._contexts[0])
        self._nodes = [[] for _ in self._contexts]  # without those of a batch that an exception has stopped
        if slabs != self._slabs:  # frozen or thawed since, for example
            if self._total is not None:
                what = "gradients accumulated of other parameters, or with other multipliers"
                raise refusal("train_batch", "virtual_shards", "accumulated gradients", what)
            self._slabs = slabs
            self._targets = [[slab.gradients[i].as_nd_ndarray() for slab in slabs] for i in range(len(self._contexts))]
            self._slots = {}
        return self._targets

    def add(self, number: int, replica: int, arrays: Sequence[Array]) -> None:
        """Add what a virtual shard has contributed: its gradients, which may be overwritten afterwards."""
        nodes = self._nodes[replica]
        append(nodes, Node((number, 1), list(arrays)))
        if nodes[-1].part[1] == 1:  # it was not added to the sum before, which has its own memory
            nodes[-1] = Node(nodes[-1].part, [one.copy() for one in arrays])

    def finish(self, num_leaves: int, num_shards: int, like: Sequence[Array]) -> List[Array]:
        """Add up the sums of all devices and processes, and return the arrays of the root, on the first device.

        Parameters
        ----------
        num_leaves : int
            Virtual shards with examples, over all processes.
        num_shards : int
            Virtual shards, times the parts of each, over all processes.
        like : sequence of NDArray
            Arrays of the first device, of the shapes that were added.
        """
        nodes = joined(one for own in self._nodes for one in own)
        self._nodes = [[] for _ in self._contexts]
        if self._group is not None:
            nodes = joined(self._of_all_processes(self._group, nodes, num_leaves, num_shards, like))
        for right in nodes[1:]:
            add_to(nodes[0].arrays, right.arrays)
        # copies with 0 for -0: a sum with the zeros of other processes has done so, too
        self._root = in_own_thread(self._contexts[0], lambda: [one + 0.0 for one in nodes[0].arrays])
        return self._root

    def hold(self) -> bool:
        """Add the sum of the latest batch to those of earlier batches of the same update."""
        if self._root is None:
            raise refusal("Trainer.step", "virtual_shards", "a loop by hand")
        if self._total is None:
            self._total = self._root
        else:
            add_to(self._total, self._root)
        self._root = None
        return True

    def drop(self) -> None:
        """Drop all sums."""
        self._nodes = [[] for _ in self._contexts]
        self._root = self._total = None

    def run(self, slabs: Sequence[Summand]) -> None:
        """Write the sum to the gradients of every device, bit-identical on each."""
        if self._root is not None or self._total is None:
            self.hold()
        total, self._total = self._total or [], None
        for targets in self._targets:
            for array, gradient in zip(total, targets):
                array.copyto(gradient)

    def _of_all_processes(
        self, processes: Group, nodes: List[Node], num_leaves: int, num_shards: int, like: Sequence[Array]
    ) -> List[Node]:
        """Return the sums of the complete subtrees of all processes."""
        each = num_shards // processes.process.num_processes
        parts: List[Tuple[int, int]] = []
        for rank in range(processes.process.num_processes):
            begin, end = (min(num_leaves, (rank + i) * each) for i in (0, 1))
            parts += complete_parts(begin, end)
        own = {node.part: node for node in nodes}
        found: List[Node] = []
        for at, part in enumerate(parts):
            known = (at, *(one.shape for one in like))  # networks may have other running statistics
            if known not in self._slots:
                arrays = [mx.nd.empty(one.shape, ctx=self._contexts[0], dtype=one.dtype) for one in like]
                self._slots[known] = arrays, [processes.all_reduce([array]) for array in arrays]
            arrays, sums = self._slots[known]
            for i, array in enumerate(arrays):
                if part in own:
                    own[part].arrays[i].copyto(array)
                else:
                    mx.nd.zeros_like(array, out=array)
                sums[i].run(-at)
            found.append(Node(part, arrays))
        return found

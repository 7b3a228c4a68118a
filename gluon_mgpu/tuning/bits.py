"""Does a training have the same bits on other devices and in other processes? If not, which tensor is the first that differs?

```
train everywhere ─► hashes of each step ─► first step that differs ─► train up to it again, and hash every tensor of that step
```
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import Context, autograd, gluon

from ..data import load_digits
from ..data_parallel.passes import Passes
from ..data_parallel.sharding import split_batch
from ..data_parallel.step import make_step
from ..devices.select import use_devices
from ..distributed.process import this_process
from ..errors import StepError, TrainerError
from ..models import resnet18
from ..nested import Array, leaves
from ..runtime.c_api import values_of
from ..trainer.trainer import Trainer
from ..trainer.virtual_shards import TreeReduction
from .agreement import Recipe
from .batch_size.workload import Question, load_workload

Hashes = Dict[str, Any]
Entry = List[str]  # the kind of a tensor, its name, and its hash
Tell = Callable[[str], None]

LOSSES, WEIGHTS, STATES = KINDS = ("losses", "weights", "states")
_GRACE_S = "5"


@dataclass(frozen=True)
class Training:
    """A training that is repeated with the same batches.

    Attributes
    ----------
    workload : str
        `mlp` or `resnet18`, on the digits; or a function as of `find_batch_size`, which returns (net, loss, trainer, X, y).
    num_steps, num_shards, batch_size : int
    optimizer : str
    learning_rate : float
        Of the networks of this module.
    """

    workload: str
    num_steps: int = 10
    num_shards: int = 8
    batch_size: int = 32
    optimizer: str = "sgd"
    learning_rate: float = 0.05

    def make(self, contexts: Sequence[Context]) -> Tuple[gluon.Block, Any, Any, Iterator[Tuple[Any, Any]]]:
        """Return network, loss, trainer and batches, the same ones each time."""
        for seed in (random.seed, np.random.seed, mx.random.seed):
            seed(0)
        if self.workload not in NETWORKS:
            try:
                make = load_workload(Question(self.workload, {}, ""))
            except TrainerError as error:
                raise TrainerError(str(error).replace("find_batch_size:", "agree:", 1)) from error
            made = make(self.batch_size, list(contexts))
            if not isinstance(made, tuple) or len(made) != 5 or not isinstance(made[2], Trainer):
                raise TrainerError(
                    f"agree: got {type(made).__name__} from {self.workload}; expected the arguments of train_batch. Return "
                    "(net, loss, trainer, X, y), with a gluon_mgpu.Trainer."
                )
            net, loss, trainer, X, y = made
            return net, loss, trainer, iter([(X, y)] * self.num_steps)
        digits = load_digits()
        net = NETWORKS[self.workload](digits.num_classes)
        net.initialize(mx.init.Xavier(), ctx=list(contexts))
        params = {"momentum": 0.9} if self.optimizer == "sgd" else {}
        trainer = Trainer(net, self.optimizer, {"learning_rate": self.learning_rate, **params})
        recipe = Recipe(NETWORKS[self.workload], digits, self.batch_size, epochs=self.num_steps)
        return net, gluon.loss.SoftmaxCrossEntropyLoss(), trainer, recipe.batches(self.batch_size, 0)


def mlp(num_classes: int) -> gluon.Block:
    """Return a network of two Dense layers."""
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Flatten(), gluon.nn.Dense(64, activation="relu"), gluon.nn.Dense(num_classes))
    return net


NETWORKS: Dict[str, Callable[[int], gluon.Block]] = {"mlp": mlp, "resnet18": resnet18}


@dataclass(frozen=True)
class Place:
    """Where a training runs: in so many processes with one device each, or in this one on all of these devices."""

    contexts: Tuple[Context, ...]
    num_processes: int = 1

    def __str__(self) -> str:
        names = ", ".join(map(str, self.contexts))
        return names if self.num_processes == 1 else f"{self.num_processes} processes"


@dataclass(frozen=True)
class Bits:
    """The hashes of a training.

    Attributes
    ----------
    steps : list of dict
        For each step, the losses' hashes by virtual shard, and the hashes of weights and states on each device.
    shards : dict of str to list of Entry
        Of the traced step: the tensors of each virtual shard, in the order in which they are computed.
    devices : dict of str to str
        Where each virtual shard was computed.
    total : list of str
        Of the traced step: the hash of the sum over the virtual shards, in each process.
    """

    steps: List[Hashes]
    shards: Dict[str, List[Entry]] = field(default_factory=dict)
    devices: Dict[str, str] = field(default_factory=dict)
    total: List[str] = field(default_factory=list)

    def hashes(self) -> Dict[str, str]:
        """Return one hash for all losses, and those of the weights and states at the end; several joined where devices differ."""
        at_end = {kind: " / ".join(dict.fromkeys(self.steps[-1][kind])) for kind in (WEIGHTS, STATES)}
        return {**at_end, LOSSES: _sha256(json.dumps([sorted(step[LOSSES].items()) for step in self.steps]).encode())}


@dataclass(frozen=True)
class Difference:
    """The first difference of two trainings.

    Attributes
    ----------
    step : int
        From 1.
    kinds : list of str
        What differs after this step: losses, weights, states.
    tensor : str
        The first tensor that differs when the step is computed again; "" if none does.
    shards : list of int
        The virtual shards in which it differs first.
    device : str
        Where the first of them was computed.
    """

    step: int
    kinds: List[str]
    tensor: str = ""
    shards: List[int] = field(default_factory=list)
    device: str = ""


def train_bits(training: Training, contexts: Sequence[Context], traced: int = 0) -> Bits:
    """Train in this process, and return the hashes of each step; with `traced`, end with this step and hash all its tensors."""
    net, loss, trainer, batches = training.make(contexts)
    trainer.use_virtual_shards(training.num_shards)
    trace = Trace(net, trainer)
    step = make_step("agree", net, loss, trainer, split_batch, False, 1, Passes)
    found: List[Hashes] = []
    for number, (X, y) in zip(range(1, (traced or training.num_steps) + 1), batches):
        with trace.recording() if number == traced else ExitStack():
            batch = step(X, y)
            mx.nd.waitall()  # running statistics are written without the engine's knowledge
        losses = {str(shard): _hash(one) for shard, one in zip(batch.shard_numbers or (), batch.losses)}
        weights = [_hash_all([(name, param.data(context)) for name, param in _params(net)]) for context in contexts]
        held = [one.states for one in trainer._update.updaters if one.states]
        states = [_hash_all(leaves([state for _, state in sorted(one.items())])) for one in held]
        found.append({LOSSES: losses, WEIGHTS: weights, STATES: states})
    return trace.bits(found)


class Trace(TreeReduction):
    """The hashes of all tensors of one step; it takes the place of the trainer's sums, and does the same.

    Parameters
    ----------
    net : gluon.Block
    trainer : Trainer
        With virtual shards.
    """

    def __init__(self, net: gluon.Block, trainer: Trainer) -> None:
        super().__init__(trainer.contexts, trainer.virtual_shards or 1)
        self._net, self._is_on = net, False
        self._entries: List[Entry] = []  # of the current shard
        self._found = Bits([])
        trainer._reduction = self

    def bits(self, steps: List[Hashes]) -> Bits:
        """Return the hashes of a training: those of its steps, and of the tensors of the recorded one."""
        for number, entries in self._found.shards.items():
            kinds = [entry[0] for entry in entries]
            entries.insert(kinds.index(_GRADIENT) if _GRADIENT in kinds else len(kinds), [_LOSS, "", steps[-1][LOSSES][number]])
        return Bits(steps, self._found.shards, self._found.devices, self._found.total)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Hash the tensors of a step, layer by layer: hybridized parts run without their graphs."""
        with ExitStack() as stack:
            for path, block in _blocks(self._net):
                if getattr(block, "_active", False) and not isinstance(block, gluon.SymbolBlock):
                    block._active = False
                    stack.callback(setattr, block, "_active", True)
                stack.callback(block.register_forward_hook(self._hook(path)).detach)
            stack.callback(self._net.register_forward_pre_hook(self._begin).detach)
            self._is_on = True
            yield
        self._is_on = False

    def add(self, number: int, replica: int, arrays: Sequence[Array]) -> None:
        """Hash what a shard contributes, and add it up."""
        if self._is_on:
            context = self._contexts[replica]
            ran = [entry[1].split(" ")[0] for entry in self._entries if entry[0] == _OUTPUT]
            params = [(name, param) for name, param in _params(self._net) if param.grad_req != "null"]
            in_order = sorted(params, key=lambda one: -ran.index(_owner(one[0])) if _owner(one[0]) in ran else 0)
            self._entries += [[_GRADIENT, name, _hash(param.grad(context))] for name, param in in_order]
            self._entries += [[_CONTRIBUTION, "", _hash_all([("", array) for array in arrays])]]
            self._found.shards[str(number)], self._found.devices[str(number)] = self._entries, str(context)
        super().add(number, replica, arrays)

    def finish(self, num_leaves: int, like: Sequence[Array]) -> List[Array]:
        """Add up the sums of all devices and processes, and hash the result."""
        root = super().finish(num_leaves, like)
        if self._is_on:
            self._found.total.append(_hash_all([("", array) for array in root]))
        return root

    def _begin(self, _block: gluon.Block, inputs: Any) -> None:
        if not autograd.is_recording():  # a pass that only finds the shapes
            return
        arrays = list(leaves(inputs, "input"))
        self._entries = [[_INPUT, path, _hash(array)] for path, array in arrays]
        self._entries += [[_WEIGHT, name, _hash(param.data(arrays[0][1].context))] for name, param in _params(self._net)]

    def _hook(self, path: str) -> Callable[..., None]:
        def hook(block: gluon.Block, _inputs: Any, output: Any) -> None:
            named = leaves(output, f"{path} ({type(block).__name__})") if autograd.is_recording() else ()
            for place, array in named:
                self._entries.append([_OUTPUT, place, _hash(array)])

        return hook


_INPUT, _WEIGHT, _OUTPUT, _LOSS = "the shard's data", "the weight before the step", "forward: the output of layer", "the loss"
_GRADIENT, _CONTRIBUTION = "backward: the gradient of", "backward: the moves of BatchNorm's running statistics"


def compare(reference: Bits, other: Bits) -> Optional[Difference]:
    """Return the first step at which two trainings differ, None if they do not."""
    for number, (one, two) in enumerate(zip(reference.steps, other.steps), 1):
        kinds = [LOSSES] * (one[LOSSES] != two[LOSSES])
        kinds += [kind for kind in (WEIGHTS, STATES) if len({*one[kind], *two[kind]}) > 1]
        if kinds:
            return Difference(number, kinds)
    return None


def locate(reference: Bits, other: Bits, found: Difference) -> Difference:
    """Return a difference with its first tensor, from two trainings that traced the step."""
    first: Dict[int, int] = {}  # by virtual shard
    for number, mine in reference.shards.items():
        pairs = zip_longest(mine, other.shards.get(number, []))
        differing = [i for i, (one, two) in enumerate(pairs) if one != two]
        first.update({int(number): differing[0]} if differing else {})
    if first:
        place = min(first.values())
        numbers = sorted(number for number, at in first.items() if at == place)
        mine, theirs = (bits.shards.get(str(numbers[0]), []) for bits in (reference, other))
        device = other.devices.get(str(numbers[0]), "")
        return replace(found, tensor=_describe(mine, theirs, place), shards=numbers, device=device)
    if len({*reference.total, *other.total}) > 1:
        return replace(found, tensor="the sum of the gradients over the virtual shards")
    again = compare(Bits(reference.steps[-1:]), Bits(other.steps[-1:]))
    return replace(found, tensor="the update: gradients are equal, and weights or states differ" if again else "")


def _describe(mine: List[Entry], theirs: List[Entry], place: int) -> str:
    kind, name, _ = mine[place] if place < len(mine) else ("nothing", "", "")
    other = theirs[place][:2] if place < len(theirs) else ["nothing", ""]
    if other != [kind, name]:
        return " ".join(f"{' '.join(other)}, where the first device computed {kind} {name}".split())
    if kind != _GRADIENT:
        return " ".join(f"{kind} {name}".split())
    ran = [entry[1] for entry in mine if entry[0] == _OUTPUT]
    owners = [layer.split(" ")[0] for layer in ran]
    last = _owner(mine[place - 1][1]) if mine[place - 1][0] == _GRADIENT else owners[-1]
    between = ran[owners.index(_owner(name)) : owners.index(last) + 1] if {_owner(name), last} <= set(owners) else []
    where = f"; it comes from the backward pass of {', '.join(dict.fromkeys(between))}" if between else ""
    return f"{kind} {name}{where}"


def train_at(place: Place, training: Training, traced: int = 0) -> Bits:
    """Train at a place, and return the hashes of all its processes."""
    if place.num_processes > 1:
        return _launch(training, place, traced)
    with use_devices(list(place.contexts), one_thread=True) as contexts:
        return train_bits(training, contexts, traced)


def bisect(training: Training, reference: Place, other: Place, found: Difference, tell: Tell) -> Difference:
    """Train at two places again up to the step that differs, and return its first tensor that does."""
    traced = {}
    for place in (reference, other):
        tell(f"step {found.step} again, layer by layer: {place}")
        traced[place] = train_at(place, training, found.step)
    return locate(traced[reference], traced[other], found)


def _launch(training: Training, place: Place, traced: int) -> Bits:
    """Train in several processes of this machine."""
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "output", "w+", encoding="utf-8") as output:
        question = [asdict(training), place.contexts[0].device_type, traced]
        (Path(folder) / "question.json").write_text(json.dumps(question), encoding="utf-8")
        command = [sys.executable, "-m", "gluon_mgpu", "launch", "-n", str(place.num_processes), "--grace", _GRACE_S]
        command += ["--end-with-input", "--log-dir", f"{folder}/logs", "-m", __name__, folder]
        streams: Dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": output, "stderr": output}
        process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True, **streams)
        try:
            status = process.wait()
        finally:
            process.terminate()  # after Ctrl-C; the launcher ends its processes
            process.wait()
            process.stdin.close()  # type: ignore[union-attr]
        if status:
            output.seek(0)
            last = (output.read().strip().splitlines() or ["no output"])[-1]
            raise StepError(
                f"agree: got {place} that ended with exit status {status} ({last}); expected a step that trains. Check that "
                "the network trains with gluon-mgpu launch, or pass --processes 1."
            )
        parts = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(place.num_processes)]
    return _merged([Bits(**part) for part in parts])


def _merged(parts: Sequence[Bits]) -> Bits:
    """Return the hashes of all processes as those of one training."""
    steps = []
    for same in zip(*(part.steps for part in parts)):
        losses = {shard: one for step in same for shard, one in step[LOSSES].items()}
        steps.append({LOSSES: losses, **{kind: [one for step in same for one in step[kind]] for kind in (WEIGHTS, STATES)}})
    shards = {number: entries for part in parts for number, entries in part.shards.items()}
    devices = {number: f"process {rank}" for rank, part in enumerate(parts) for number in part.shards}
    return Bits(steps, shards, devices, [one for part in parts for one in part.total])


def _blocks(net: Any, path: str = "") -> Iterator[Tuple[str, Any]]:
    yield path, net
    for name, child in net._children.items():
        yield from _blocks(child, f"{path}.{name}" if path else name)


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _params(net: gluon.Block) -> List[Tuple[str, gluon.Parameter]]:
    """Return the parameters with their structural names, each once."""
    found = {id(param): (name, param) for name, param in reversed(list(net._collect_params_with_prefix().items()))}
    return sorted(found.values(), key=lambda one: one[0])


def _hash_all(arrays: Any) -> str:
    return _sha256("".join(name + _hash(array) for name, array in arrays).encode())


def _hash(array: Any) -> str:
    """Return the SHA-256 hash of an array's dtype, shape and bytes. It waits for them."""
    values = np.ascontiguousarray(values_of(array.as_nd_ndarray()) if isinstance(array, mx.nd.NDArray) else array)
    return _sha256(f"{values.dtype} {values.shape} ".encode() + values.tobytes())


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _answer(folder: Path) -> None:
    """Train in a process of a job, and write its hashes."""
    training, kind, traced = json.loads((folder / "question.json").read_text(encoding="utf-8"))
    with use_devices(f"{kind}:0-0", one_thread=True) as contexts:
        bits = train_bits(Training(**training), contexts, traced)
    (folder / f"{this_process().rank}.json").write_text(json.dumps(asdict(bits)), encoding="utf-8")


if __name__ == "__main__":
    _answer(Path(sys.argv[1]))

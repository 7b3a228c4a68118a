"""One trainer in several processes: the same network, options and weights in each."""

from __future__ import annotations

import json
import re
import zlib
from collections import deque
from typing import Deque, Dict, List, Mapping, Optional, Sequence, Set, Tuple

import numpy as np
from mxnet import autograd, gluon

from ..distributed import Group, group
from ..errors import TrainerError
from ..nested import Array
from ..refusals import refusal
from .gradients import Pass
from .layout import Layout
from .parameters import Params, check_initialised, named_params
from .sums import Divisor

_LAG = 16  # steps after which the checksums of all processes are read: they have arrived, and nothing waits for them

Facts = Mapping[str, object]  # what all processes must have in common, by the words in which errors name it

_SAME = "Build the same network and trainer in each, and change them in all before the same step"
_OF_BATCH = (_LABELS := "checksum of the labels of the first batch"), "batch size"
_ALIKE = "Shuffle alike, for example after np.random.seed(0), or let each read its own data: Trainer(sharded_data=True)"


class ProcessSync:
    """Keeps a trainer the same as those of the other processes. In a job of one process it does nothing.

    ```
    made          parameters, optimizer and options are compared; then all processes get the weights of process 0
    first step    they are compared again, with the labels of the first batch that the processes have divided
    each step     a checksum of them is exchanged. It is read a few steps later; at once if this process has changed
                  parameters, because it would sum other arrays than the others
    ```

    Parameters
    ----------
    layout : Layout

    Attributes
    ----------
    in_job : bool
        Whether there are several processes.
    divisor : Divisor
    """

    def __init__(self, layout: Layout) -> None:
        self._processes = group()
        self.in_job = self._processes is not None
        self._is_waiting = self.in_job  # until all processes have the same weights
        self._layout = layout
        self._params: Dict[str, str] = {}  # as they were in the latest step, and the version of the layout then
        self._version: Optional[int] = None
        self._queued: Deque[Tuple[Facts, int, Array]] = deque()  # the facts of the latest steps, and the checksums
        self.divisor = Divisor(layout.devices)
        if self._processes is not None:
            self._processes.labels = ()

    def begin(self, options: Facts) -> None:
        """Compare the trainers, and copy the weights of process 0 to every device of every process. Only the first call counts.

        Raises
        ------
        TrainerError
            They differ. The error names the first difference and the ranks.
        """
        if self._processes is not None and self._is_waiting:
            self._is_waiting = False
            _check_same("Trainer", self._processes, {**self._description(), **options}, self._layout.names)
            _copy_first(self._processes, self._layout.params)

    def step(self, options: Facts, *, divides: bool) -> None:
        """Exchange what a step depends on, in addition to the gradients, before it sums them.

        `divides`: the processes divide each batch.

        Raises
        ------
        TrainerError
            The trainers of the processes differ, or differed some steps ago.
        """
        processes, layout = self._processes, self._layout
        if processes is None:
            return
        processes.num_divided = 0
        before, is_first, has_changed = self._params, self._version is None, layout.version != self._version
        if has_changed:
            self._params, self._version = self._description(), layout.version
        facts = {**self._params, **options} if has_changed else options
        if is_first:
            labels = {_LABELS: processes.labels[-1:]} if divides else {}
            _check_same("Trainer.step", processes, {**facts, **labels}, layout.names)
        checksum = zlib.crc32(repr((self._params, options)).encode()) >> 8  # 24 bits, which a float32 holds
        self._queued.append((facts, checksum, processes.exchange(checksum)))
        if has_changed and not is_first and (self._queued[-1][2].asnumpy() != checksum).any():
            name = next((one for one in self._params if before.get(one) != self._params[one]), "an option")
            raise TrainerError(
                f"Trainer.step: got {_named(name, layout.names)} changed from {before.get(name)} to {self._params.get(name)} in "
                f"rank {processes.process.rank}, and not in all others; expected the same change in all. {_SAME}."
            )
        self._check(_LAG)

    def _description(self) -> Dict[str, str]:
        return _described(self._layout.names, self._layout.params, structural=self._layout.structural)

    def settle(self) -> None:
        """Check the latest steps, too, and wait for them. All processes must call it after the same step."""
        self._check(0)

    def _check(self, num_left: int) -> None:
        while self._processes is not None and len(self._queued) > num_left:
            facts, checksum, everyones = self._queued.popleft()
            if (everyones.asnumpy() != checksum).any():  # every process sees that, after the same step
                _check_same("Trainer.step", self._processes, {**facts, **self._params}, self._layout.names)

    def check_begun(self, operation: str, *, divides: bool = False) -> None:
        """Raise `TrainerError` if the latest gradients are of weights that differ between the processes.

        With `divides`, also if they are of whole batches, of which each process should take its part.
        """
        if self._is_waiting:
            raise refusal(operation, "several processes", "a loop by hand whose first batch decides shapes")
        if divides and self._processes is not None and not self._processes.has_divided:
            raise refusal(operation, "several processes", "a split of your own")

    def check_size(self, operation: str, num_examples: float, latest: Optional[Pass]) -> None:
        """Raise `ModesError` if this is the size of a batch that processes share, and the pass was of a part of it."""
        counted = 0 if latest is None else sum(latest.examples.values())
        if self._processes is not None and num_examples == self._processes.num_divided and 0 < counted < num_examples:
            raise refusal(operation, "sharded_data", "the size of a batch that processes share")


def broadcast_parameters(params: Params) -> None:
    """Give every device of every process the values of process 0's first device: weights and running statistics.

    A trainer does this when it is made. Call it in all processes after one of them has set values, for example from a file that
    it alone has read, and after a loop by hand has left the running statistics of the devices different.

    Parameters
    ----------
    params : gluon.Block, ParameterDict, dict or list of gluon.Parameter
        With values.

    Raises
    ------
    TrainerError
        A parameter has no value, or the parameters of the processes differ in name, order, shape or dtype.

    Examples
    --------
    >>> import mxnet as mx
    >>> net = gluon.nn.Dense(1, in_units=1)
    >>> net.initialize(mx.init.One(), ctx=[mx.cpu(0), mx.cpu(1)])
    >>> net.weight.data(mx.cpu(0))[:] = 3
    >>> broadcast_parameters(net)
    >>> net.weight.data(mx.cpu(1)).asnumpy().item()
    3.0

    Source: the name is Horovod's.
    """
    named, processes = named_params(params), group()
    check_initialised("broadcast_parameters", named)
    unknown = next((name for name, param in named.items() if param._data is None), None)
    if unknown is not None:
        raise TrainerError(
            f"broadcast_parameters: got {unknown} without a known shape; expected values. Pass it one batch first."
        )
    if processes is not None:
        own = _described(list(named), list(named.values()), structural=isinstance(params, gluon.Block), options=False)
        _check_same("broadcast_parameters", processes, own, list(named))
    _copy_first(processes, list(named.values()))


def check_others(operation: str, net: gluon.Block, trained: Sequence[gluon.Parameter]) -> None:
    """Raise `TrainerError` if the values that a trainer does not share differ between the processes of a job. Waits for all."""
    processes, own = group(), set(map(id, trained))
    named = {name: param for name, param in named_params(net).items() if id(param) not in own and param._data}
    if processes is not None:
        sums = {f"values of {name}": zlib.crc32(param.list_data()[0].asnumpy().tobytes()) for name, param in named.items()}
        advice = "Call mgpu.broadcast_parameters(net) in all before, or give the trainer the whole network: Trainer(net)"
        _check_same(operation, processes, sums, (), advice)


def _copy_first(processes: Optional[Group], params: Sequence[gluon.Parameter]) -> None:
    with autograd.pause():
        if processes is not None:
            processes.broadcast([param.list_data()[0] for param in params])
        for param in params:
            first, *others = param.list_data()
            for other in others:
                first.copyto(other)


def _described(
    names: Sequence[str], params: Sequence[gluon.Parameter], *, structural: bool, options: bool = True
) -> Dict[str, str]:
    """Return what makes parameters the same, by words for errors; with `options`, also what makes their updates the same."""
    found = {"number of parameters": str(len(params))}
    own = _uncounted([param.name for param in params])
    for place, (name, gluons, param) in enumerate(zip(names if structural else _uncounted(names), own, params)):
        what = f"parameter {place}"
        found.update({what: name, f"Gluon's name of {what}": gluons, f"shape of {what}": str(param.shape)})
        found[f"dtype of {what}"] = np.dtype(param.dtype).name
        if options:
            found.update({f"{one} of {what}": str(getattr(param, one)) for one in ("grad_req", "lr_mult", "wd_mult")})
    return found


def _named(what: str, names: Sequence[str]) -> str:
    """Return a word of `_described` with this process's name of the parameter."""
    return re.sub(" of parameter ([0-9]+)$", lambda found: f" of {names[int(found[1])]}", what)


def _uncounted(names: Sequence[str]) -> List[str]:
    """Return names with the numbers from 0 that Gluon counts up in a process, which may have made other layers before.

    Examples
    --------
    >>> _uncounted(["dense12_weight", "dense7_weight", "net3_dense0_bias"])
    ['dense1_weight', 'dense0_weight', 'net0_dense0_bias']
    """
    parts = [re.split("([0-9]+)", name) for name in names]
    for at in range(1, max(map(len, parts)), 2):
        numbers: Dict[Tuple[str, ...], Set[str]] = {}
        for one in parts:
            numbers.setdefault(tuple(one[:at]), set()).update(one[at : at + 1])
        ranks = {before: sorted(found, key=lambda text: (len(text), text)) for before, found in numbers.items()}
        for one in parts:
            one[at : at + 1] = [str(ranks[tuple(one[:at])].index(number)) for number in one[at : at + 1]]
    return ["".join(one) for one in parts]


def _check_same(operation: str, processes: Group, facts: Facts, names: Sequence[str], advice: str = "") -> None:
    """Raise `TrainerError` if facts differ between the processes: it names the first one and the ranks. Waits for all."""
    own = json.dumps({name: str(value) for name, value in facts.items()}).encode()
    if len(set(processes.all_gather_bytes(str(zlib.crc32(own)).encode()))) == 1:
        return
    everyones: List[Dict[str, str]] = [json.loads(one) for one in processes.all_gather_bytes(own)]
    for name in dict.fromkeys(name for one in everyones for name in one):
        ranks: Dict[str, List[int]] = {}
        for rank, one in enumerate(everyones):
            ranks.setdefault(one.get(name, "nothing"), []).append(rank)
        if len(ranks) > 1:
            found = "; ".join(f"{value} in rank {', '.join(map(str, those))}" for value, those in ranks.items())
            what, advice = _named(name, names), advice or (_ALIKE if name in _OF_BATCH else _SAME)
            raise TrainerError(f"{operation}: got {what}: {found}; expected the same in all processes. {advice}.")

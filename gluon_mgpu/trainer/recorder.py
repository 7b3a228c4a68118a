"""What one backward pass over all devices has written, as a `Pass`; several passes that are one."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Collection, Dict, Iterator, List, Mapping, Optional, Sequence

import numpy as np
from mxnet import Context, autograd, gluon

from ..errors import TrainerError
from ..mxnet_internals.c_calls import Flags
from ..mxnet_internals.parameters import gradients_of, has_dense_gradient, set_grad_req, values_of
from ..nested import Array
from ..refusals import refusal
from .fresh import Examples, FreshGradients, Pass, Table
from .layout import Layout


class PassRecorder:
    """Makes the passes of a trainer.

    Parameters
    ----------
    layout : Layout
    fresh : FreshGradients
        What no step has used, before a pass and after it.
    """

    def __init__(self, layout: Layout, fresh: FreshGradients) -> None:
        self._layout, self._fresh = layout, fresh
        self._is_running = threading.Lock()  # a pass

    @contextmanager
    def one_pass(self, *, keeps: bool = False) -> Iterator[Pass]:
        """Let all backward calls inside be one pass over all devices. Yield the pass, complete at the end, without examples.

        With `keeps`, gradients of parameters that it does not reach stay those of earlier passes; otherwise they are dropped.

        Raises
        ------
        TrainerError
            Another thread runs a pass of this trainer; or, with `keeps`, an earlier pass without a step was on other devices.
        """
        if not self._is_running.acquire(blocking=False):
            raise TrainerError(
                "Trainer.backward: got a call while another thread runs one of this trainer; expected one pass over all devices. "
                "Call trainer.backward(losses) once with the losses of all devices."
            )
        fresh = self._fresh
        found, latest = Pass(None, {}), fresh.latest if keeps else None
        try:
            if fresh.look():
                raise refusal("Trainer.backward", "static_shape", "a loop by hand after a change of grad_req")
            former = fresh.table() & (fresh.all if keeps else fresh.running)
            fresh.clear(everything=True)
            try:
                yield found
                found.written = self._end(former, latest)
            except BaseException:
                fresh.clear(everything=True)
                raise
        finally:
            self._is_running.release()

    def _end(self, former: Table, latest: Optional[Pass]) -> Table:
        fresh = self._fresh
        written = fresh.flags()
        if len(former) != len(written):  # a parameter was frozen or thawed inside
            former = np.zeros_like(written)
        if latest is not None and latest.written is not None and len(latest.written) == len(written):
            alone = written & ~fresh.running
            shares = (fresh.reached_by(latest.written) & fresh.reached_by(alone)).any()
            if shares and not (latest.written & alone).any():
                raise TrainerError(
                    "Trainer.backward: got passes over different devices, and no step between them; expected one over all. Call "
                    "trainer.backward(losses) once with the losses of all devices, and discard() after a pass that no step uses."
                )
        fresh.clear()  # from now on, flags show passes that came later
        return written | (former & ~fresh.reached_by(written))

    @contextmanager
    def adding(self) -> Iterator[Pass]:
        """Let the gradients of all backward passes inside add up: they are one pass."""
        fresh, params = self._fresh, self._layout.params
        writing = [i for i in self._layout.trainable if params[i].grad_req == "write" and gradients_of(params[i])]
        sparse = [params[i].name for i in writing if not has_dense_gradient(params[i])]
        if sparse:
            raise TrainerError(
                f"Trainer: got the sparse gradient of {sparse[0]} and several passes over each device; expected dense gradients, "
                "which MXNet can add up. Leave sparse_grad out of Embedding."
            )
        with autograd.pause():
            fresh.zero(~fresh.running, self._layout.slabs)
        with self.one_pass() as found:
            fresh.adding = set(writing)
            set_grad_req([params[i] for i in writing], "add")
            try:
                yield found
            finally:
                set_grad_req([params[i] for i in writing], "write")
                fresh.adding = set()

    def counted(self, found: Pass, losses: Sequence[Array]) -> Pass:
        """Return a pass from these losses with its examples: divided equally if it has reached a device without a loss."""
        examples, written = examples_of(losses, self._layout.stages_before), found.written
        assert written is not None, "it has ended"
        reached = self._fresh.devices_of(written)
        if len(written) and not reached:
            examples = {}
        elif not reached.issubset(examples):
            examples = dict.fromkeys(reached, sum(examples.values()) / len(reached))
        return Pass(written, examples)

    def by_graphs(self, params: Mapping[int, gluon.Parameter], examples: Examples) -> Pass:
        """Return a pass whose graphs have written the gradients of these parameters, by their ids, on the devices of examples."""
        written = self._fresh.written_by(params, examples)
        return Pass(None if written.all() else written, examples, is_current=True)

    def joined(self, passes: Sequence[Pass]) -> Pass:
        """Return the pass that these are parts of, without examples."""
        every = self._fresh.all
        tables = [every if one.written is None else one.written for one in passes]
        return Pass(np.logical_or.reduce([np.zeros_like(every), *tables]), {})


def examples_of(losses: Sequence[Array], stages_before: Mapping[Context, Collection[Context]]) -> Dict[Context, float]:
    """Return the examples of each device: the length of its losses.

    Of each device, the first one counts: others may be terms of another kind. If devices have different numbers of losses, such
    as of several shards, those count that are as long as the first one. `stages_before`: by the device of a loss, the others of
    a pipeline that its pass reaches.
    """
    lengths: Dict[Context, List[int]] = {}
    for loss in losses:
        for context in (loss.context, *stages_before.get(loss.context, ())):
            lengths.setdefault(context, []).append((*loss.shape, 1)[0])
    has_shards = len(set(map(len, lengths.values()))) > 1
    return {context: own[0] * (own.count(own[0]) if has_shards else 1) for context, own in lengths.items()}


def drop_flags(params: Sequence[gluon.Parameter]) -> None:
    """Let no step use the gradients of these parameters: they are of a part of a batch."""
    Flags([weight for param in params if gradients_of(param) for weight in values_of(param)]).clear()

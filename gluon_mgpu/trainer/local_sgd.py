"""LocalSGD: devices train separately for some steps, and are then averaged."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Dict, List, Optional, Set, Tuple

from mxnet import Context, autograd

from ..checks import whole_number
from ..distributed import group
from ..nested import Array
from ..refusals import refusal
from .parameters import Params, spans_devices
from .slab import Bucket, Slab
from .steps import Steps
from .trainer import Trainer


@dataclass(eq=False)
class _Values:
    """A `Summand`: weights, or a state of the optimizer, of all devices."""

    indices: Tuple[int, ...]
    contexts: Tuple[Context, ...]
    arrays: List[Array]
    bucket: Optional[Bucket] = None
    part: int = 0

    def __post_init__(self) -> None:
        self.summed = self.arrays


class _LocalSteps(Steps):
    """Steps of devices that train apart, each on its own gradient, and are averaged every few steps."""

    trains_apart = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.every = 1
        self._num_local = 0  # steps since the last average
        self._trained: Set[int] = set()  # the parameters that have changed since then

    def average_replicas(self) -> None:
        """Set weights and states to their mean over the devices after local steps. It does not wait."""
        if not self._num_local:
            super().average_replicas()
            return
        layout = self.layout
        self.running_stats.move(layout.slabs)
        frozen = self._trained.difference(*(one.indices for one in layout.slabs))  # since the last average
        others = [*self.update.arrays(), *(layout.params[index].list_data() for index in sorted(frozen))]
        values = [_Values(one.indices, one.contexts, one.weights, one.bucket) for one in layout.slabs]
        values += [_Values((-1 - i,), tuple(layout.contexts), arrays) for i, arrays in enumerate(others)]
        with autograd.pause():
            self.sum.run(values)
            for array in (array.as_nd_ndarray() for one in values for array in one.arrays):
                array /= len(layout.contexts)
        self._num_local = 0
        self._trained.clear()

    def end_apart(self) -> None:
        """Average the devices."""
        self.average_replicas()

    def _reduce(self, slabs: List[Slab]) -> None:
        whole_number("LocalSGD", "every", self.every, advice="16 is usual.")  # a program may set it
        if self._trainer.amp_scaler is not None or self.loss_scaler is not None:
            raise refusal("LocalSGD.step", "LocalSGD", "a loss scaler")

    def _clip(self, slabs: List[Slab]) -> None:
        for replica, context in reversed(list(enumerate(self.layout.contexts))):  # the first one's `grad_norm` stays
            super()._clip([replace(one, contexts=(context,), gradients=[one.gradients[replica]]) for one in slabs])

    def _apply(self, slabs: List[Slab], batch_size: float) -> None:
        super()._apply(slabs, batch_size)
        self._num_local += 1
        self._trained.update(*(slab.indices for slab in slabs))
        if self._num_local >= self.every:
            self.average_replicas()


class LocalSGD(Trainer):
    """A `Trainer` that averages weights every few steps instead of summing gradients in each.

    ```
    device 0:  step ─► step ─► ... ─► step ─┐            ┌─► step ─► ...
                                            ├─► average ─┤               after `every` steps, before evaluating
    device 1:  step ─► step ─► ... ─► step ─┘            └─► step ─► ...  and saving, and when flush() is called
    ```

    Use it if copies between the devices are slow. Each device follows its own shards, so this is another algorithm than a
    `Trainer`'s. Only `every=1` with SGD gives the same weights. It replaces a `Trainer` in your own loop, in `train_batch`
    and in `fit`, which averages at the end of each epoch.

    All examples have equal weight: a device's gradient is the sum over its shard divided by the mean shard size, `batch_size` /
    devices, and the average is unweighted. So a device with fewer examples makes a smaller step, and one without data takes part
    with zeros.

    The optimizer's states, such as momentum, are averaged together with the weights. SGD with momentum is linear in both, so the
    average continues like one network. All devices are equal after it, so saved states are complete for any number of devices.
    Stich averages the weights of SGD without momentum; Yu et al. also average momentum.

    Parameters
    ----------
    params, optimizer, optimizer_params, options
        As for `Trainer`. Optimizers with values other than weights, states and counts (nadam, sgld, your own classes) raise.
        `clip_norm` and `clip_value` clip each device's own gradient; `grad_norm` is that of the first device.
    every : int, steps
        It can be set during training: first to 1, later to more (Lin et al., "post-local SGD").

    Raises
    ------
    TrainerError
        The options are invalid.

    Examples
    --------
    >>> import mxnet as mx
    >>> net = mx.gluon.nn.Dense(1, in_units=1, use_bias=False)
    >>> net.initialize(mx.init.Zero(), ctx=[mx.cpu(0), mx.cpu(1)])
    >>> trainer = LocalSGD(net, "sgd", {"learning_rate": 1.0}, every=2)
    >>> for _ in range(2):
    ...     with autograd.record():
    ...         losses = [net(mx.nd.array([[x]], ctx=c)).sum() for x, c in zip((1, 3), trainer.contexts)]
    ...     autograd.backward(losses)
    ...     trainer.step(2)
    ...     print([net.weight.data(c).asnumpy().item() for c in trainer.contexts])
    [-1.0, -3.0]
    [-4.0, -4.0]

    Source: Stich, "Local SGD converges fast and communicates little", 2019; Lin et al., "Don't use large mini-batches, use local
    SGD", 2020; Yu, Jin, Yang, "On the linear speedup analysis of communication efficient momentum SGD", 2019.
    """

    steps_class = _LocalSteps
    steps: _LocalSteps

    def __init__(
        self, params: Params, optimizer: Any, optimizer_params: Optional[Dict[str, Any]] = None, *, every: int, **options: Any
    ) -> None:
        every = whole_number("LocalSGD", "every", every, advice="16 is usual.")
        if group() is not None:
            raise refusal("LocalSGD", "LocalSGD", "several processes")
        if spans_devices(params):
            raise refusal("LocalSGD", "LocalSGD", "Pipeline")
        super().__init__(params, optimizer, optimizer_params, **options)
        self.every = every
        self.scale *= len(self.contexts)  # divides by the mean shard size instead of the batch size

    @property
    def every(self) -> int:
        """Steps between averages."""
        return self.steps.every

    @every.setter
    def every(self, every: int) -> None:
        self.steps.every = every

    def flush(self, ignore_stale_grad: bool = False) -> None:
        """Update with accumulated gradients, and average the devices. Inside `accumulate` it does nothing."""
        super().flush(ignore_stale_grad)
        if not self.steps.num_open:
            self.average_replicas()

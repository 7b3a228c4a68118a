"""LocalSGD: devices train separately for some steps, and are then averaged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Dict, List, Optional

from mxnet import autograd

from ..checks import whole_number
from ..distributed import group
from ..errors import TrainerError
from .buffers import Buffer
from .groups import spans_devices
from .parameters import Params, replica_difference
from .trainer import Trainer


class LocalSGD(Trainer):
    """A `Trainer` that averages weights every few steps instead of summing gradients in each.

    ```
    device 0:  step ─► step ─► ... ─► step ─┐            ┌─► step ─► ...
                                            ├─► average ─┤               after `every` steps, before evaluating
    device 1:  step ─► step ─► ... ─► step ─┘            └─► step ─► ...  and saving, and when flush() is called
    ```

    Use it if copies between the devices are slow. Each device follows its own shards, so this is another algorithm than a
    `Trainer`'s. Only `every=1` with plain SGD gives the same weights. It replaces a `Trainer` in loops by hand, in `train_batch`
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

    trains_apart = True

    def __init__(
        self, params: Params, optimizer: Any, optimizer_params: Optional[Dict[str, Any]] = None, *, every: int, **options: Any
    ) -> None:
        self.every = every
        if group() is not None:
            raise TrainerError(
                "LocalSGD: got a job of several processes; expected one process, whose devices are averaged. Use a Trainer."
            )
        if spans_devices(params):
            raise TrainerError(
                f"LocalSGD: got a {type(params).__name__}, which spans devices; expected a whole network on each device. Use "
                "a Trainer."
            )
        if options.get("shard_optimizer"):
            raise TrainerError(
                "LocalSGD: got shard_optimizer=True; expected the states of all parameters on each device. Leave it out, or use "
                "a Trainer."
            )
        super().__init__(params, optimizer, optimizer_params, **options)
        if not self._update.is_alike:
            raise TrainerError(
                f"LocalSGD: got {type(self._optimizer).__name__}; expected an optimizer that each device can run by itself, from "
                "weights, states and counts alone. Use sgd or adam, or a Trainer."
            )
        self._scale *= len(self.contexts)  # divides by the mean shard size instead of the batch size
        self._num_local_steps = 0  # since the last average

    @property
    def every(self) -> int:
        """The number of steps between two averages."""
        return self._every

    @every.setter
    def every(self, steps: int) -> None:
        self._every = whole_number("LocalSGD", "every", steps, advice="16 is usual.")

    def average_replicas(self) -> None:
        """Set weights and states to their mean over the devices after local steps. It does not wait."""
        if self._num_local_steps and len(self.contexts) > 1:
            states = [Buffer((-1 - i,), [], arrays) for i, arrays in enumerate(self._update.arrays())]
            buffers = [replace(one, gradients=one.weights) for one in self._replicas.weight_buffers()] + states
            with autograd.pause():
                self._reduction.sum(buffers)
                for array in (array.as_nd_ndarray() for buffer in buffers for array in buffer.gradients):
                    array /= len(self.contexts)
        self._num_local_steps = 0

    def flush(self, ignore_stale_grad: bool = False) -> None:
        """Update with accumulated gradients, and average the devices. Inside `accumulate` it does nothing."""
        super().flush(ignore_stale_grad)
        if not self._num_open:
            self.average_replicas()

    def allreduce_grads(self) -> None:
        """Raise: LocalSGD does not sum gradients."""
        raise TrainerError(
            "LocalSGD.allreduce_grads: got a call; expected step(): each device has its own update. Use a Trainer."
        )

    def update(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Raise: see `allreduce_grads`."""
        raise TrainerError("LocalSGD.update: got a call; expected step(): each device has its own update. Use a Trainer.")

    def save_states(self, fname: str) -> None:
        """Average the devices, and write the file of `Trainer.save_states`."""
        self._check_applied()
        self.average_replicas()
        super().save_states(fname)

    def load_states(self, fname: str) -> None:
        """Read a file of `save_states`. If the devices differ after local steps, average them first."""
        self.check_states(fname)
        if not replica_difference(self._params):
            self._num_local_steps = 0
        self.average_replicas()
        super().load_states(fname)

    def _reduce(self, buffers: List[Buffer]) -> None:
        if getattr(self, "_amp_loss_scaler", None) is not None or self.loss_scaler is not None:
            raise TrainerError(
                "LocalSGD.step: got a loss scaler; expected none, as a device must not skip a step alone. "
                "Train in float32 or bfloat16."
            )

    def _apply(self, buffers: List[Buffer], batch_size: float) -> None:
        super()._apply(buffers, batch_size)
        self._num_local_steps += 1
        if self._num_local_steps >= self._every:
            self.average_replicas()

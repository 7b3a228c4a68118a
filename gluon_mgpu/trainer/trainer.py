"""Trainer: a gluon.Trainer whose steps are correct on any number of devices."""

from __future__ import annotations

from typing import Any, ClassVar, ContextManager, Dict, List, Optional, Sequence, Type

from mxnet import Context, gluon
from mxnet import optimizer as opt

from ..checks import path_of, short
from ..devices.select import check_contexts
from ..distributed import group
from ..errors import StateError, TrainerError
from ..mxnet_internals.gluon_trainer import GluonTrainer, private_override
from ..mxnet_internals.versions import require_np_arrays
from ..nested import Array
from ..refusals import JOINING, refusal
from .backward import run_backward
from .layout import Layout
from .loss_scaler import LossScaler
from .options import Options, as_number, check_gluon_options, made_optimizer
from .parameters import Params, gluon_order, replica_difference, trainers_of
from .precision import check_precision, precision_of, set_precision
from .seeded_dropout import seed_dropout
from .slab import BUCKET_BYTES, CUT_BYTES
from .states import read_states, write_states
from .steps import Steps
from .sums import store_type
from .trainer_state import check_fits, restore, state_of
from .update import checked_rate, is_elementwise, is_replicable


class Trainer(GluonTrainer):
    """Applies an optimizer to a network on several devices. A drop-in `gluon.Trainer`.

    ```
    step(batch_size):  idle devices' gradients := 0  ─►  sum over devices  ─►  clip  ─►  update, equal weights on all devices
    ```

    In addition to Gluon's Trainer: a device without data takes part with zeros instead of a stale gradient; gradients are always
    reduced over all devices and over the processes of a job; parameters are in structural order, and states are loaded only into
    the network that they belong to, on any number of devices; BatchNorm's running statistics move by the mean over all devices;
    several batches can make one step (`accumulate`); gradients are clipped after they were summed, averaged and accumulated.

    In a job of several processes, all start with the weights of process 0. A parameter without a gradient in one process may have
    one in another. So unused parameters are not detected there: they are updated with zero.

    Parameters
    ----------
    params : gluon.Block, ParameterDict, dict or list of gluon.Parameter
        Initialised on the devices. Prefer the Block, which has structural names.
    optimizer : str or mxnet.optimizer.Optimizer
    optimizer_params : dict, optional
        Options of an optimizer that is passed by name: `{"learning_rate": 0.1}`.
    kvstore : str, KVStore or None
        How gradients are reduced over devices: `"device"`, on the devices, or `"local"`, on the CPU.
    compression_params : None
    update_on_kvstore : None or False
        For compatibility with Gluon: gradients are never compressed, and the update always runs on the devices.
    clip_norm : float, optional
        Scale the averaged gradient (the sum over all devices and micro-steps, divided by their examples), so that its 2-norm
        over all parameters is at most this.
    clip_value : float, optional
        Then clip each of its elements to -clip_value .. clip_value. Gluon's optimizer option `clip_gradient` does this as well;
        optimizers that add weight decay to the gradient clip the sum.
    measure_grad_norm : bool
        Compute `grad_norm` even if nothing is clipped.
    find_unused_parameters : bool
        In each step, do not update parameters that got no gradient on any device. A step without any gradient still raises.
        Steps that leave parameters out are slower: see `ignore_stale_grad`.
    precision : str, optional
        The precision in which the network computes: `"bf16"` on CPUs, `"fp16"` on GPUs, or `"fp32"`; see `set_precision`.
        `params` must be the Block. By default the network keeps its precision.
    sharded_data : bool
        In a job of several processes, each reads its own batches, for example through a `ShardedSampler`. `step` then takes the
        number of examples of this process, 0 or more, and divides by that of all processes. By default all processes read the
        same batches, `split_batch` gives each its part, and `step` takes the number of examples of the complete batch.
    shard_optimizer : bool
        Let one device update each parameter, keep the optimizer's states of it, and copy its weights to the others. So each of k
        devices holds about 1/k of the states and computes 1/k of the update. Parameters larger than 16 MiB are cut, if SGD, NAG,
        Adam or RMSProp updates them and no norm is measured. The weights do not change. This is stage 1 of ZeRO, or PyTorch's
        `ZeroRedundancyOptimizer`, on the devices of one process. With several processes, `check_replicas_every`, `LocalSGD`,
        the store `"nccl"`, sparse gradients, and optimizers that join parameters, such as nadam or your own, each device
        updates all.
    virtual_shards : int, optional
        Cut every batch into this many parts, computed one by one and summed in one order: weights, states and metrics then have
        the same bits on 1, 2, 4, ... devices, in one process or several. A multiple of their number. It takes `train_batch` or
        `fit`. BatchNorm normalises each part. CPU contexts must compute with one thread each.
    check_replicas_every : int, optional
        Every so many updates, compare the bits of weights and states on all devices, and raise `ReplicaError` if they differ.
    bucket_bytes : int, bytes
        The largest size of the buckets of parameters and gradients. They are in reverse order, so that the last ones are reduced
        while the backward pass still computes the first. They hold a sixteenth of a smaller network, or 1 MiB.

    Attributes
    ----------
    grad_norm : mxnet.np.ndarray, shape (1,), or None
        The 2-norm over all parameters of the last applied gradient, averaged, before clipping, on the first device; `float()`
        waits for it and reads it. None before the first update, and without `clip_norm` and `measure_grad_norm`.

    Raises
    ------
    TrainerError
        The parameters or options are invalid.

    Examples
    --------
    >>> import mxnet as mx
    >>> net = gluon.nn.Dense(1, in_units=2)
    >>> net.initialize(mx.init.One(), ctx=[mx.cpu(0), mx.cpu(1)])
    >>> trainer = Trainer(net, "sgd", {"learning_rate": 0.5})
    >>> with mx.autograd.record():
    ...     losses = [net(mx.nd.ones((1, 2), ctx=c)).sum() for c in trainer.contexts]
    >>> mx.autograd.backward(losses)
    >>> trainer.step(2)
    >>> net.weight.data(mx.cpu(1)).asnumpy().tolist()
    [[0.5, 0.5]]
    """

    steps_class: ClassVar[Type[Steps]] = Steps

    def __init__(
        self,
        params: Params,
        optimizer: Any,
        optimizer_params: Optional[Dict[str, Any]] = None,
        kvstore: Any = "device",
        compression_params: None = None,
        update_on_kvstore: Optional[bool] = None,
        *,
        clip_norm: Optional[float] = None,
        clip_value: Optional[float] = None,
        measure_grad_norm: bool = False,
        find_unused_parameters: bool = False,
        precision: Optional[str] = None,
        sharded_data: bool = False,
        shard_optimizer: bool = True,
        virtual_shards: Optional[int] = None,
        check_replicas_every: Optional[int] = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        override = private_override(type(self), Trainer)
        if override:
            raise TrainerError(
                f"{type(self).__name__}: got {override}() of its own, which no step calls; expected none. Write a step() that "
                "calls allreduce_grads(), your own part, and update(batch_size)."
            )
        data = sharded_data, shard_optimizer, virtual_shards
        options = Options(
            clip_norm, clip_value, measure_grad_norm, find_unused_parameters, *data, check_replicas_every, bucket_bytes
        )
        require_np_arrays("Trainer")
        name, optimizer = short(optimizer), made_optimizer(optimizer, optimizer_params, params)
        trains_apart = self.steps_class.trains_apart
        needs_all = trains_apart or check_replicas_every is not None or group() is not None or store_type(kvstore) == "nccl"
        is_local = is_replicable(optimizer)
        # the norm of a parameter that is cut would have other bits than that of the whole one
        cut_bytes = CUT_BYTES if is_elementwise(optimizer) and clip_norm is None and not measure_grad_norm else None
        shards = shard_optimizer and is_local and not needs_all
        layout = Layout(params, bucket_bytes, shards_optimizer=shards, cut_bytes=cut_bytes)
        check_contexts(layout.contexts, "Trainer")
        apart = "Pipeline" if layout.spans_devices else "LocalSGD" if trains_apart and len(layout.contexts) > 1 else ""
        if apart and not is_local:
            raise refusal(type(self).__name__, apart, JOINING, name)
        if isinstance(optimizer, opt.SGLD) and virtual_shards is None and group() is not None:
            raise refusal("Trainer", "several processes", "sgld")
        check_gluon_options(layout, compression_params, update_on_kvstore)
        if precision is not None:
            check_precision(params, precision)
        scaler = LossScaler() if (precision or precision_of(params)) == "fp16" else None
        self.steps = self.steps_class(self, layout, options, optimizer, kvstore, scaler, gluon_order(params))
        self.kept: Dict[str, object] = {}  # what the latest steps and runs can use again
        self.steps.place()
        for former in trainers_of(params):  # everything was checked: from here on, this is the network's trainer
            if former.steps.trains_apart and replica_difference(params):
                former.average_replicas()
        super().__init__(layout.params, optimizer, list(layout.contexts), list(self.steps.update.updaters.values()))
        if precision is not None:
            set_precision(params, precision)
        seed_dropout(layout.devices, params)
        self.steps.running_stats.begin()

    @property
    def grad_norm(self) -> Optional[Array]:
        """See above."""
        return self.steps.grad_norm

    @property
    def virtual_shards(self) -> Optional[int]:
        """The number of virtual shards, None without."""
        return None if self.steps.tree is None else self.steps.tree.virtual.number

    @property
    def contexts(self) -> List[Context]:
        """The devices, in the order of the replicas."""
        return list(self.steps.layout.contexts)

    @property
    def devices(self) -> List[Context]:
        """All devices, each once: with a `Pipeline`, those of all stages, otherwise `contexts`."""
        return list(self.steps.layout.devices)

    @property
    def params(self) -> List[gluon.Parameter]:
        """The parameters, in structural order."""
        return list(self.steps.layout.params)

    def backward(self, losses: Sequence[Array]) -> None:
        """Compute the gradients of all shards' losses in one backward pass, for the next step. It does not wait.

        In fp16, the losses are multiplied by the loss scale. Where one pass serves several trainers, call `mgpu.backward`.

        Parameters
        ----------
        losses : sequence of NDArray, any shapes
            Recorded, one per shard. BatchNorm's running statistics are weighted by the length of each device's first one, 1 for
            a number; and equally if the pass reaches a device without a loss, as from gathered outputs.

        Raises
        ------
        TrainerError
            The losses are not a list of arrays, or the pass before was over other devices, and no step has used it.
        """
        run_backward("Trainer.backward", losses, [self.steps])

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate from the next step on, as `gluon.Trainer` does."""
        super().set_learning_rate(checked_rate("Trainer.set_learning_rate", as_number(lr)))

    def step(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Sum the gradients over the devices and update the weights, equal on all. It does not wait.

        Inside `accumulate` it only counts the examples; the next step outside divides by all of them.

        Parameters
        ----------
        batch_size : number, or array of one element
            Examples over all devices: gradients are divided by it. 1 if you have averaged the loss; then call `trainer.backward`.
        ignore_stale_grad : bool
            Do not update parameters that got no gradient on any device, instead of raising.

        Raises
        ------
        StaleGradientError
            A parameter got no gradient on any device since the last step. Nothing was changed.
        TrainerError
            The batch size is not a positive number, or a parameter was moved to other devices.
        """
        self.steps.step(batch_size, ignore_stale_grad)

    def accumulate(self) -> ContextManager[None]:
        """Make one update of several batches: inside, `step(n)` adds the gradients of the last pass to a sum, and counts n.

        ```
        with trainer.accumulate():    backward, step(4)    backward, step(4)    added up on each device
        outside:                      backward, step(2)                         reduced once, divided by 10, applied
                                      or flush()                                the same without another batch
        ```

        The update is that of one batch of all these examples, also with uneven splits and idle devices. Call `step` after each
        backward pass: a pass that no step counts is replaced by the next one. The sums take as much memory as the gradients.
        BatchNorm normalises each micro-batch separately.

        You may open contexts again before the update, and nest them. An exception inside drops everything that was accumulated:
        the weights are those of the last update, and the next step starts a new sum.

        Raises
        ------
        TrainerError
            `allreduce_grads` has summed gradients that `update` has not applied; or backward passes came inside, and no step.

        Examples
        --------
        >>> import mxnet as mx
        >>> net = gluon.nn.Dense(1, in_units=1, use_bias=False)
        >>> net.initialize(mx.init.Zero(), ctx=mx.cpu())
        >>> trainer = Trainer(net, "sgd", {"learning_rate": 1.0})
        >>> def pass_back(x):
        ...     with mx.autograd.record():
        ...         loss = net(mx.nd.array(x)).sum()
        ...     loss.backward()
        >>> with trainer.accumulate():
        ...     pass_back([[1], [2]])
        ...     trainer.step(2)
        >>> pass_back([[3]])
        >>> trainer.step(1)
        >>> net.weight.data().asnumpy().item()  # -(1 + 2 + 3) / 3
        -2.0
        """
        return self.steps.accumulate()

    def flush(self, ignore_stale_grad: bool = False) -> None:
        """Update with accumulated gradients, if there are any. Inside `accumulate` it does nothing: the update comes later.

        Use it at the end of the data, when a group of micro-steps is incomplete. Arguments and errors as for `step`.

        Raises
        ------
        TrainerError
            There was a backward pass that no `step` counted. Nothing was changed.
        """
        self.steps.flush(ignore_stale_grad)

    def discard(self) -> None:
        """Drop all gradients that no step has used, and accumulated ones: the next step uses only later backward passes.

        Call it after a backward pass that no step must use: of a batch that you skip, or of another network's loss.
        """
        self.steps.discard()

    def allreduce_grads(self) -> None:
        """Sum the gradients over the devices, for programs that change the sum before `update`.

        Raises
        ------
        TrainerError
            They have already been summed: a second sum would multiply them by the number of devices. Or the call is inside
            `accumulate`.
        """
        self.steps.allreduce_grads()

    def update(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Update the weights with gradients that `allreduce_grads` has summed. Arguments and errors as for `step`.

        The examples of steps inside `accumulate` are added to the batch size. An array that is not finite drops the gradients, as
        the optimizers do for which GluonNLP's `FP16Trainer` passes one after an overflow.

        Raises
        ------
        TrainerError
            The gradients of several devices were not summed: their weights would diverge.
        """
        self.steps.apply_summed(batch_size, ignore_stale_grad)

    def check_replicas(self) -> None:
        """Compare the bits of weights and states on all devices, in a job those of all processes. It waits for them.

        In a job, all processes must call it. `fit` calls it after each epoch, and so does `save_checkpoint`.

        Raises
        ------
        ReplicaError
            They differ.
        TrainerError
            In the last steps, the options of the processes differed.
        """
        self.steps.check_replicas()

    def average_replicas(self) -> None:
        """Move BatchNorm's running statistics of all devices alike, if passes came that no step has used.

        `LocalSGD` also averages the weights. Evaluating and saving call it, in all processes of a job.
        """
        self.steps.average_replicas()

    def bytes_per_device(self) -> Dict[str, Dict[str, int]]:
        """Return the bytes of the network and its optimizer on each device. Activations, sums and buffers come on top of them.

        Returns
        -------
        dict
            By device, such as `cpu(0)`: `weights`, `gradients` and `states` of the optimizer, which exist after the first step.

        Examples
        --------
        >>> import mxnet as mx
        >>> net = gluon.nn.Dense(16, in_units=16, use_bias=False)
        >>> net.initialize(ctx=mx.cpu(0))
        >>> Trainer(net, "sgd").bytes_per_device()
        {'cpu(0)': {'weights': 1024, 'gradients': 1024, 'states': 0}}
        """
        return self.steps.update.bytes_per_device()

    def save_states(self, fname: str) -> None:
        """Write the optimizer's states and update counts, with the parameters' names and shapes, for any number of devices.

        A temporary file next to the target is renamed, so the target is always complete. It waits for the devices.

        Raises
        ------
        TrainerError
            Gradients were accumulated and not applied: the file would not contain them.
        """
        path_of("save_states", "fname", fname)
        self.steps.check_applied("Trainer.save_states")
        write_states(fname, state_of(self.steps))

    def load_states(self, fname: str) -> None:
        """Read a file of `save_states`, on any number of devices. Accumulated gradients are dropped.

        Raises
        ------
        StateError
            The file is none of `save_states`, as those of `gluon.Trainer`, or belongs to another network or optimizer. Nothing
            was changed.
        """
        path_of("load_states", "fname", fname, error=StateError)
        state = read_states(fname)
        check_fits(self.steps, state, fname, "load_states")
        restore(self.steps, state)

"""Trainer: a gluon.Trainer whose steps are correct on any number of devices."""

from __future__ import annotations

import copy
import math
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from mxnet import Context, gluon
from mxnet import optimizer as opt

from ..checks import flag, is_number, path_of, short, whole_number
from ..devices.select import check_contexts
from ..distributed import group
from ..errors import StaleGradientError, StateError, TrainerError
from ..mxnet_internals.versions import require_np_arrays
from ..nested import Array, is_device_array, leaves, num_bytes
from ..refusals import JOINING, refusal
from .backward import run_backward
from .gradients import Examples, Gradients, Pass
from .layout import Layout
from .loss_scaler import LossScaler
from .optimizer_config import describe, options_of, restore_optimizer
from .options import as_number, batch_size_of, check_not_recording, check_options, check_virtual, made_optimizer
from .parameters import Params, gluon_order, has_values, replica_difference, trainers_of
from .precision import check_precision, precision_of, set_precision
from .process_sync import ProcessSync
from .replica_check import ReplicaCheck
from .running_stats import RunningStats, is_running_stat
from .slab import BUCKET_BYTES, Slab
from .states import TrainerState, check_state, read_states, write_states
from .sums import Sum, clip, finite_on_each, make_sum, store_type
from .tree_sum import TreeSum, VirtualShards
from .update import Update, checked_rate, is_replicable

_OF_GLUON = ("_allreduce_grads", "_init_optimizer", "_update")  # that programs for gluon.Trainer override


class Trainer(gluon.Trainer):
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
        devices holds about 1/k of the states and computes 1/k of the update. The weights do not change. This is stage 1 of ZeRO,
        or PyTorch's `ZeroRedundancyOptimizer`, on the devices of one process. With several processes, `check_replicas_every`,
        `LocalSGD`, the store `"nccl"`, sparse gradients, and optimizers that join parameters, such as nadam or your own, each
        device updates all.
    virtual_shards : int, optional
        Cut every batch into this many parts, computed one by one and summed in one order: weights, states and metrics then have
        the same bits on 1, 2, 4, ... devices, in one process or several. A multiple of their number. It takes `train_batch` or
        `fit`. BatchNorm normalises each part. CPU contexts must compute with one thread each.
    check_replicas_every : int, optional
        Every so many updates, compare the bits of weights and states on all devices, and raise `ReplicaError` if they differ.
        See `ReplicaCheck`.
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

    trains_apart = False  # whether the devices' weights differ between averages, as those of LocalSGD

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
        own = [name for name in _OF_GLUON if getattr(type(self), name) is not getattr(Trainer, name)]
        if own:
            raise TrainerError(
                f"{type(self).__name__}: got {own[0]}() of its own, which no step calls; expected none. Write a step() that "
                "calls allreduce_grads(), your own part, and update(batch_size)."
            )
        whole_number("Trainer", "bucket_bytes", bucket_bytes, high=2**63 - 1, advice="25 * 2**20 is usual.")
        flag("Trainer", "measure_grad_norm", measure_grad_norm)
        flag("Trainer", "find_unused_parameters", find_unused_parameters)
        flag("Trainer", "sharded_data", sharded_data)
        flag("Trainer", "shard_optimizer", shard_optimizer)
        require_np_arrays("Trainer")
        name, optimizer = short(optimizer), made_optimizer(optimizer, optimizer_params, params)
        needs_all = self.trains_apart or check_replicas_every is not None or group() is not None or store_type(kvstore) == "nccl"
        is_local = is_replicable(optimizer)
        self._layout = Layout(params, bucket_bytes, shards_optimizer=shard_optimizer and is_local and not needs_all)
        check_contexts(self._layout.contexts, "Trainer")
        apart = "Pipeline" if self._layout.spans_devices else "LocalSGD" if self.trains_apart and len(self.contexts) > 1 else ""
        if apart and not is_local:
            raise refusal(type(self).__name__, apart, JOINING, name)
        if isinstance(optimizer, opt.SGLD) and virtual_shards is None and group() is not None:
            raise refusal("Trainer", "several processes", "sgld")
        check_options(self._layout, compression_params, update_on_kvstore, clip_norm=clip_norm, clip_value=clip_value)
        if precision is not None:
            check_precision(params, precision)
        self.loss_scaler = LossScaler() if (precision or precision_of(params)) == "fp16" else None
        self._clip_norm, self._clip_value = clip_norm, clip_value
        self._measures = measure_grad_norm or clip_norm is not None
        self.grad_norm: Optional[Array] = None
        self.kept: Dict[str, object] = {}  # what the latest steps and runs can use again
        self._num_open = 0  # of accumulate() contexts
        self._num_counted: float = 0  # examples of the steps in them
        self._summed: Optional[List[Slab]] = None  # summed by allreduce_grads(), not applied by update() yet
        self._sum: Sum = make_sum(kvstore)
        self._process_sync = ProcessSync(self._layout)
        self.sharded_data = sharded_data and self._process_sync.in_job  # whether every process reads its own batches
        self._update = Update(optimizer, self._layout, gluon_order(params))
        updaters = list(self._update.updaters.values())
        self.replica_check = ReplicaCheck(self._layout, updaters, check_replicas_every, trains_apart=self.trains_apart)
        self._options = {"rescale_grad": optimizer.rescale_grad, "clip_norm": clip_norm, "clip_value": clip_value}
        self._options.update(sharded_data=sharded_data, check_replicas_every=check_replicas_every, bucket_bytes=bucket_bytes)
        self._options["number of devices"] = None if self.sharded_data else len(self.contexts)
        self.tree: Optional[TreeSum] = None  # the sum over virtual shards
        if virtual_shards is not None:
            self.use_virtual_shards(virtual_shards)
        self.gradients = Gradients(self._layout, find_unused=find_unused_parameters)
        if has_values(self._layout.params):
            self._layout.place()
            self._process_sync.begin(self._facts(optimizer))
        for former in trainers_of(params):  # everything was checked: from here on, this is the network's trainer
            if former.trains_apart and replica_difference(params):
                former.average_replicas()
        super().__init__(self._layout.params, optimizer, kvstore=None)
        self._optimizer: opt.Optimizer
        self._updaters = updaters  # gluon.Trainer's name, which other libraries use
        self._schedule_at_first = self._optimizer.lr_scheduler, copy.copy(self._optimizer.lr_scheduler)
        if precision is not None:
            set_precision(params, precision)
        statistics = [param for param in self._layout.params if is_running_stat(param)]
        self.running_stats = RunningStats(statistics, make_sum(kvstore), self._layout.devices)

    @property
    def virtual_shards(self) -> Optional[int]:
        """The number of virtual shards, None without."""
        return None if self.tree is None else self.tree.virtual.number

    def use_virtual_shards(self, number: int) -> None:
        """Cut batches into so many virtual shards from now on: see `virtual_shards` above.

        Raises
        ------
        TrainerError
            The number is not a multiple of the number of devices, or an option of the trainer needs sums in another order.
        """
        virtual = VirtualShards(number, self.contexts)
        check_virtual(self)
        if self.virtual_shards != number:
            self._sum = self.tree = TreeSum(virtual, self.contexts)

    @property
    def contexts(self) -> List[Context]:
        """The devices, in the order of the replicas."""
        return list(self._layout.contexts)

    @property
    def devices(self) -> List[Context]:
        """All devices, each once: with a `Pipeline`, those of all stages, otherwise `contexts`."""
        return list(self._layout.devices)

    def resolve_shapes(self) -> None:
        """Put parameters into buckets whose shapes the first batch has decided, as layers do not specify them.

        Call it between the first forward pass, in prediction mode, and the first recorded one: the parameters can then move into
        buckets before a graph holds them.
        """
        if not has_values(self._layout.params):
            return
        if self._layout.shapeless or not self._layout.slabs:
            self._layout.place()
        if self._process_sync.in_job:
            if self.gradients.has_new():  # of a generator's pass, before the first one of this network
                self.check_begun("Trainer")
            self._process_sync.begin(self._facts(self._optimizer))

    def _facts(self, optimizer: opt.Optimizer) -> Dict[str, object]:
        """Return what all processes must have in common, in addition to the parameters."""
        return {**options_of(optimizer), **self._options, "virtual_shards": self.virtual_shards}

    @property
    def params(self) -> List[gluon.Parameter]:
        """The parameters, in structural order."""
        return list(self._layout.params)

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
        run_backward("Trainer.backward", losses, [self])

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
        check_not_recording("Trainer.step")
        batch_size = batch_size_of("Trainer.step", batch_size, may_be_0=self.sharded_data)
        self._process_sync.check_begun("Trainer.step", divides=not self.sharded_data)
        if self.sharded_data:
            self._process_sync.check_size("Trainer.step", batch_size, self.gradients.latest)
        if self.loss_scaler is not None and batch_size:
            self.loss_scaler.check("Trainer.step")
        if batch_size == 0:  # the gradients so far are of other data
            self.gradients.drop_unused()
        if self._num_open:
            if not self.sharded_data:  # of which processes may have other numbers
                self.exchange(batch_size, accumulates=True)
            self._count(self.gradients.count(batch_size, adds=not self._sum.hold()))
            self._num_counted += batch_size
            if not self.sharded_data:  # other processes may have other numbers of batches
                self._move_statistics()
            return
        if self.gradients.has_counted and not self.gradients.all_take_part and not self.gradients.has_new():
            raise StaleGradientError(
                "Trainer.step: got no new gradient on any device; expected a backward pass. Call flush() to update without one."
            )
        self._step(batch_size, ignore_stale_grad)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
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
        if self._summed is not None:
            raise TrainerError(
                "Trainer.accumulate: got gradients that were summed and not applied; expected an update first. Call update() to "
                "apply them, or discard() to drop them."
            )
        had_new = self.gradients.has_new()
        self._num_open += 1
        try:
            yield
        except BaseException:
            self.discard()
            raise
        finally:
            self._num_open -= 1
        if not had_new and not self._num_open and not self.gradients.has_counted and self.gradients.has_new():
            raise TrainerError(
                "Trainer.accumulate: got backward passes that no step() counted; expected a step after each. Call step(n) inside."
            )

    def flush(self, ignore_stale_grad: bool = False) -> None:
        """Update with accumulated gradients, if there are any. Inside `accumulate` it does nothing: the update comes later.

        Use it at the end of the data, when a group of micro-steps is incomplete. Arguments and errors as for `step`.

        Raises
        ------
        TrainerError
            There was a backward pass that no `step` counted. Nothing was changed.
        """
        check_not_recording("Trainer.flush")
        if self._num_open or not self.gradients.has_counted:
            return
        if self.gradients.has_new():
            raise TrainerError(
                "Trainer.flush: got a backward pass after the last step(); expected the number of its examples. Call step(n) "
                "instead, or discard() to drop all that was accumulated."
            )
        self.gradients.drop_unused()  # flags that compiled steps have not looked at
        self._step(0, ignore_stale_grad)

    def discard(self) -> None:
        """Drop all gradients that no step has used, and accumulated ones: the next step uses only later backward passes.

        Call it after a backward pass that no step must use: of a batch that you skip, or of another network's loss.
        """
        if self.tree is None and not self.trains_apart and not (self._process_sync.in_job or self.running_stats.has_counted):
            self._catch_up()
        self._drop()

    def _drop(self) -> None:
        self.gradients.drop()
        self._sum.drop()
        self._num_counted, self._summed = 0, None

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
        self._process_sync.settle()
        if not self.trains_apart:
            self.replica_check.verify()

    def average_replicas(self) -> None:
        """Move BatchNorm's running statistics of all devices alike, if passes came that no step has used.

        `LocalSGD` also averages the weights. Evaluating and saving call it, in all processes of a job.
        """
        if self.tree is None:
            self._catch_up()

    def _catch_up(self) -> None:
        """Move BatchNorm's running statistics if a pass came that no step has used. Jobs do not know MXNet's `backward`."""
        in_job = self._process_sync.in_job
        self._count(self.gradients.unused() if not in_job else {})
        if self.running_stats.has_counted:
            self.running_stats.move(self._layout.slabs, anew=not in_job)

    def check_begun(self, operation: str) -> None:
        """Raise `ModesError` if the processes of a job do not share the weights yet."""
        self._process_sync.check_begun(operation)

    def take(self, found: Pass) -> None:
        """Let the next step use a pass."""
        self.gradients.take(found)
        if self.tree is None:  # virtual shards move the statistics themselves
            self.running_stats.count(found.examples)

    def leave_out(self, params: Sequence[gluon.Parameter]) -> None:
        """Let no step or update use gradients of these parameters: another trainer's pass has written over them."""
        self.gradients.leave_out(params)
        own = set(map(id, params))
        if self._summed and any(id(self._params[index]) in own for slab in self._summed for index in slab.indices):
            self._summed = None

    def _count(self, examples: Examples) -> None:
        """Count the examples of MXNet's own `backward`, if there are any."""
        if examples:
            self.running_stats.count(examples)

    def allreduce_grads(self) -> None:
        """Sum the gradients over the devices, for programs that change the sum before `update`.

        Raises
        ------
        TrainerError
            They have already been summed: a second sum would multiply them by the number of devices. Or the call is inside
            `accumulate`.
        """
        check_not_recording("Trainer.allreduce_grads")
        self._process_sync.check_begun("Trainer.allreduce_grads", divides=not self.sharded_data)
        self._check_sums("Trainer.allreduce_grads")
        slabs, examples = self.gradients.collect(ignore_stale_grad=True)
        self.exchange(0)
        if self._summed and not slabs:
            raise TrainerError(
                "Trainer.allreduce_grads: got gradients that it has already summed; expected a pass in between. Call update()."
            )
        is_all = slabs is self._layout.slabs  # each device gets the sum, which the program may change
        self._sum.run(self._layout.everywhere if is_all else [replace(slab, owner=None) for slab in slabs])
        self.gradients.mark_used()
        self._count(examples)
        self._summed = slabs

    def update(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Update the weights with gradients that `allreduce_grads` has summed. Arguments and errors as for `step`.

        The examples of steps inside `accumulate` are added to the batch size. An array that is not finite drops the gradients, as
        the optimizers do for which GluonNLP's `FP16Trainer` passes one after an overflow.

        Raises
        ------
        TrainerError
            The gradients of several devices were not summed: their weights would diverge.
        """
        check_not_recording("Trainer.update")
        self._check_sums("Trainer.update")
        number = as_number(batch_size)
        if number is not batch_size and is_number(number) and not math.isfinite(number):  # it was an array
            self.discard()
            return
        batch_size = batch_size_of("Trainer.update", number)
        if self.loss_scaler is not None:
            self.loss_scaler.check("Trainer.update")
        if self._summed is not None:
            self.gradients.check_summed(self._summed, ignore_stale_grad)
            self._apply(self._summed, batch_size)
            return
        if self._layout.needs_sum or self._process_sync.in_job:
            where = "the processes" if self._process_sync.in_job else f"{len(self._layout.devices)} devices"
            raise TrainerError(
                f"Trainer.update: got gradients that were not summed over {where}; expected allreduce_grads() before. Call "
                "step(), which does both."
            )
        self._step(batch_size, ignore_stale_grad)

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
        held = {str(device): {"weights": 0, "gradients": 0, "states": 0} for device in self.devices}
        for param in self._params:
            for kind, arrays in (("weights", param._data), ("gradients", param._grad)):
                for array in arrays or ():
                    held[str(array.context)][kind] += num_bytes(array)
        for parts, updater in zip(held.values(), self._updaters):
            parts["states"] = sum(num_bytes(leaf) for _, leaf in leaves(list(updater.states.values())) if is_device_array(leaf))
        return held

    def save_states(self, fname: str) -> None:
        """Write the optimizer's states and update counts, with the parameters' names and shapes, for any number of devices.

        A temporary file next to the target is renamed, so the target is always complete. It waits for the devices.

        Raises
        ------
        TrainerError
            Gradients were accumulated and not applied: the file would not contain them.
        """
        path_of("save_states", "fname", fname)
        self.check_applied("Trainer.save_states")
        write_states(fname, self.state())

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
        self.check_state(state, fname, "load_states")
        self.restore(state)

    def state(self) -> TrainerState:
        """Return what `restore` takes: the optimizer, its states and counts, with the arrays that training changes.

        Raises
        ------
        StateError
            The optimizer cannot be described.
        """
        layout, update = self._layout, self._update
        return TrainerState(
            layout.names,
            layout.structural,
            [param.shape for param in layout.params],
            update.order,
            update.states(),
            update.counts(),
            describe(self._optimizer),
            None if self.loss_scaler is None else self.loss_scaler.state(),
            None if self.tree is None else self.tree.virtual.state(),
        )

    def check_state(
        self, state: TrainerState, source: Any, operation: str, shapes: Optional[Mapping[int, Sequence[int]]] = None
    ) -> None:
        """Raise `StateError` unless `restore` can take a state.

        Parameters
        ----------
        source : path
            Where it was read, and the `operation` that reads it, for errors.
        shapes : mapping of int to shape, optional
            By the ids of parameters that have no values yet.
        """
        check_state(state, source, operation, self._layout, self._optimizer, shapes, self._parts(state))
        saved = None if state.virtual_shards is None else state.virtual_shards.get("number")
        if saved != self.virtual_shards:
            advice = "Leave virtual_shards out" if saved is None else f"Pass virtual_shards={saved}"
            raise StateError(
                f"{operation}: got {source} of a run with virtual_shards={saved} for one with {self.virtual_shards}; expected "
                f"the same number, as others round differently. {advice}."
            )

    def restore(self, state: TrainerState, *, learning_rate: bool = True) -> None:
        """Continue from a state that `check_state` accepts. Accumulated gradients are dropped.

        Without `learning_rate`, the optimizer keeps its own.
        """
        for part, saved in self._parts(state):
            part.restore(saved)
        restore_optimizer(state.optimizer, self._optimizer, self._schedule_at_first, learning_rate=learning_rate)
        self._drop()  # statistics may have been loaded, too
        self.running_stats.begin()
        self._update.restore(state.states, state.counts, state.order)

    def _parts(self, state: TrainerState) -> List[Tuple[Any, Any]]:
        """Return what has a state of its own here and in the state, each with that."""
        pairs = (self.loss_scaler, state.loss_scaler), (self.tree and self.tree.virtual, state.virtual_shards)
        return [pair for pair in pairs if None not in pair]

    def _check_sums(self, operation: str) -> None:
        """Raise where devices train apart, and inside `accumulate`, where more passes follow."""
        other = "LocalSGD" if self.trains_apart else "accumulate()" if self._num_open else ""
        if other:
            raise refusal(operation, other, "allreduce_grads()", f"{operation.split('.')[1]}()")

    def check_applied(self, operation: str) -> None:
        """Raise `TrainerError` if gradients were accumulated and not applied."""
        if self._num_counted:
            raise TrainerError(
                f"{operation}: got gradients of {self._num_counted} examples that were not applied; expected an update "
                "first. Call flush() outside of accumulate()."
            )

    def _step(self, batch_size: float, ignore_stale_grad: bool) -> None:
        slabs, examples = self.gradients.collect(ignore_stale_grad, batch_size)
        if self.tree is None and self._process_sync.in_job:
            self.exchange(self._num_counted + batch_size)
        self._reduce(slabs)
        # From here on these gradients are sums: if the optimizer raises, another step must not sum them again.
        self.gradients.mark_used()
        self._count(examples)
        self._summed = slabs
        self._apply(slabs, batch_size)

    def exchange(self, batch_size: float, *, accumulates: bool = False) -> None:
        """Check that all processes sum the same gradients, before they do: see `ProcessSync.step`."""
        if self._process_sync.in_job:
            shared = {} if self.sharded_data else {"inside accumulate()": accumulates, "batch size": batch_size}
            self._process_sync.step({**self._facts(self._optimizer), **shared}, divides=not self.sharded_data)

    def _reduce(self, slabs: List[Slab]) -> None:
        self._sum.run(slabs)

    def _apply(self, slabs: List[Slab], batch_size: float) -> None:
        self._move_statistics()
        num_examples, self._num_counted = self._num_counted + batch_size, 0
        scale = self._loss_scale_of(slabs)
        if self.sharded_data:
            self._process_sync.divisor.divide(slabs, num_examples)
            num_examples = 1
        if scale is not None:
            self._optimizer.rescale_grad = self._scale / scale / num_examples
            self._clip(slabs)
            try:
                self._update.apply(slabs)
                self._sum.share(slabs)
            except BaseException:  # such as Ctrl-C, or a schedule's: some devices are updated, and others are not
                if not self.trains_apart:
                    with suppress(StateError):  # of options that were changed: they are the error
                        self._make_equal(slabs)
                raise
            if self.replica_check.is_on and self.replica_check.after_update():
                self.check_replicas()
        self.gradients.put_back_running()
        self._summed = None

    def _move_statistics(self) -> None:
        """Move BatchNorm's running statistics after a pass. Virtual shards, and devices that train apart, do it themselves."""
        if self.tree is None and not self.trains_apart:
            self.running_stats.move(self._layout.slabs)

    def _make_equal(self, slabs: List[Slab]) -> None:
        """Give all devices what the first one holds, or the owner."""
        for slab in slabs:
            for weight in slab.weights[1:] if slab.owner is None else ():
                slab.weights[0].copyto(weight)
        if self._update.is_local:
            self._update.restore(self._update.states(), self._update.counts())
        self._sum.share(slabs)

    def _loss_scale_of(self, slabs: List[Slab]) -> Optional[float]:
        """Return the loss scale of these gradients, in addition to `_scale`; None if they overflowed and must be skipped."""
        if self.loss_scaler is not None:
            return self.loss_scaler.update([slab.summed[0] for slab in slabs])
        scaler = getattr(self, "_amp_loss_scaler", None)  # mx.contrib.amp.init_trainer put it there
        if scaler is None:
            return 1.0
        # It looks at the gradients of objects, on one device: 1, or infinity if one of a device is not finite.
        found = [1 / finite.as_in_context(self.contexts[0]) for finite in finite_on_each([slab.summed[0] for slab in slabs])]
        return None if found and scaler.has_overflow([SimpleNamespace(_grad=[one]) for one in found]) else 1.0

    def _init_optimizer(self, optimizer: Any, optimizer_params: Any) -> None:
        """Raise once the trainer was made."""
        if hasattr(self, "running_stats"):
            raise TrainerError(
                "Trainer._init_optimizer: got an optimizer for a trainer that has one, with states; expected none. Call "
                "set_learning_rate(), or make a new Trainer."
            )
        super()._init_optimizer(optimizer, optimizer_params)

    def _allreduce_grads(self) -> None:
        """Raise: a step of Gluon's own calls it."""
        raise TrainerError(
            "Trainer._allreduce_grads: got a call of Gluon's private part of a step; expected allreduce_grads(). Call that, and "
            "update(batch_size) after it."
        )

    def __reduce__(self) -> Any:
        """Raise for `copy` and `pickle`, also of a network, whose parameters know their trainer."""
        raise TrainerError(
            f"{type(self).__name__}: got a copy or a pickle of a trainer or of its network; expected one that it shares no "
            "memory with. Build the network again, and call its load_parameters() with a file of save_parameters()."
        )

    def _check_contexts(self) -> List[Context]:
        """Return the devices of the replicas: what `gluon.Trainer` asks of its parameters, ours may be on different ones."""
        return self.contexts

    def _clip(self, slabs: List[Slab]) -> None:
        if not self._measures and self._clip_value is None:
            return
        rescale = self._optimizer.rescale_grad
        limits = (None if bound is None else bound / rescale for bound in (self._clip_norm, self._clip_value))
        norm = clip(slabs, self.contexts[0], *limits, measures=self._measures)
        if norm is not None:
            self.grad_norm = (norm * rescale).as_np_ndarray()  # a legacy array has no float()

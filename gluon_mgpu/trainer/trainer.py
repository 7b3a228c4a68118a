"""Trainer: a gluon.Trainer whose steps are correct on any number of devices."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

from mxnet import Context, gluon
from mxnet import optimizer as opt

from ..checks import flag, path_of
from ..devices.select import check_contexts
from ..errors import StateError, TrainerError
from ..nested import Array
from .across_processes import ProcessSync
from .buckets import BUCKET_BYTES
from .buffers import Buffer
from .copies import make_copyable
from .groups import GroupedBuffers, clip, make_reduction, make_replicas, make_update
from .loss_scaler import LossScaler
from .options import check_batch_size, check_buckets, check_clipping, check_optimizer, check_options, check_sharded, check_virtual
from .parameters import Params, gluon_order, has_values
from .precision import precision_of, set_precision
from .reduction import clip_values, global_norm, scale_to_norm
from .running_stats import claim_examples, is_running_stat, remember_equal, stats_of
from .states import StateData, read_states, states_on, write_states
from .virtual_shards import TreeReduction, VirtualShards
from .voting import ReplicaCheck


class Trainer(gluon.Trainer):
    """Applies an optimizer to a network on several devices. A drop-in `gluon.Trainer`.

    ```
    step(batch_size):  idle devices' gradients := 0  ─►  sum over devices  ─►  clip  ─►  the same update on each device
    ```

    In addition to Gluon's Trainer: a device without data takes part with zeros instead of a stale gradient; gradients are always
    reduced over all devices and over the processes of a job; parameters are in structural order, and states are loaded only into
    the network that they belong to, on any number of devices; BatchNorm's running statistics are not touched; several batches
    can make one step (`accumulate`); gradients are clipped after they were summed, averaged and accumulated.

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
        How gradients are reduced over devices: `"device"` or `"local"`; see `Reduction`.
    compression_params : dict, optional
        `{"type": "2bit", "threshold": 0.5}` over MXNet's store, `{"type": "fp16"}` over Horovod: the compression of gradients
        between processes; see `DistSync.compress` and `Horovod.compress`. Both apply to sums over examples, before these are
        divided by their number.
    update_on_kvstore : None or False
        For compatibility with Gluon; the update always runs on the devices.
    clip_norm : float, optional
        Scale the averaged gradient (the sum over all devices and micro-steps, divided by their examples), so that its 2-norm
        over all parameters is at most this.
    clip_value : float, optional
        Then clip each of its elements to -clip_value .. clip_value. Gluon's optimizer option `clip_gradient` does this as well;
        optimizers that add weight decay to the gradient clip the sum.
    measure_grad_norm : bool
        Compute `grad_norm` even if nothing is clipped.
    static_graph : bool
        Promise that every step trains the same parameters on each device that gets data, and that they are not frozen, replaced
        or given other multipliers. After the first step that trains all, the trainer checks one parameter per device for a new
        gradient instead of all. This helps networks of many hundreds of parameters. A device without data is still noticed; a
        parameter that a later step leaves out is not, and would be updated with a stale gradient.
    find_unused_parameters : bool
        In each step, do not update parameters that got no gradient on any device, and log their names once. A step without any
        gradient still raises. Steps that leave parameters out are slower: see `ignore_stale_grad`.
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
        or PyTorch's `ZeroRedundancyOptimizer`, on the devices of one process.
    virtual_shards : int, optional
        Cut every batch into this many parts, computed one by one and summed in one order: weights, states and metrics then have
        the same bits on 1, 2, 4, ... devices, in one process or several. A multiple of their number. It takes `train_batch` or
        `fit`. BatchNorm normalises each part. CPU contexts must compute with one thread each.
    check_replicas_every : int, optional
        Every so many updates, compare the bits of weights and states on all devices, and report one that differs. With three
        replicas or more, the bits of the majority are restored; with two, the run stops. See `ReplicaCheck`.
    bucket_bytes : int, bytes
        The size of the buckets of parameters and gradients. They are in reverse order, so that the last ones are reduced while
        the backward pass still computes the first. With `shard_optimizer`, it is divided by the number of devices.

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
        compression_params: Optional[Dict[str, Any]] = None,
        update_on_kvstore: Optional[bool] = None,
        *,
        clip_norm: Optional[float] = None,
        clip_value: Optional[float] = None,
        measure_grad_norm: bool = False,
        static_graph: bool = False,
        find_unused_parameters: bool = False,
        precision: Optional[str] = None,
        sharded_data: bool = False,
        shard_optimizer: bool = False,
        virtual_shards: Optional[int] = None,
        check_replicas_every: Optional[int] = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        check_buckets(bucket_bytes)
        switches = {"measure_grad_norm": measure_grad_norm, "static_graph": static_graph, "sharded_data": sharded_data}
        switches.update(find_unused_parameters=find_unused_parameters, shard_optimizer=shard_optimizer)
        for name, value in switches.items():
            flag("Trainer", name, value)
        self._replicas: Any = make_replicas(
            params,
            bucket_bytes=bucket_bytes,
            static_graph=static_graph,
            find_unused=find_unused_parameters,
            shards_optimizer=shard_optimizer,
        )
        self._optimizer: opt.Optimizer
        self._order = gluon_order(params)
        check_contexts(self._replicas.contexts, "Trainer")
        check_optimizer(optimizer, optimizer_params)
        check_options(self._replicas, update_on_kvstore)
        check_clipping(clip_norm=clip_norm, clip_value=clip_value)
        self._reduction: Any = make_reduction(kvstore, self._replicas)
        self._process_sync = ProcessSync(self._replicas, compression_params, sharded_data=sharded_data)
        if shard_optimizer:
            check_sharded(kvstore, self._process_sync)
        super().__init__(self._replicas.params, optimizer, optimizer_params, kvstore=None, update_on_kvstore=False)
        make_copyable({type(param) for param in self._params})
        self._clip_norm, self._clip_value = clip_norm, clip_value
        self._measures = measure_grad_norm or clip_norm is not None
        self._grad_norm: Optional[Array] = None
        self._kept_passes: Dict[bool, Any] = {}  # of the latest run of fit(); see `data_parallel.compiled.passes_of`
        self._num_open = 0  # of accumulate() contexts
        self._num_counted: float = 0  # examples of the steps in them
        self._summed: Optional[List[Buffer]] = None  # summed by allreduce_grads(), not applied by update() yet
        self._use(self._optimizer)
        if precision is not None:
            set_precision(params, precision)
        self.loss_scaler = LossScaler() if precision_of(params) == "fp16" else None
        if has_values(self._replicas.params):
            self._process_sync.begin()
        self._made_of = weakref.ref(params) if isinstance(params, gluon.Block) else None
        self._running = [param for param in self._params if is_running_stat(param)]
        remember_equal(self._running)
        self._process_sync.compress(has_shapes=has_values(self._replicas.params))
        self._replicas.take_over()
        self._virtual: Optional[VirtualShards] = None
        if virtual_shards is not None:
            self.use_virtual_shards(virtual_shards)
        self.replica_check = None if check_replicas_every is None else ReplicaCheck(self, check_replicas_every)

    @property
    def virtual_shards(self) -> Optional[int]:
        """The number of virtual shards, None without."""
        return None if self._virtual is None else self._virtual.number

    def use_virtual_shards(self, number: int) -> None:
        """Cut batches into so many virtual shards from now on: see `virtual_shards` above.

        Raises
        ------
        TrainerError
            The number is not a multiple of the number of devices, or an option of the trainer needs sums in another order.
        """
        if self.virtual_shards == number:
            return
        check_virtual(self)
        self._virtual = VirtualShards(number, self.contexts)
        self._reduction = TreeReduction(self.contexts, self._virtual.number)

    @property
    def sharded_data(self) -> bool:
        """Whether every process of a job reads its own batches."""
        return self._process_sync.sharded_data

    @property
    def contexts(self) -> List[Context]:
        """The devices, in the order of the replicas."""
        return list(self._replicas.contexts)

    @property
    def devices(self) -> List[Context]:
        """All devices, each once: with a `Pipeline`, those of all stages, otherwise `contexts`."""
        return list(self._replicas.devices)

    def running_stats_of(self, net: gluon.Block) -> Iterable[gluon.Parameter]:
        """Return BatchNorm's running statistics of a network: without looking through it if the trainer was made of it."""
        return self._running if self._made_of is not None and self._made_of() is net else stats_of(net)

    @property
    def grad_norm(self) -> Optional[Array]:
        """The 2-norm over all parameters of the last applied gradient, averaged, before clipping.

        An mxnet.np.ndarray, shape (1,), on the first device; `float()` waits for it and reads it. None before the first update,
        and without `clip_norm` and `measure_grad_norm`.
        """
        return self._grad_norm

    def resolve_shapes(self) -> bool:
        """Return whether the shapes of all parameters are known; the first batch decides shapes that layers do not specify.

        Call it between the first forward pass, in prediction mode, and the first recorded one: the parameters can then move into
        buckets before a graph holds them.
        """
        known = self._replicas.resolve_shapes()
        if self._process_sync.is_joint and has_values(self._replicas.params):
            self._process_sync.begin()
        return known

    def scale(self, losses: Sequence[Array]) -> Sequence[Array]:
        """Return the losses for `backward`: multiplied by the loss scale with fp16, otherwise unchanged.

        A loop by hand is correct in every precision with `mgpu.backward(trainer.scale(losses))`.
        """
        return losses if self.loss_scaler is None else self.loss_scaler.scale_losses(losses)

    def step(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Reduce the gradients over the devices and update the weights on each. It does not wait.

        Inside `accumulate` it only counts the examples; the next step outside divides by all of them.

        Parameters
        ----------
        batch_size : number
            Examples over all devices: gradients are divided by it. 1 if you have averaged the loss.
        ignore_stale_grad : bool
            Do not update parameters that got no gradient on any device, instead of raising.

        Raises
        ------
        StaleGradientError
            A parameter got no gradient on any device since the last step. Nothing was changed.
        TrainerError
            The batch size is not a positive number, or a parameter was moved to other devices.
        """
        if not (self.sharded_data and batch_size == 0):
            check_batch_size("Trainer.step", batch_size)
        if self._virtual is not None and self._num_open:
            claim_examples(self._running)
            self._reduction.hold()
            self._replicas.mark_used(self._replicas.weight_buffers())
            self._num_counted += batch_size
            return
        if self.loss_scaler is not None:
            self.loss_scaler.check("Trainer.step")
        claim_examples(self._running)
        if batch_size == 0:  # the gradients so far are of other data
            self._replicas.drop_earlier()
        if self._replicas.is_adding:
            try:
                self._replicas.note_pass(ignore_stale_grad or self._num_open > 0)
            except TrainerError:
                self.discard()  # the sum is invalid
                raise
            self._num_counted += batch_size
            if self._num_open:
                return
            batch_size = 0
        self._step(batch_size, ignore_stale_grad)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Make one update of several batches: inside, gradients of backward passes add up, and `step(n)` only counts n.

        ```
        with trainer.accumulate():    backward, step(4)    backward, step(4)    gradients add up on each device
        outside:                      backward, step(2)                         reduced once, divided by 10, applied
                                      or flush()                                the same without another batch
        ```

        The update is that of one batch of all these examples, also with uneven splits and idle devices. It takes no memory,
        except for sparse gradients, which `step` sums separately: they need a step after each backward pass. BatchNorm
        normalises each micro-batch separately.

        You may open contexts again before the update, and nest them. An exception inside drops everything that was accumulated:
        the weights are those of the last update, and the next step starts a new sum.

        Raises
        ------
        TrainerError
            `allreduce_grads` has summed gradients that `update` has not applied; or another trainer accumulates gradients of the
            same parameters.

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
        if self._virtual is None:
            self._replicas.start_adding()
        self._num_open += 1
        try:
            yield
        except BaseException:
            self._num_open -= 1
            self.discard()
            raise
        self._num_open -= 1
        if not self._num_open and self._virtual is None:
            self._replicas.close()

    def flush(self, ignore_stale_grad: bool = False) -> None:
        """Update with accumulated gradients, if there are any. Inside `accumulate` it does nothing: the update comes later.

        Use it at the end of the data, when a group of micro-steps is incomplete. Arguments and errors as for `step`.

        Raises
        ------
        TrainerError
            There was a backward pass that no `step` counted. Nothing was changed.
        """
        self._replicas.check_own("Trainer.flush")
        if self._virtual is not None:
            if self._reduction.holds and not self._num_open:
                self._reduction.sum([])
                self._summed = self._replicas.current_buffers()
                self._apply(self._summed, 0)
            return
        if self._num_open or not self._replicas.is_adding:
            return
        if self._replicas.has_new():
            raise TrainerError(
                "Trainer.flush: got a backward pass after the last step(); expected the number of its examples. Call step(n) "
                "instead, or discard() to drop all that was accumulated."
            )
        if self._num_counted:
            self._step(0, ignore_stale_grad)
        else:
            self.discard()

    def discard(self) -> None:
        """Drop all gradients that no step has used, and accumulated ones: the next step uses only later backward passes.

        Call it after a backward pass that no step must use: of a batch that you skip, or of another network's loss.
        """
        self._replicas.drop()
        self._num_counted, self._summed = 0, None
        if self._virtual is not None:
            self._reduction.drop()
        elif self._num_open:
            self._replicas.start_adding()

    def allreduce_grads(self) -> None:
        """Sum the gradients over the devices, for programs that change the sum before `update`.

        Raises
        ------
        TrainerError
            They have already been summed: a second sum would multiply them by the number of devices. Or the call is inside
            `accumulate`.
        """
        self._complete("Trainer.allreduce_grads")
        if self._replicas.is_sharded:
            raise TrainerError(
                "Trainer.allreduce_grads: got a call with shard_optimizer=True, where the sum of each gradient is on one device; "
                "expected step(). Clip with clip_norm or clip_value, or leave shard_optimizer out."
            )
        claim_examples(self._running)
        buffers = self._replicas.collect(ignore_stale_grad=True)
        if self._summed and not buffers:
            raise TrainerError(
                "Trainer.allreduce_grads: got gradients that it has already summed; expected a backward pass in "
                "between. Call update()."
            )
        self._reduction.sum(buffers)
        self._replicas.mark_used(buffers)
        self._summed = buffers

    def update(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Update the weights with gradients that `allreduce_grads` has summed. Arguments and errors as for `step`.

        The examples of steps inside `accumulate` are added to the batch size.

        Raises
        ------
        TrainerError
            The gradients of several devices were not summed: their weights would diverge.
        """
        check_batch_size("Trainer.update", batch_size)
        if self.loss_scaler is not None:
            self.loss_scaler.check("Trainer.update")
        if self._summed is not None:
            self._apply(self._replicas.collect_summed(self._summed, ignore_stale_grad), batch_size)
            return
        if self._replicas.needs_sum:
            raise TrainerError(
                f"Trainer.update: got gradients that were not summed over {len(self._replicas.devices)} devices; expected "
                "allreduce_grads() before. Call step(), which does both."
            )
        self._complete("Trainer.update")
        claim_examples(self._running)
        buffers = self._replicas.collect(ignore_stale_grad)
        self._replicas.mark_used(buffers)
        self._apply(buffers, batch_size)

    def bytes_per_device(self) -> Dict[str, Dict[str, int]]:
        """Return the bytes that training holds on each device, in addition to the network's activations.

        Returns
        -------
        dict
            By device, such as `cpu(0)`: `weights`, `gradients`, `states` of the optimizer, and `sums`, the memory of MXNet's
            store for sums over devices, computed by its rule. States and sums exist after the first step.

        Examples
        --------
        >>> import mxnet as mx
        >>> net = gluon.nn.Dense(16, in_units=16, use_bias=False)
        >>> net.initialize(ctx=mx.cpu(0))
        >>> Trainer(net, "sgd").bytes_per_device()
        {'cpu(0)': {'weights': 1024, 'gradients': 1024, 'states': 0, 'sums': 0}}
        """
        parts = zip(self._replicas.devices, self._replicas.bytes_held(), self._update.bytes_held(), self._reduction.bytes_held())
        return {
            str(context): {"weights": weights, "gradients": gradients, "states": states, "sums": sums}
            for context, (weights, gradients), states, sums in parts
        }

    def save_states(self, fname: str) -> None:
        """Write the optimizer, its states and update counts, with the parameters' names and shapes, for any number of devices.

        `gluon.Trainer(net.collect_params(), ...).load_states` also reads the file, in a program whose layers have the same names.

        A temporary file next to the target is renamed, so the target is always complete. It waits for the devices.

        Raises
        ------
        TrainerError
            Gradients were accumulated and not applied: the file would not contain them.
        """
        path_of("save_states", "fname", fname)
        self._check_applied()
        scale = None if self.loss_scaler is None else self.loss_scaler.state()
        write_states(fname, self._replicas, self._optimizer, self._update, scale)

    def load_states(self, fname: str) -> None:
        """Read a file of `save_states`, on any number of devices. Accumulated gradients are dropped.

        A file of `gluon.Trainer` is read in Gluon's order (names sorted as strings); only its shapes can be checked. The
        file is a pickle: load only files that you trust.

        Raises
        ------
        StateError
            The file has another format, or belongs to another network or optimizer. Nothing was changed.
        """
        path_of("load_states", "fname", fname, error=StateError)
        content, optimizer = self.check_states(fname)
        states = states_on(self._replicas, optimizer, content["states"], fname)
        if self.loss_scaler is not None and content.get("loss_scaler") is not None:
            self.loss_scaler.restore(content["loss_scaler"])
        optimizer.param_dict = dict(enumerate(self._params))
        self.discard()
        self._use(optimizer)
        self._update.restore(states, content["counts"], content.get("order"))

    def check_states(self, fname: str) -> Tuple[StateData, opt.Optimizer]:
        """Return the content of a file of states and its optimizer; check that they belong to this trainer.

        Raises
        ------
        StateError
            As for `load_states`.
        """
        return read_states(fname, self._replicas, self._optimizer, self._order)

    def _complete(self, operation: str) -> None:
        """Count the last pass of an accumulation; raise inside `accumulate`, where more passes follow."""
        if self._num_open:
            raise TrainerError(
                f"{operation}: got a call inside accumulate(); expected gradients that are complete. Call it after."
            )
        if self._replicas.is_adding and self._replicas.has_new():
            self._replicas.note_pass()

    def _check_applied(self, operation: str = "Trainer.save_states") -> None:
        if self._num_counted:
            raise TrainerError(
                f"{operation}: got gradients of {self._num_counted} examples that were not applied; expected an update "
                "first. Call flush() outside of accumulate()."
            )

    def _step(self, batch_size: float, ignore_stale_grad: bool) -> None:
        self._process_sync.begin()
        buffers = self._replicas.collect(ignore_stale_grad)
        self._reduce(buffers)
        # From here on these gradients are sums: if the optimizer raises, another step must not sum them again.
        self._replicas.mark_used(buffers)
        self._summed = buffers
        self._apply(buffers, batch_size)

    def _reduce(self, buffers: List[Buffer]) -> None:
        if self._replicas.is_sharded and getattr(self, "_amp_loss_scaler", None) is not None:
            raise TrainerError(
                "Trainer.step: got MXNet's AMP and shard_optimizer=True; expected sums on one device, where AMP checks them. "
                "Pass precision='fp16' instead of calling amp.init_trainer, or leave shard_optimizer out."
            )
        self._reduction.sum(buffers)

    def _apply(self, buffers: List[Buffer], batch_size: float) -> None:
        num_examples, self._num_counted = self._num_counted + batch_size, 0
        multiplied = self._multiplied_by(buffers)
        if self.sharded_data:
            self._process_sync.divide(buffers, self._replicas.devices, num_examples)
            num_examples = 1
        if multiplied is not None:
            self._optimizer.rescale_grad = self._scale / multiplied / num_examples
            self._clip(buffers)
            self._update.apply(buffers)
            self._reduction.share(buffers)
            if self.replica_check is not None:
                self.replica_check.after_update()
        self._replicas.put_back_running()
        self._summed = None

    def _multiplied_by(self, buffers: List[Buffer]) -> Optional[float]:
        """Return the loss scale of these gradients, in addition to `_scale`; None if they overflowed and must be skipped."""
        if self.loss_scaler is not None:
            return self.loss_scaler.settle([buffer.summed[0] for buffer in buffers])
        scaler = getattr(self, "_amp_loss_scaler", None)  # mx.contrib.amp.init_trainer put it there
        # It checks objects with gradients: a buffer stands for all its parameters.
        gradients = [SimpleNamespace(_grad=buffer.summed) for buffer in buffers]
        return None if scaler is not None and gradients and scaler.has_overflow(gradients) else 1.0

    def __reduce__(self) -> Any:
        """Raise for `copy` and `pickle`. Copies and pickles of the network do not contain its trainer."""
        raise TrainerError(
            f"{type(self).__name__}: got a copy or a pickle of a trainer; expected one of its network, whose memory it shares. "
            "Call save_states(fname), copy the network, make a new trainer of the copy, and call its load_states(fname)."
        )

    def _check_contexts(self) -> List[Context]:
        """Return the devices of the replicas: what `gluon.Trainer` asks of its parameters, ours may be on different ones."""
        return self.contexts

    def _clip(self, buffers: List[Buffer]) -> None:
        rescale = self._optimizer.rescale_grad
        if isinstance(buffers, GroupedBuffers) or self._replicas.is_sharded:
            limits = (None if bound is None else bound / rescale for bound in (self._clip_norm, self._clip_value))
            norm = clip(buffers, self.contexts[0], *limits, measures=self._measures)
            self._grad_norm = self._grad_norm if norm is None else (norm * rescale).as_np_ndarray()
            return
        for replica in range(len(self.contexts)) if buffers else ():
            gradients = [buffer.gradients[replica] for buffer in buffers]
            norm = None
            if self._clip_norm is not None:
                norm = scale_to_norm(gradients, self._clip_norm / rescale)
            elif self._measures and not replica:
                norm = global_norm(gradients)
            if norm is not None and not replica:
                self._grad_norm = (norm * rescale).as_np_ndarray()  # a legacy array has no float()
            if self._clip_value is not None:
                clip_values(gradients, self._clip_value / rescale)

    def _use(self, optimizer: opt.Optimizer) -> None:
        self._optimizer = optimizer
        self._update = make_update(optimizer, self._replicas, self._order)
        if self._replicas.is_sharded and not self._update.is_alike:
            raise TrainerError(
                f"Trainer: got {type(optimizer).__name__} and shard_optimizer=True; expected an optimizer that updates each "
                "parameter from its own gradient, state and count alone. Use sgd or adam, or leave shard_optimizer out."
            )
        self._updaters = self._update.updaters  # gluon.Trainer's name, which other libraries use

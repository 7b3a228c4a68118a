"""Trainer: a gluon.Trainer whose steps are right on any number of devices."""

from __future__ import annotations

import os
import pickle
import re
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any, Dict, List, Optional, Tuple

import numpy as np
from mxnet import Context, gluon
from mxnet import optimizer as opt

from .buckets import BUCKET_BYTES
from .devices import check_contexts
from .errors import StateError, TrainerError
from .nested import is_device_array
from .parameters import Params, shape_fits
from .reduction import Reduction, clip_global_norm
from .replicas import Buffer, Replicas
from .update import Update, filled

_FORMAT = "gluon_mgpu.Trainer"


class Trainer(gluon.Trainer):
    """Applies an optimizer to a network on several devices. A drop-in `gluon.Trainer`.

    ```
    step(batch_size):  idle devices' gradients := 0  ─►  sum over devices  ─►  clip  ─►  update, on each device alike
    ```

    What it does that Gluon's does not: a device that got no data takes part with zeros, instead of its gradient of an earlier
    step; several devices are always reduced; parameters are taken in structural order, and states are loaded only into the
    network that they belong to, on any number of devices; BatchNorm's running statistics are left alone; `clip_norm`.

    Parameters
    ----------
    params : gluon.Block, ParameterDict, dict or list of gluon.Parameter
        Initialised on the devices. Prefer the Block: it knows the structural names.
    optimizer : str or mxnet.optimizer.Optimizer
    optimizer_params : dict, optional
        For an optimizer given by name: `{"learning_rate": 0.1}`.
    kvstore : str, KVStore or None
        How devices are reduced: `"device"` or `"local"`; see `Reduction`.
    compression_params : None
        Gluon's place for it; gradient compression is not in this version.
    update_on_kvstore : None or False
        Gluon's place for it; the update is always done on the devices.
    clip_norm : float, optional
        Clip the averaged gradient (the sum over all devices, divided by the batch size) to this global 2-norm.
    static_graph : bool
        Promise that every step trains the same parameters on each device that gets data, and that nobody freezes them, makes
        them anew or sets their multipliers. After the first step that trains all, one parameter a device is asked whether it
        has a new gradient, instead of every one: for networks of many hundreds of parameters. A device without data is noticed
        as ever; a parameter that a later step leaves out is not, and would be updated with its old gradient.
    bucket_bytes : int, bytes
        Parameters and gradients lie in buckets of this size, in reverse order, so that the last ones are reduced while the
        backward pass still computes the first.

    Raises
    ------
    TrainerError
        The parameters or options cannot be trained with.

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
        static_graph: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        _check_buckets(bucket_bytes)
        self._replicas = Replicas(params, bucket_bytes=bucket_bytes, static_graph=static_graph)
        self._optimizer: opt.Optimizer
        check_contexts(self._replicas.contexts, "Trainer")
        _check_optimizer(optimizer)
        _check_options(self._replicas, compression_params, update_on_kvstore, clip_norm)
        self._reduction = Reduction(kvstore, self._replicas.contexts)
        super().__init__(self._replicas.params, optimizer, optimizer_params, kvstore=None, update_on_kvstore=False)
        self._clip_norm = clip_norm
        self._summed: Optional[List[Buffer]] = None  # what allreduce_grads() has summed and update() has not applied
        self._use(self._optimizer)

    @property
    def contexts(self) -> List[Context]:
        """The devices, in the order of the replicas."""
        return list(self._replicas.contexts)

    def know_shapes(self) -> bool:
        """Return whether the shapes of all parameters are known; the first batch decides those that the layers were not told.

        Asked between the first forward pass, in prediction mode, and the first recorded one, it lets the parameters move before
        a graph holds them.
        """
        return self._replicas.know_shapes()

    def step(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Reduce the gradients over the devices and update the weights on each. It does not wait.

        Parameters
        ----------
        batch_size : number
            Examples over all devices: gradients are divided by it. 1 where the loss was averaged by hand.
        ignore_stale_grad : bool
            Leave parameters alone that got no gradient on any device, instead of raising.

        Raises
        ------
        StaleGradientError
            A parameter got no gradient on any device since the last step. Nothing was changed.
        TrainerError
            The batch size is not a positive number, or a parameter was moved to other devices.
        """
        _check_batch_size("Trainer.step", batch_size)
        buffers = self._replicas.collect(ignore_stale_grad)
        self._reduction.sum(buffers)
        # From here on these gradients are sums: should the optimizer raise, another step must not sum them again.
        self._replicas.mark_used(buffers)
        self._summed = buffers
        self._apply(buffers, batch_size)

    def allreduce_grads(self) -> None:
        """Sum the gradients over the devices, before `update`: for those who change the sum in between.

        Raises
        ------
        TrainerError
            They have been summed: a second sum would multiply them by the number of devices.
        """
        buffers = self._replicas.collect(ignore_stale_grad=True)
        if self._summed and not buffers:
            raise TrainerError(
                "Trainer.allreduce_grads: got gradients that it has summed before; need a backward pass in "
                "between. Call update()."
            )
        self._reduction.sum(buffers)
        self._replicas.mark_used(buffers)
        self._summed = buffers

    def update(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Update the weights with gradients that `allreduce_grads` has summed. Arguments and errors as for `step`.

        Raises
        ------
        TrainerError
            Several devices were not reduced: each would go its own way.
        """
        _check_batch_size("Trainer.update", batch_size)
        if self._summed is not None:
            self._apply(self._replicas.collect_summed(self._summed, ignore_stale_grad), batch_size)
            return
        if len(self.contexts) > 1:
            raise TrainerError(
                f"Trainer.update: got gradients that were not summed over {len(self.contexts)} devices; need allreduce_grads() "
                "before. Call step(), which does both."
            )
        buffers = self._replicas.collect(ignore_stale_grad)
        self._replicas.mark_used(buffers)
        self._apply(buffers, batch_size)

    def bytes_per_device(self) -> Dict[str, Dict[str, int]]:
        """Return what training holds on each device, in bytes, beside the network's own activations.

        Returns
        -------
        dict
            By device, such as `cpu(0)`: `weights`, `gradients`, `states` of the optimizer, and `sums`: what adding up over the
            devices takes, by the rule of MXNet's store. States and sums are there after the first step.

        Examples
        --------
        >>> import mxnet as mx
        >>> net = gluon.nn.Dense(16, in_units=16, use_bias=False)
        >>> net.initialize(ctx=mx.cpu(0))
        >>> Trainer(net, "sgd").bytes_per_device()
        {'cpu(0)': {'weights': 1024, 'gradients': 1024, 'states': 0, 'sums': 0}}
        """
        parts = zip(self.contexts, self._replicas.bytes_held(), self._update.bytes_held(), self._reduction.bytes_held())
        return {
            str(context): {"weights": weights, "gradients": gradients, "states": states, "sums": sums}
            for context, (weights, gradients), states, sums in parts
        }

    def save_states(self, fname: str) -> None:
        """Write optimizer, its states and update counts, with the parameters' names and shapes, for any number of devices.

        The file is written beside and renamed, so that a file of this name is always whole. It waits for the devices.
        """
        content = {
            "format": _FORMAT,
            "version": 1,
            "names": self._replicas.names,
            "structural": self._replicas.structural,
            "shapes": [param.shape for param in self._replicas.params],
            "optimizer": pickle.dumps(self._optimizer),
            "states": {index: _to_numpy(state) for index, state in self._update.states().items()},
            "counts": self._update.counts(),
        }
        beside = f"{fname}.{os.getpid()}.new"
        try:
            with open(beside, "wb") as file:
                pickle.dump(content, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, fname)
        except BaseException:
            if os.path.exists(beside):
                os.unlink(beside)
            raise

    def load_states(self, fname: str) -> None:
        """Read what `save_states` wrote, on these devices, be they as many as then or not.

        A file of `gluon.Trainer` is read in Gluon's order (names sorted as strings); only its shapes can be checked. The
        file is a pickle: load only files that you trust.

        Raises
        ------
        StateError
            The file is something else, or belongs to another network or optimizer. Nothing was changed.
        """
        content, optimizer = self.check_states(fname)
        states = [
            {index: self._restored(optimizer, index, value, context, fname) for index, value in content["states"].items()}
            for context in self.contexts
        ]
        optimizer.param_dict = dict(enumerate(self._params))
        self._use(optimizer)
        self._update.restore(states, content["counts"])

    def check_states(self, fname: str) -> Tuple[Dict[str, Any], opt.Optimizer]:
        """Return the content of a file of states and its optimizer, having checked that they belong to this trainer.

        Raises
        ------
        StateError
            As for `load_states`.
        """
        content = self._read(fname)
        optimizer = pickle.loads(content["optimizer"]) if content["optimizer"] else self._optimizer
        if type(optimizer) is not type(self._optimizer):
            raise StateError(
                f"load_states: got {fname} of optimizer {type(optimizer).__name__} for a trainer with "
                f"{type(self._optimizer).__name__}; need the same. Make the trainer with the optimizer of the file."
            )
        return content, optimizer

    def _apply(self, buffers: List[Buffer], batch_size: float) -> None:
        scaler = getattr(self, "_amp_loss_scaler", None)  # mx.contrib.amp.init_trainer put it there
        # It asks whatever has gradients: a buffer stands for all its parameters.
        if (
            scaler is None
            or not buffers
            or not scaler.has_overflow([SimpleNamespace(_grad=buffer.gradients) for buffer in buffers])
        ):
            self._optimizer.rescale_grad = self._scale / batch_size
            self._clip(buffers)
            self._update.apply(buffers)
        self._summed = None

    def __reduce__(self) -> Any:
        """A copied or pickled network has no trainer: this one's memory is the original's."""
        return type(None), ()

    def _clip(self, buffers: List[Buffer]) -> None:
        if self._clip_norm is not None and buffers:
            for replica in range(len(self.contexts)):
                gradients = [buffer.gradients[replica] for buffer in buffers]
                clip_global_norm(gradients, self._clip_norm / self._optimizer.rescale_grad)

    def _use(self, optimizer: opt.Optimizer) -> None:
        self._optimizer = optimizer
        self._update = Update(optimizer, self._params, self.contexts)
        self._updaters = self._update.updaters  # gluon.Trainer's name, which others look for

    def _read(self, fname: str) -> Dict[str, Any]:
        try:
            with open(fname, "rb") as file:
                content = pickle.load(file)
        except OSError:
            raise
        except Exception as error:  # pickle raises whatever the damaged bytes happen to call
            raise StateError(
                f"load_states: got {fname}, which is damaged ({error}); need a file of save_states. Save it again."
            ) from error
        if isinstance(content, dict) and content.get("format") == _FORMAT:
            if content["version"] != 1:
                raise StateError(
                    f"load_states: got {fname} of version {content['version']}; need version 1. Install a newer gluon_mgpu."
                )
            self._check_same(fname, content)
            return content
        return self._from_gluon(fname, content)

    def _check_same(self, fname: str, content: Dict[str, Any]) -> None:
        replicas = self._replicas
        # A parameter's own name counts the layers that were made before it: dense7_weight. Its last word does not.
        exact = replicas.structural and content["structural"]
        here = _described(replicas.names, [param.shape for param in replicas.params], exact)
        there = _described(content["names"], content["shapes"], exact)
        differing = [
            f"{_worded(theirs)} where this one has {_worded(mine)}"
            for mine, theirs in zip_longest(here, there)
            if not mine or not theirs or mine[0] != theirs[0] or not shape_fits(theirs[1], mine[1])
        ]
        if differing:
            raise StateError(
                f"load_states: got {fname} of another network: {'; '.join(differing[:3])}; need the same parameters in the same "
                "order. Build the network as it was when it was saved."
            )

    def _from_gluon(self, fname: str, content: Any) -> Dict[str, Any]:
        states, optimizer = content if isinstance(content, tuple) and len(content) == 2 else (content, None)
        if not isinstance(states, dict) or not all(isinstance(key, int) and key < len(self._params) for key in states):
            raise StateError(
                f"load_states: got {fname}, which holds no trainer states; need a file of save_states. Save it again."
            )
        by_name = sorted(range(len(self._params)), key=lambda index: self._params[index].name)
        counts: Dict[int, int] = {}
        if optimizer is not None:
            all_counts = optimizer._all_index_update_counts.values()
            counts = max(all_counts, key=lambda one: max(one.values(), default=0), default={})
        return {
            "optimizer": pickle.dumps(optimizer) if optimizer is not None else b"",
            "states": {by_name[key]: _to_numpy(state) for key, state in states.items()},
            "counts": {by_name[key]: count for key, count in counts.items()},
        }

    def _restored(self, optimizer: opt.Optimizer, index: int, value: Any, context: Context, fname: str) -> Any:
        """Return an optimizer state on a device: one made afresh, with the values of the file."""
        name, param = self._replicas.names[index], self._params[index]
        if param._data is None:
            raise StateError(
                f"load_states: got {name} without a shape yet; need values on the devices. Pass one batch through the network."
            )
        state = optimizer.create_state_multi_precision(index, param.data(context).as_nd_ndarray())
        return filled(state, value, f"{fname}, {name}")


def _check_optimizer(optimizer: Any) -> None:
    known = sorted(opt.Optimizer.opt_registry)
    if isinstance(optimizer, str) and optimizer.lower() not in known:
        raise TrainerError(
            f"Trainer: got optimizer {optimizer!r}; need one of MXNet's: {', '.join(known)}. Or pass an Optimizer."
        )
    if not isinstance(optimizer, (str, opt.Optimizer)):
        raise TrainerError(
            f"Trainer: got {optimizer!r} as the optimizer; need a name or an mxnet.optimizer.Optimizer. 'sgd', say."
        )


def _check_options(replicas: Replicas, compression: Any, update_on_kvstore: Any, clip_norm: Optional[float]) -> None:
    if update_on_kvstore:
        raise TrainerError(
            "Trainer: got update_on_kvstore=True; need None or False. The weights are updated on the devices: only so are "
            "clipping, schedules and idle devices right."
        )
    if compression:
        raise TrainerError(f"Trainer: got compression_params {compression}; need None. This version does not compress gradients.")
    if clip_norm is not None and not (_is_number(clip_norm) and clip_norm > 0):
        raise TrainerError(f"Trainer: got clip_norm {clip_norm}; need a number above 0. Pass None not to clip.")
    for name, param in zip(replicas.names, replicas.params):
        if param._stype != "default":
            raise TrainerError(
                f"Trainer: got {name} stored as {param._stype}; need dense weights. gluon.Trainer takes sparse "
                "ones, on one device."
            )


def _check_buckets(bucket_bytes: Any) -> None:
    if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, (int, np.integer)) or bucket_bytes < 1:
        raise TrainerError(f"Trainer: got bucket_bytes {bucket_bytes!r}; need a whole number of 1 or more. 25 * 2**20 is usual.")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def _check_batch_size(operation: str, batch_size: float) -> None:
    if not _is_number(batch_size) or not 0 < batch_size < float("inf"):
        raise TrainerError(
            f"{operation}: got batch_size {batch_size!r}; need a positive number. Pass the examples over all devices, X.shape[0]."
        )


def _described(names: List[str], shapes: List[Any], exact: bool) -> List[Tuple[str, Tuple[int, ...]]]:
    told = names if exact else [re.split(r"[._]", name)[-1] for name in names]
    return [(name, tuple(shape or ())) for name, shape in zip(told, shapes)]


def _worded(described: Optional[Tuple[str, Tuple[int, ...]]]) -> str:
    return f"{described[0]} {described[1]}" if described else "nothing"


def _to_numpy(state: Any) -> Any:
    if is_device_array(state):
        return state.asnumpy()
    return type(state)(_to_numpy(item) for item in state) if isinstance(state, (list, tuple)) else state

"""What a Trainer accepts: its optimizer and options, and which of them exclude each other."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any, Dict, Optional, Sequence

import mxnet as mx
import numpy as np
from mxnet import Context, lr_scheduler
from mxnet import optimizer as opt

from ..checks import flag, instance, one_of, real_number, reason_of, short, whole_number
from ..errors import TrainerError
from ..mxnet_internals.c_calls import is_recording
from ..mxnet_internals.parameters import has_dense_gradient, is_dense
from ..mxnet_internals.versions import is_mxnet2
from ..nested import is_device_array
from ..refusals import refusal
from .layout import Layout
from .parameters import Params, named_params
from .update import checked_rate, is_replicable


@dataclass(frozen=True)
class Options:
    """The options of a `Trainer`, whose docstring explains them.

    Raises
    ------
    TrainerError
        One is of another kind.
    """

    clip_norm: Optional[float]
    clip_value: Optional[float]
    measure_grad_norm: bool
    find_unused_parameters: bool
    sharded_data: bool
    shard_optimizer: bool
    virtual_shards: Optional[int]
    check_replicas_every: Optional[int]
    bucket_bytes: int

    def __post_init__(self) -> None:
        whole_number("Trainer", "bucket_bytes", self.bucket_bytes, high=2**63 - 1, advice="8 * 2**20 is usual.")
        for name in ("measure_grad_norm", "find_unused_parameters", "sharded_data", "shard_optimizer"):
            flag("Trainer", name, getattr(self, name))
        for name in ("clip_norm", "clip_value"):
            if getattr(self, name) is not None:
                real_number("Trainer", name, getattr(self, name), above=True, advice="Pass None not to clip.")

    def shared(self) -> Dict[str, object]:
        """Return the options that all processes of a job must have in common."""
        names = ("clip_norm", "clip_value", "sharded_data", "check_replicas_every", "bucket_bytes")
        return {name: getattr(self, name) for name in names}


def made_optimizer(optimizer: Any, params: Any, trained: Params) -> opt.Optimizer:
    """Return the optimizer of a name and its options, or itself; raise `TrainerError` for what MXNet does not know."""
    known = sorted({*opt.Optimizer.opt_registry} - {"test"})  # MXNet's own tests use that
    instance("Trainer", "optimizer", optimizer, (str, opt.Optimizer), "a name or an MXNet optimizer", advice="Pass 'sgd'.")
    is_made = isinstance(optimizer, opt.Optimizer)
    if not is_made:
        one_of("Trainer", "optimizer", optimizer.lower(), known, advice="Or pass an mxnet.optimizer.Optimizer.")
    options = {} if params is None else params
    if not isinstance(options, dict) or not all(isinstance(name, str) for name in options) or (is_made and options):
        raise TrainerError(
            f"Trainer: got optimizer_params={short(params)}; expected a dict of options of a name. Pass 'sgd' and "
            "{'learning_rate': 0.1}."
        )
    schedule = optimizer.lr_scheduler if is_made else options.get("lr_scheduler")
    what = "an mxnet.lr_scheduler.LRScheduler, which can be saved"
    advice = "Write a subclass whose __call__ takes the number of updates."
    instance("Trainer", "lr_scheduler", schedule, (lr_scheduler.LRScheduler, type(None)), what, advice=advice)
    if is_made:
        return optimizer
    checked_rate("Trainer", options.get("learning_rate", 0.0))
    by_index = dict(enumerate(named_params(trained).values()))
    try:
        made = opt.create(optimizer, param_dict=by_index, **options)
        if is_replicable(made):
            _try_out(opt.create(optimizer, **{**options, "lr_scheduler": None}))
        return made
    except Exception as error:  # of a class of MXNet's, this package's or the user's
        raise TrainerError(
            f"Trainer: got optimizer_params: {reason_of(error)}; expected options of {optimizer}, and values that it takes. Leave"
            " out the others."
        ) from error


def _try_out(optimizer: opt.Optimizer) -> None:
    """Update one number: most options are only read then."""
    weight, gradient = mx.nd.ones((1,), ctx=mx.cpu()), mx.nd.ones((1,), ctx=mx.cpu())
    if is_mxnet2():
        opt.get_updater(optimizer)(0, gradient, weight)
    else:
        optimizer.update(0, weight, gradient, optimizer.create_state(0, weight))
    if not math.isfinite(weight.asnumpy().item()):
        raise ValueError("values whose first update is not finite")


def check_gluon_options(layout: Layout, compression_params: Any, update_on_kvstore: Any) -> None:
    """Raise `TrainerError` for compression, an update on a store, and weights that are not dense."""
    advice = "Gradients are exchanged as they are. Leave it out."
    instance("Trainer", "compression_params", compression_params, type(None), "None", advice=advice)
    advice = "The weights are updated on the devices, so that clipping, schedules and idle devices are correct. Leave it out."
    one_of("Trainer", "update_on_kvstore", update_on_kvstore, (None, False), advice=advice)
    sparse = next((name for name, param in zip(layout.names, layout.params) if not is_dense(param)), None)
    if sparse is not None:
        raise TrainerError(f"Trainer: got {sparse} stored sparsely; expected dense weights. Use gluon.Trainer on one device.")
    check_tree(layout.contexts)


def check_tree(contexts: Sequence[Context]) -> None:
    """Raise `TrainerError` for sums by MXNet's trees: they index the outputs by device, also those that an owner alone gets.

    Source: MXNet 1.9.1, src/kvstore/kvstore_local.h:75, comm_tree.h:249-272.
    """
    value = os.environ.get("MXNET_KVSTORE_USETREE", "")
    if value not in ("", "0") and any(context.device_type == "gpu" for context in contexts):
        raise TrainerError(
            f"Trainer: got MXNET_KVSTORE_USETREE={value}; expected 0 or none, as each sum goes to the device that updates the "
            "parameter, and MXNet's trees copy it to all. Unset it."
        )


def check_virtual(layout: Layout, *, sharded_data: bool, scales: bool, trains_apart: bool, has_counted: bool) -> None:
    """Raise `TrainerError` if an option needs sums in another order than that of virtual shards."""
    refused = {
        "Pipeline": layout.spans_devices,
        "sharded_data": sharded_data,
        "precision='fp16'": scales,
        "LocalSGD": trains_apart,
        "sparse gradients": not all(map(has_dense_gradient, layout.params)),
        "grad_req='add'": any(param.grad_req == "add" for param in layout.params),
        "accumulated gradients": has_counted,
    }
    for what, is_there in refused.items():
        if is_there:
            raise refusal("Trainer", "virtual_shards", what)


def check_not_recording(operation: str) -> None:
    """Raise `TrainerError` inside `autograd.record`, where MXNet's operators refuse to write weights, some after others were."""
    if is_recording():
        raise TrainerError(
            f"{operation}: got a call inside autograd.record(); expected one after it, as only the forward pass and the loss are "
            "recorded. Unindent it, out of the with block."
        )


def batch_size_of(operation: str, batch_size: Any, *, may_be_0: bool = False) -> float:
    """Return a batch size as a number; raise `TrainerError` if it is not positive."""
    if type(batch_size) is int and batch_size > 0:  # each step asks this
        return batch_size
    advice = "Pass the examples over all devices, X.shape[0]."
    return real_number(operation, "batch_size", as_number(batch_size), above=not may_be_0, advice=advice)


def as_number(value: Any) -> Any:
    """Return an array of one element as its number: d2l's programs pass sums of lengths, GluonNLP's `FP16Trainer` a norm."""
    if is_device_array(value) and value.stype == "default" and value.size == 1:
        return value.asnumpy().item()
    return value.item() if isinstance(value, (np.ndarray, np.generic)) and value.size == 1 else value

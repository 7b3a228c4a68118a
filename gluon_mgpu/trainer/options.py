"""What a Trainer accepts: its optimizer and options, and which of them exclude each other."""

from __future__ import annotations

import math
from typing import Any, Optional

import mxnet as mx
import numpy as np
from mxnet import lr_scheduler
from mxnet import optimizer as opt

from ..checks import instance, one_of, real_number, reason_of, short
from ..errors import TrainerError
from ..mxnet_internals.c_calls import is_recording
from ..mxnet_internals.versions import is_mxnet2
from ..nested import is_device_array
from ..refusals import refusal
from .layout import Layout
from .parameters import Params, named_params
from .update import checked_rate, is_replicable


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


def check_options(layout: Layout, compression_params: Any, update_on_kvstore: Any, **bounds: Optional[float]) -> None:
    """Raise `TrainerError` for compression, an update on a store, weights that are not dense, and bounds that are not above 0."""
    advice = "Gradients are exchanged as they are. Leave it out."
    instance("Trainer", "compression_params", compression_params, type(None), "None", advice=advice)
    advice = "The weights are updated on the devices, so that clipping, schedules and idle devices are correct. Leave it out."
    one_of("Trainer", "update_on_kvstore", update_on_kvstore, (None, False), advice=advice)
    for name, param in zip(layout.names, layout.params):
        if param._stype != "default":
            raise TrainerError(
                f"Trainer: got {name} stored as {param._stype}; expected dense weights. Use gluon.Trainer on one device."
            )
    for name, bound in bounds.items():
        if bound is not None:
            real_number("Trainer", name, bound, above=True, advice="Pass None not to clip.")


def check_virtual(trainer: Any) -> None:
    """Raise `TrainerError` if an option needs sums in another order than that of virtual shards."""
    refused = {
        "Pipeline": trainer._layout.spans_devices,
        "sharded_data": trainer.sharded_data,
        "precision='fp16'": trainer.loss_scaler is not None,
        "LocalSGD": trainer.trains_apart,
        "sparse gradients": any(param._grad_stype != "default" for param in trainer.params),
        "grad_req='add'": any(param.grad_req == "add" for param in trainer.params),
        "accumulated gradients": bool(trainer._num_counted),
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

"""Whether the requested devices can train: a small gradient is computed on each."""

from __future__ import annotations

from dataclasses import replace
from typing import Dict, List, Sequence, Tuple

import mxnet as mx
from mxnet import Context

from ..devices.describe import DeviceInfo
from ..devices.select import resolve_devices
from ..errors import DeviceError, last_line
from .findings import Problem, describe_error

_ELSEWHERE = "Train on other devices: --devices cpu."


def try_devices(spec: str) -> Tuple[List[Context], List[Problem]]:
    """Return the contexts, [] if they are not available, and the problems that prevent training on them."""
    try:
        contexts = resolve_devices(spec)
    except DeviceError as error:
        return [], [Problem("devices", *describe_error(error), True)]
    return contexts, [finding for context in contexts for finding in try_training(context)]


def try_training(context: Context) -> List[Problem]:
    """Return a problem if a device computes a wrong gradient of x * x, which is 2 x."""
    try:
        x = mx.nd.array([1.0, -2.0], ctx=context)
        x.attach_grad()
        with mx.autograd.record():
            y = x * x
        y.backward()
        found = x.grad.asnumpy().tolist()
    except mx.MXNetError as error:
        what = f"{context} failed: {last_line(error)}"
        return [Problem("devices", what, _ELSEWHERE, True)]
    if found != [2.0, -4.0]:
        return [Problem("devices", f"{context} computed {found}, not [2.0, -4.0].", _ELSEWHERE, True)]
    return []


def with_reasons(devices: Sequence[DeviceInfo], known: Dict[int, str]) -> List[DeviceInfo]:
    """Return the devices; an unusable one gets the known problem of the GPU with its number as its reason."""
    found = []
    for one in devices:
        reason = one.reason if one.usable or one.index is None else known.get(one.index, one.reason)
        found.append(replace(one, reason=reason))
    return found


def check_devices(devices: Sequence[DeviceInfo], explained: bool) -> List[Problem]:
    """Return the devices that cannot be used.

    Parameters
    ----------
    devices : sequence of DeviceInfo
    explained : bool
        Whether findings about the driver's GPUs already explain it.
    """
    unusable = [] if explained else [one for one in devices if not one.usable]
    return [
        Problem("devices", f"{one.name} {one.description} cannot be used.", f"{one.reason} {one.note}".strip())
        for one in unusable
    ]

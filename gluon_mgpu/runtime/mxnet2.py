"""MXNet 2: the names of MXNet 1.9 that it moved or renamed, and the calls that differ.

| MXNet 1.9 | MXNet 2 |
|---|---|
| `Context` is a class | a function; the class is `Device` |
| `gluon.ParameterDict` | a dict |
| `mx.metric` | `gluon.metric` |
| `gluon.contrib.nn.SyncBatchNorm`, `contrib.amp` | `gluon.nn.SyncBatchNorm`, `amp` |
| `Parameter._ctx_list`, `Trainer._contexts` | `_device_list`, `_devices` |
| `Block._children` holds blocks | weak references |
| `Parameter.name` is unique: `dense0_weight` | the same in every layer: `weight`; a block has no name |
| `Optimizer.update(index, ...)` | takes lists; `LBSGD` is gone |
| `MXImperativeInvokeEx` | `MXImperativeInvoke` |
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, Dict, List, Sequence

from ..errors import TrainerError


def is_mxnet2() -> bool:
    """Return whether MXNet 2 is the one that was imported."""
    return str(sys.modules["mxnet"].__version__).startswith("2.")


def require_mxnet1(operation: str) -> None:
    """Raise `TrainerError` on MXNet 2."""
    if is_mxnet2():
        raise TrainerError(
            f"{operation}: got MXNet {sys.modules['mxnet'].__version__}; expected MXNet 1.9, whose graphs it uses. "
            "docs/compatibility.md#mxnet-2 lists what runs on MXNet 2."
        )


def adapt(mxnet: Any) -> None:
    """Add the names of MXNet 1.9 that this package uses and MXNet 2 lacks."""
    from mxnet import amp, gluon
    from mxnet import optimizer as opt
    from mxnet.base import _LIB
    from mxnet.gluon.parameter import Parameter

    mxnet.Context = mxnet.context.Context = mxnet.device.Device
    mxnet.contrib.amp = amp
    sys.modules.update({"mxnet.contrib.amp": amp, "mxnet.contrib.amp.amp": amp.amp})
    layers = ModuleType("mxnet.gluon.contrib.nn")
    layers.SyncBatchNorm = gluon.nn.SyncBatchNorm  # type: ignore[attr-defined]
    gluon.contrib.nn = sys.modules[layers.__name__] = layers
    gluon.ParameterDict = dict
    mxnet.metric = gluon.metric
    gluon.Block.name = property(lambda block: type(block).__name__.lower())
    Parameter._ctx_list = property(lambda param: param._device_list)
    gluon.Trainer._contexts = property(lambda trainer: trainer._devices)
    opt.LBSGD = type("LBSGD", (opt.Optimizer,), {})  # no optimizer is one
    _LIB.MXImperativeInvokeEx = _LIB.MXImperativeInvoke
    for name in ("MXExecutorForward", "MXExecutorBackwardEx"):
        setattr(_LIB, name, None)  # compiled passes raise before they call them


def children(block: Any) -> List[Any]:
    """Return the blocks directly in a block."""
    found = list(block._children.values())
    return [child() for child in found] if is_mxnet2() else found


def unique_names(params: Sequence[Any]) -> List[str]:
    """Return names of parameters, different for different parameters."""
    if not is_mxnet2():
        return [getattr(param, "name", str(i)) for i, param in enumerate(params)]
    first: Dict[int, int] = {}
    return [f"{first.setdefault(id(param), i)}.{getattr(param, 'name', '')}" for i, param in enumerate(params)]

"""MXNet 2: what it moved, renamed or left out of MXNet 1.9, and the calls that differ.

| MXNet 1.9 | MXNet 2 |
|---|---|
| `Context` is a class | a function; the class is `Device` |
| `gluon.ParameterDict` | a dict |
| `gluon.contrib.nn.SyncBatchNorm`, `contrib.amp` | `gluon.nn.SyncBatchNorm`, `amp` |
| `Parameter._ctx_list` | `_device_list` |
| `Block._children` holds blocks, `Parameter._trainer` a trainer | weak references |
| `Parameter.name` is unique: `dense0_weight` | the same in every layer: `weight`; a block has no name |
| `hybrid_forward(F, ...)` | `forward(...)`: see `models/hybrid_block.py` |
| `Optimizer.update(index, ...)` | takes lists; `LBSGD` is gone |
| `metric` | `gluon.metric` |
| `MXImperativeInvokeEx` | `MXImperativeInvoke`; executors are gone |
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Dict, List, Mapping, Sequence

import mxnet

from ..errors import TrainerError


def is_mxnet2() -> bool:
    """Return whether MXNet 2 is the one that was imported."""
    return str(mxnet.__version__).startswith("2.")


def require_mxnet1(operation: str) -> None:
    """Raise `TrainerError` on MXNet 2."""
    if is_mxnet2():
        raise TrainerError(
            f"{operation}: got MXNet {mxnet.__version__}; expected MXNet 1.9, whose graphs it uses. "
            "docs/compatibility.md#mxnet-2 lists what runs on MXNet 2."
        )


def require_np_arrays(operation: str) -> None:
    """Raise `TrainerError` on MXNet 2 in a thread without np arrays."""
    if is_mxnet2() and not mxnet.util.is_np_array():
        raise TrainerError(
            f"{operation}: got MXNet {mxnet.__version__} without np arrays; expected them, as its layers accept no others. Call "
            "mxnet.npx.set_np() at the start of each thread."
        )


if is_mxnet2():
    mxnet.npx.set_np()  # in the thread that imports this
    from mxnet._deferred_compute import is_deferred_compute as is_deferred_compute
    from mxnet.gluon.nn import SyncBatchNorm as SyncBatchNorm
else:
    from mxnet.gluon.contrib.nn import SyncBatchNorm as SyncBatchNorm

ContextType = type(mxnet.cpu())
ParameterDict = getattr(mxnet.gluon, "ParameterDict", dict)
LBSGD = getattr(mxnet.optimizer, "LBSGD", ())  # no optimizer is one
metric = mxnet.gluon.metric if is_mxnet2() else mxnet.metric


def load_amp() -> Any:
    """Return MXNet's module with the lists of operators for 16 bits."""
    return import_module("mxnet.amp.amp" if is_mxnet2() else "mxnet.contrib.amp.amp")


def move_params(params: Mapping[str, Any], contexts: Any) -> None:
    """Move parameters to other devices."""
    for param in params.values():
        (param.reset_device if is_mxnet2() else param.reset_ctx)(contexts)


def name_of(block: Any) -> str:
    """Return what an error calls a block."""
    return str(getattr(block, "name", type(block).__name__))


def variable_name(param: Any) -> str:
    """Return the name of a parameter in graphs."""
    return str(param.var().name if is_mxnet2() else param.name)


def unique_names(params: Sequence[Any]) -> List[str]:
    """Return names of parameters, different for different parameters."""
    if not is_mxnet2():
        return [getattr(param, "name", str(i)) for i, param in enumerate(params)]
    first: Dict[int, int] = {}
    return [f"{first.setdefault(id(param), i)}.{getattr(param, 'name', '')}" for i, param in enumerate(params)]

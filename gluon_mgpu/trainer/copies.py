"""Copies and pickles of networks: they can be trained, in their own memory, on the devices of the original."""

from __future__ import annotations

import copyreg
from typing import Any, Dict, Iterable, Optional, Tuple

import mxnet as mx
from mxnet import autograd, gluon
from mxnet.ndarray import CachedOp
from mxnet.symbol.numpy import _Symbol as NumpySymbol

from .gradients import is_adding


def make_copyable(kinds: Iterable[Any]) -> None:
    """Let parameters of these classes be copied and pickled with this module, unless a class defines its own way."""
    for kind in kinds:
        has_way = hasattr(kind, "__deepcopy__") or hasattr(kind, "__copy__")
        if not has_way and kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__:
            copyreg.pickle(kind, _reduced)


class _Original:
    """The attributes of the copied parameter. Only `copy.copy`, which shares them, keeps this object."""

    def __init__(self, attributes: Dict[str, Any]) -> None:
        self.attributes = attributes

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> Tuple[Any, ...]:
        return type(None), ()


def _reduced(param: gluon.Parameter) -> Tuple[Any, ...]:
    """Return the reduced form of a parameter for `copy` and `pickle`.

    Without this, MXNet copies the trainer as well, moves arrays of cpu(1) to cpu(0), and marks no weight of the copy as a
    variable, so a backward pass fails.
    """
    state = {**vars(param), "_trainer": None, "_grad": None}
    if is_adding(param):
        state["_grad_req"] = "write"  # the pass in progress belongs to the original
    if param._data is not None and not param._differentiable:
        mx.nd.waitall()  # a static graph writes running statistics without notifying the engine
    return _copied, (type(param), state, _Original(vars(param)))


def _copied(kind: Any, state: Dict[str, Any], original: Optional[_Original]) -> gluon.Parameter:
    """Return a parameter with this state. A deep copy has no trainer, and its gradients are zero."""
    param = kind.__new__(kind)
    if original is not None:
        vars(param).update(original.attributes)
        return param
    vars(param).update(state)
    if param._data is not None:
        with autograd.pause():
            param._data = [array.as_in_context(context) for array, context in zip(param._data, param._ctx_list)]
            param._init_grad()
    return param


def _no_graph(operation: CachedOp) -> Tuple[Any, ...]:
    """Reduce a compiled graph to None: the next forward pass compiles a new one."""
    return type(None), ()


def _reduced_symbol(symbol: NumpySymbol) -> Tuple[Any, ...]:
    """Return the reduced form of a symbol of np arrays; MXNet's own form restores one of legacy arrays."""
    return _numpy_symbol, (symbol.tojson(),)


def _numpy_symbol(text: str) -> NumpySymbol:
    return mx.sym.load_json(text).as_np_ndarray()


make_copyable((gluon.Parameter, gluon.Constant))  # also before there is a trainer
copyreg.pickle(CachedOp, _no_graph)
copyreg.pickle(NumpySymbol, _reduced_symbol)

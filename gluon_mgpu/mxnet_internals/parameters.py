"""What `gluon.Parameter` knows and does not offer: its lists of arrays, shapes that are open, memory that it may get.

Source: MXNet 1.9.1, python/mxnet/gluon/parameter.py.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Dict, List, Sequence
from weakref import ref

from mxnet import Context, autograd, gluon

from ..nested import Array
from .versions import is_mxnet2

# Gluon's lists, one array for each device, None before there are values. With new arrays, Gluon makes a new list. As attrgetters,
# because each step looks at all parameters: `list_data()` takes ten times as long, and raises where there are none.
values_of = attrgetter("_data")
gradients_of = attrgetter("_grad")
contexts_of = attrgetter("_device_list" if is_mxnet2() else "_ctx_list")
# Whether backward passes may give it a gradient: false of running statistics, true of frozen weights
is_differentiable = attrgetter("_differentiable")
# Whether the first batch decides its shape: it was initialised, and has no values
is_open = attrgetter("_deferred_init")
# What graphs bind of it: other objects after a change
binding_of = attrgetter("_grad_req", "_grad", "_data")
is_fresh = attrgetter("_fresh_grad")  # of an array: whether a backward pass has written its gradient, and no trainer has used it


def has_values(param: gluon.Parameter) -> bool:
    """Return whether a parameter has values."""
    return param._data is not None


def is_dense(param: gluon.Parameter) -> bool:
    """Return whether its values are stored densely."""
    return param._stype == "default"


def has_dense_gradient(param: gluon.Parameter) -> bool:
    """Return whether its gradient is stored densely."""
    return param._grad_stype == "default"


def mark_as_statistic(param: gluon.Parameter) -> None:
    """Mark a parameter as a running statistic, as Gluon marks those of its layers and not those of a `SymbolBlock`."""
    param._differentiable = False


def set_values(param: gluon.Parameter, array: Array, contexts: Sequence[Context]) -> None:
    """Set values on all devices, also where the shape was open: `set_data` would keep them for the first batch."""
    param._load_init(array, contexts)


def structural_params(net: gluon.Block, prefix: str = "") -> Dict[str, gluon.Parameter]:
    """Return parameters by structural name (`0.weight`), as `save_parameters` does; a tied one has several."""
    return net._collect_params_with_prefix(prefix)  # type: ignore[no-any-return]


def trainer_of(param: gluon.Parameter) -> Any:
    """Return the trainer that Gluon notes in a parameter, or None."""
    found = param._trainer
    return found() if isinstance(found, ref) else found


def use_memory(param: gluon.Parameter, weights: Sequence[Array], gradients: Sequence[Array] = ()) -> None:
    """Turn the arrays of a parameter, which others may hold, into these views of memory, with the same values.

    Gluon's lists of them are new ones afterwards, as with new arrays. Fresh flags stay.
    """
    fresh = list(map(is_fresh, param._data))
    for array, view in [*zip(param._data, weights), *zip(param._grad or (), gradients)]:
        array.as_nd_ndarray().copyto(view)
        array.handle, view.handle = view.handle, array.handle
    param._data = list(param._data)
    if gradients:
        param._grad = list(param._grad)
        _mark(param, fresh)


def set_grad_req(params: Sequence[gluon.Parameter], grad_req: str) -> None:
    """Set whether backward passes replace gradients or add to them. Arrays stay, where `grad_req`'s setter makes new ones.

    MXNet compiles static graphs again after this change: `tests/test_accumulation.py`.
    """
    for param in params:
        fresh = list(map(is_fresh, param._data))
        param._grad_req = grad_req
        _mark(param, fresh)


def _mark(param: gluon.Parameter, fresh: Sequence[bool]) -> None:
    autograd.mark_variables(param._data, param._grad, param.grad_req)
    for weight, was_fresh in zip(param._data, fresh):
        if was_fresh:
            weight._fresh_grad = True


def buffers_of(param: gluon.Parameter) -> List[Array]:
    """Return Gluon's list of gradients, or of the values of a running statistic, which has no gradient."""
    return param._grad if param._differentiable else param._data  # type: ignore[no-any-return]

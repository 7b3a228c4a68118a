"""The parameters of a network as a user passes them: names, devices, values, replicas; and its blocks."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Sequence, Union

import numpy as np
from mxnet import Context, gluon

from ..errors import TrainerError
from ..mxnet_internals.blocks import children
from ..mxnet_internals.parameters import has_values as _has_values
from ..mxnet_internals.parameters import (
    is_differentiable,
    is_open,
    mark_as_statistic,
    structural_params,
    trainer_of,
    values_of,
)
from ..mxnet_internals.versions import ParameterDict, unique_names

Params = Union[gluon.Block, Dict[str, gluon.Parameter], Sequence[gluon.Parameter]]
STATISTICS = ("moving_mean", "moving_var", "running_mean", "running_var")  # MXNet's initializers know them by these names, too


def named_params(params: Params) -> Dict[str, gluon.Parameter]:
    """Return parameters by name, in structural order: by structural name (`0.weight`) for a Block, by their own otherwise.

    Raises
    ------
    TrainerError
        They are not parameters, or two have the same name.
    """
    if isinstance(params, gluon.Block):
        structural = list(structural_params(params).items())
        # a tied parameter has several structural names; the first one counts
        first_names = {id(param): name for name, param in reversed(structural)}
        named: Dict[str, Any] = {first_names.get(id(param), param.name): param for param in params.collect_params().values()}
    elif isinstance(params, (ParameterDict, dict)):
        named = dict(params.items())
    elif isinstance(params, (list, tuple)):
        named = dict(zip(unique_names(params), params))
        if len(named) < len(params):
            raise TrainerError(
                f"Trainer: got {len(params)} parameters with {len(named)} names; expected different names. Pass each one "
                "once, and give networks different prefixes, and Parameters different names."
            )
    else:
        raise TrainerError(
            f"Trainer: got {type(params).__name__} as the parameters; expected a Block, a dict or a list. Pass the network."
        )
    for name, param in named.items():
        if not isinstance(param, gluon.Parameter):
            raise TrainerError(
                f"Trainer: got {type(param).__name__} for {name}; expected a gluon.Parameter. Pass net or net.collect_params()."
            )
        if param.grad_req == "null" and param.name.endswith(STATISTICS):
            mark_as_statistic(param)
    return named


def gluon_order(params: Params) -> List[int]:
    """Return the positions of parameters in the order in which a `gluon.Trainer` numbers and updates them.

    It sorts the names of a dict as strings (`dense10_weight` before `dense9_weight`), and keeps the order of a list.

    Examples
    --------
    >>> net = gluon.nn.Sequential()
    >>> net.add(*[gluon.nn.Dense(1, use_bias=False, prefix=f"dense{i}_") for i in (8, 9, 10)])
    >>> gluon_order(net)
    [2, 0, 1]
    """
    if isinstance(params, (list, tuple)):
        return list(range(len(params)))
    names = list(params.collect_params() if isinstance(params, gluon.Block) else params)
    return sorted(range(len(names)), key=names.__getitem__)


def check_initialised(operation: str, params: Mapping[str, gluon.Parameter]) -> None:
    """Raise `TrainerError` unless there are parameters, with values or with shapes that the first batch decides."""
    if not list(params):  # a ParameterDict is always true
        raise TrainerError(f"{operation}: got no parameters; expected at least one. Pass a network that has layers.")
    for name, param in params.items():
        if not (_has_values(param) or is_open(param)):
            raise TrainerError(
                f"{operation}: got {name} not initialised; expected values on the devices. Call net.initialize(ctx=ctx) first."
            )


def spans_devices(params: object) -> bool:
    """Return whether this is a network that keeps its parameters on different devices, such as a `Pipeline`."""
    return isinstance(params, gluon.Block) and hasattr(params, "replica_contexts")


def has_values(params: Params) -> bool:
    """Return whether every parameter has values. A parameter whose shape the first batch decides has none before."""
    return all(map(_has_values, named_params(params).values()))


def blocks_of(net: gluon.Block) -> List[gluon.Block]:
    """Return a network and all blocks in it, each once, a block before its children.

    Examples
    --------
    >>> net = gluon.nn.Sequential()
    >>> net.add(gluon.nn.Dense(1), gluon.nn.Flatten())
    >>> [type(block).__name__ for block in blocks_of(net)]
    ['Sequential', 'Dense', 'Flatten']
    """
    found: Dict[int, gluon.Block] = {}
    rest = [net]
    while rest:  # a loop: each step asks this, and calls are slow
        block = rest.pop()
        if id(block) not in found:
            found[id(block)] = block
            rest += reversed(children(block))
    return list(found.values())


def trainers_of(params: Params) -> List[Any]:
    """Return the trainers of this package that have these parameters: the latest one of each, as Gluon notes it."""
    found = {id(trainer): trainer for trainer in map(trainer_of, named_params(params).values())}
    return [trainer for trainer in found.values() if hasattr(trainer, "average_replicas")]


def average_replicas(params: Params) -> None:
    """Make the devices equal: the weights of a `LocalSGD`, and running statistics that a pass without a step has moved."""
    for trainer in trainers_of(params):
        trainer.average_replicas()


def replica_difference(params: Params) -> float:
    """Return the largest absolute difference between the weights of any two devices; 0.0 when replicas are identical.

    It reads all weights. BatchNorm's running statistics are not compared: a pass without a step moves each device's own.

    Examples
    --------
    >>> import mxnet as mx
    >>> net = gluon.nn.Dense(2, in_units=3)
    >>> net.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
    >>> replica_difference(net)
    0.0
    """
    largest = 0.0
    for param in named_params(params).values():
        if is_differentiable(param) and values_of(param):
            first, *others = [array.asnumpy() for array in param.list_data()]
            for other in others:
                if not np.array_equal(first, other):
                    largest = max(largest, float(np.abs(first.astype(np.float64) - other).max()))
    return largest


def shape_fits(saved: Optional[Sequence[int]], wanted: Optional[Sequence[int]]) -> bool:
    """Return whether two shapes are equal, except for unknown sizes (0 or -1) or an unknown shape."""
    if not saved or not wanted:
        return True
    return len(saved) == len(wanted) and all(a == b or a in (0, -1) or b in (0, -1) for a, b in zip(saved, wanted))


def devices_of(net: gluon.Block, operation: str = "evaluate") -> List[Context]:
    """Return the devices of a network, for an operation that errors name.

    Raises
    ------
    TrainerError
        It has no parameters, or is not initialised.
    """
    if hasattr(net, "replica_contexts"):  # it spans devices
        return list(net.replica_contexts)
    params = net.collect_params()
    check_initialised(operation, params)
    return list(next(iter(params.values())).list_ctx())

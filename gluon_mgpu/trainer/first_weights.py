"""Values of process 0 for every device of every process, and a check where each process has brought its own."""

from __future__ import annotations

import zlib
from typing import Optional, Sequence

from mxnet import autograd, gluon

from ..distributed import Group, group
from ..errors import TrainerError
from ..mxnet_internals.parameters import has_values
from .parameters import Params, check_initialised, named_params
from .process_facts import check_same, described


def broadcast_parameters(params: Params) -> None:
    """Give every device of every process the values of process 0's first device: weights and running statistics.

    A trainer does this when it is made. Call it in all processes after one of them has set values, for example from a file that
    it alone has read, and after a loop by hand has left the running statistics of the devices different.

    Parameters
    ----------
    params : gluon.Block, ParameterDict, dict or list of gluon.Parameter
        With values.

    Raises
    ------
    TrainerError
        A parameter has no value, or the parameters of the processes differ in name, order, shape or dtype.

    Examples
    --------
    >>> import mxnet as mx
    >>> net = gluon.nn.Dense(1, in_units=1)
    >>> net.initialize(mx.init.One(), ctx=[mx.cpu(0), mx.cpu(1)])
    >>> net.weight.data(mx.cpu(0))[:] = 3
    >>> broadcast_parameters(net)
    >>> net.weight.data(mx.cpu(1)).asnumpy().item()
    3.0

    Source: the name is Horovod's.
    """
    named, processes = named_params(params), group()
    check_initialised("broadcast_parameters", named)
    unknown = next((name for name, param in named.items() if not has_values(param)), None)
    if unknown is not None:
        raise TrainerError(
            f"broadcast_parameters: got {unknown} without a known shape; expected values. Pass it one batch first."
        )
    if processes is not None:
        own = described(list(named), list(named.values()), structural=isinstance(params, gluon.Block), options=False)
        check_same("broadcast_parameters", processes, own, list(named))
    copy_first(processes, list(named.values()))


def check_others(operation: str, net: gluon.Block, trained: Sequence[gluon.Parameter]) -> None:
    """Raise `TrainerError` if the values that a trainer does not share differ between the processes of a job. Waits for all."""
    processes, own = group(), set(map(id, trained))
    named = {name: param for name, param in named_params(net).items() if id(param) not in own and has_values(param)}
    if processes is not None:
        sums = {f"values of {name}": zlib.crc32(param.list_data()[0].asnumpy().tobytes()) for name, param in named.items()}
        advice = "Call mgpu.broadcast_parameters(net) in all before, or give the trainer the whole network: Trainer(net)"
        check_same(operation, processes, sums, (), advice)


def copy_first(processes: Optional[Group], params: Sequence[gluon.Parameter]) -> None:
    """Copy the first device's values to the others, in a job those of process 0 to all processes."""
    with autograd.pause():
        if processes is not None:
            processes.broadcast([param.list_data()[0] for param in params])
        for param in params:
            first, *others = param.list_data()
            for other in others:
                first.copyto(other)

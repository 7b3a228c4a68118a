"""Checks of every layer: its result, and the labels and indices that MXNet would clip."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Iterator, List, Sequence, Tuple

import numpy as np
from mxnet import MXNetError, gluon

from ..checks import OF_WRONG_DATA, instance, is_of_mxnet
from ..errors import DataError, NonFiniteLossError, StepError, last_line
from ..nested import Array, is_device_array, leaves
from ..trainer.parameters import replica_difference as replica_difference
from ..trainer.precision import precision_of as precision_of

_SHOWN = 5  # wrong labels that an error shows


@contextmanager
def debugging(net: gluon.Block, loss: Any = None, *, check_finite: bool = True) -> Iterator[None]:
    """Check every layer as it runs: errors name the layer and its device. Slow; changes no numbers.

    ```
    inputs ─► layer ─► wait ─► NaN? infinite? ─► next layer ─► ... ─► loss: are the labels classes?
                └─ Embedding: are the indices in its table?
    ```

    It waits for each layer, so that an error belongs to its layer. Hybridized parts run layer by layer inside this context. MXNet
    silently clips labels and indices that are out of range; here both raise. An error of a backward pass still comes late, unless
    `MXNET_ENGINE_TYPE=NaiveEngine` is in the environment.

    Parameters
    ----------
    net : gluon.Block
        On one device or several. Layers inside a `SymbolBlock` are not checked.
    loss : gluon.loss.Loss, optional
        Labels are checked for `SoftmaxCrossEntropyLoss` with `sparse_label=True` and without weights.
    check_finite : bool
        Whether NaN and infinity are errors. False for a network that masks with infinity.

    Raises
    ------
    TrainerError
        `net` is not a network.
    DataError
        A label is not a class, or an index is not in the table.
    NonFiniteLossError
        A layer's output is NaN or infinite; the message says whether such numbers were in its input or weights.
    StepError
        A layer failed.

    Examples
    --------
    >>> import mxnet as mx
    >>> net = gluon.nn.Dense(3, in_units=2)
    >>> net.initialize()
    >>> loss = gluon.loss.SoftmaxCrossEntropyLoss()
    >>> with debugging(net, loss):
    ...     loss(net(mx.nd.ones((2, 2))), mx.nd.array([0, 3]))
    Traceback (most recent call last):
    gluon_mgpu.errors.DataError: debugging: got 3 (1 of 2, the first at (1,)) in layer loss (SoftmaxCrossEntropyLoss) on ...
    """
    instance("debugging", "net", net, gluon.Block, "a gluon.Block", advice="Pass the network.")
    running = ["the network"]  # the layer that began or ended last
    with ExitStack() as stack:
        for path, root in (("", net), ("loss", loss)):
            for name, block in _layers(path, root) if isinstance(root, gluon.Block) else ():
                layer = f"layer {name} ({type(block).__name__})" if name else type(block).__name__
                stack.callback(block.register_forward_pre_hook(partial(_begin, running, layer)).detach)
                stack.callback(block.register_forward_hook(partial(_end, running, layer, check_finite)).detach)
                if getattr(block, "_active", False) and not isinstance(block, gluon.SymbolBlock):
                    block._active = False  # its graph is kept for later
                    stack.callback(setattr, block, "_active", True)
        try:
            yield
        except (MXNetError, StepError, *OF_WRONG_DATA) as error:
            if not (isinstance(error, StepError) or is_of_mxnet(error)):
                raise
            raise StepError(
                f"debugging: got {type(error).__name__} ({last_line(error)}) in {running[0]}; expected inputs that it "
                "accepts. The lines above show where in the layer it failed."
            ) from error


def _begin(running: List[str], layer: str, block: gluon.Block, args: Sequence[Any]) -> None:
    """Note which layer runs, and check its indices or labels."""
    inputs = _arrays(args)
    running[0] = layer
    if inputs:
        running[0] += f" on {inputs[0].context}, inputs of shapes {', '.join(str(one.shape) for one in inputs)}"
        _check_range(running[0], block, *args)


def _end(running: List[str], layer: str, check_finite: bool, block: gluon.Block, args: Sequence[Any], output: Any) -> None:
    """Wait for a layer's outputs, and check them."""
    outputs = _arrays(output)
    if not outputs:
        return
    running[0] = f"{layer} on {outputs[0].context}"
    num_bad = sum(map(_num_bad, outputs))
    if num_bad and check_finite:
        own = getattr(block, "_reg_params", block.params)
        bad = ["inputs"] * any(map(_num_bad, _arrays(args)))
        bad += [name for name, param in own.items() if param._data and _num_bad(param.data(outputs[0].context))]
        cause = f"Such numbers were in its {' and '.join(bad)}" if bad else "Its inputs and weights are finite"
        raise NonFiniteLossError(
            f"debugging: got {num_bad} numbers NaN or infinite from {running[0]}; expected finite numbers. {cause}: check "
            "the data, lower the learning rate, or look for an overflow, a division by 0 or a logarithm of 0."
        )


def _check_range(where: str, block: Any, *args: Any) -> None:
    """Raise `DataError` if an index is not in the table of an Embedding, or a label is not a class."""
    if isinstance(block, gluon.nn.Embedding):
        values, count = args[0].asnumpy(), block._kwargs["input_dim"]
    elif isinstance(block, gluon.loss.SoftmaxCrossEntropyLoss) and block._sparse_label and len(args) == 2:
        values, count = args[1].asnumpy(), args[0].shape[block._axis]
    else:
        return
    wrong = ~((values >= 0) & (values < count) & (values == np.floor(values)))
    if wrong.any():
        shown = ", ".join(f"{value:g}" for value in list(dict.fromkeys(values[wrong].tolist()))[:_SHOWN])
        first = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise DataError(
            f"debugging: got {shown} ({wrong.sum()} of {values.size}, the first at {first}) in {where}; expected whole numbers 0 "
            f"to {count - 1}. Correct the data: MXNet silently takes the nearest one."
        )


def _layers(path: str, block: gluon.Block) -> Iterator[Tuple[str, gluon.Block]]:
    """Yield (structural path, block) of a block and all blocks in it."""
    yield path, block
    for name, child in block._children.items():
        yield from _layers(f"{path}.{name}" if path else name, child)


def _arrays(value: Any) -> List[Array]:
    """Return the device arrays of a layer's inputs or outputs; [] if they are not nested data."""
    try:
        return [leaf for _, leaf in leaves(value) if is_device_array(leaf)]
    except TypeError:  # symbols, for example
        return []


def _num_bad(array: Array) -> int:
    values = array.asnumpy()
    return int(values.size - np.isfinite(values).sum()) if values.dtype.kind == "f" else 0

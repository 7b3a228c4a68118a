"""Serial debugging: one operation after another, with checks of every layer."""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Optional, Sequence, Tuple
from weakref import WeakSet

import numpy as np
from mxnet import Context, autograd, gluon

from ..errors import DataError, NonFiniteLossError, StepError, TrainerError, last_line
from ..nested import Array, is_device_array, leaves
from ..runtime.engine import is_serial
from ..runtime.environment import is_debug, logger
from ..runtime.threads import SERIAL_ENGINE
from .batchnorm import is_synchronised

_SHOWN = 5  # wrong labels that an error shows
_watched: WeakSet[gluon.Block] = WeakSet()  # networks and losses that are being debugged


def run_serially() -> None:
    """Let MXNet run each operation when it is called, in the thread that calls it: its NaiveEngine.

    An error then comes from the line that causes it. MXNet chooses its engine at its first operation, not when it is imported, so
    a program may call this after `import mxnet`.

    Raises
    ------
    TrainerError
        MXNet has started another engine. Nothing was changed.
    """
    before = os.environ.get("MXNET_ENGINE_TYPE")
    os.environ["MXNET_ENGINE_TYPE"] = SERIAL_ENGINE
    if not is_serial():
        if before is None:
            del os.environ["MXNET_ENGINE_TYPE"]
        else:
            os.environ["MXNET_ENGINE_TYPE"] = before
        raise TrainerError(
            f"run_serially: got an MXNet that has started {before or 'ThreadedEnginePerDevice'}; expected {SERIAL_ENGINE} "
            "before the first operation. Call it above everything that makes an array, or set GLUON_MGPU_DEBUG=1 or "
            f"MXNET_ENGINE_TYPE={SERIAL_ENGINE} in the shell."
        )


def debugging_if_asked(net: gluon.Block, loss: Any = None) -> ContextManager[Any]:
    """Return `debugging(net, loss)` if `GLUON_MGPU_DEBUG` asks for it, otherwise a context that does nothing."""
    return debugging(net, loss) if is_debug() else ExitStack()


@contextmanager
def debugging(net: gluon.Block, loss: Any = None, *, check_finite: bool = True) -> Iterator[None]:
    """Check every layer as it runs: errors name the layer, the shard, the device and the step. Slow; changes no numbers.

    ```
    inputs ─► layer ─► wait ─► NaN? infinite? ─► next layer ─► ... ─► loss: are the labels classes?
                └─ Embedding: are the indices in its table?
    ```

    It waits for each layer, so that an error belongs to its layer. Hybridized parts run layer by layer inside this context. MXNet
    silently clips labels and indices that are out of range; here both raise. Steps are counted from the start of the context,
    and each part of a batch (`micro_steps`) is one. If the engine is not serial, an error of a backward pass still comes late,
    and a log line says what to do.

    Parameters
    ----------
    net : gluon.Block
        On one device or several. Layers inside a `SymbolBlock` are not checked.
    loss : gluon.loss.Loss, optional
        Labels are checked for `SoftmaxCrossEntropyLoss` with `sparse_label=True`, for `CTCLoss`, and for their subclasses.
        Labels of weight 0 are not checked.
    check_finite : bool
        Whether NaN and infinity are errors. False for a network that masks with infinity.

    Raises
    ------
    TrainerError
        `net` is not a network.
    DataError
        A label is not a class, or an index is not in the table.
    NonFiniteLossError
        A layer's input is NaN, or its output is NaN or infinite; the message says whether they came from its input or weights.
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
    gluon_mgpu.errors.DataError: debugging: got labels 3 (1 of 2, the first at (1,)) in loss (SoftmaxCrossEntropyLoss) for ...
    """
    if not isinstance(net, gluon.Block):
        raise TrainerError(f"debugging: got {type(net).__name__} as the network; expected a gluon Block. Pass the Block itself.")
    if net in _watched:  # fit inside of debugging
        yield
        return
    if not is_serial():
        logger.warning(
            "debugging: got an engine that runs operations later; expected %s for errors of the backward pass at their "
            "line. Call run_serially() before the first operation, or set GLUON_MGPU_DEBUG=1 in the shell.",
            SERIAL_ENGINE,
        )
    place = _Place()
    roots = [("", net), *([("loss", loss)] if isinstance(loss, gluon.Block) else [])]
    with ExitStack() as stack:
        for _, block in roots:
            _watched.add(block)
            stack.callback(_watched.discard, block)
        for path, block in _layers(roots):
            _watch(stack, block, _Layer(path, block, place, check_finite, begins=block is net))
        yield


class _Place:
    """The shard and step that run. A call of the network on a device that it has used in this step begins a new step.

    Attributes
    ----------
    error : Exception, optional
        The error that names its layer.
    """

    def __init__(self) -> None:
        self._counts = {True: 0, False: 0}
        self._contexts: List[Context] = []
        self._records = False
        self.error: Optional[Exception] = None

    def begin(self, context: Context) -> None:
        if context in self._contexts or self._records != autograd.is_recording() or not self._contexts:
            self._records = autograd.is_recording()
            self._counts[self._records] += 1
            self._contexts = []
        self._contexts.append(context)
        self.error = None

    def remember(self, error: Exception) -> Exception:
        """Remember an error that names its layer, so that the layers around it pass it on."""
        self.error = error
        return error

    def describe(self, arrays: Sequence[Array]) -> str:
        context = arrays[0].context if arrays else None
        shard = f"shard {self._contexts.index(context)} on " if context in self._contexts else ""
        number = self._counts[self._records]
        return f"{shard}{context or 'no device'} {f'at step {number}' if self._records else f'in prediction {number}'}"


class _Layer:
    """A layer with its checks."""

    def __init__(self, path: str, block: gluon.Block, place: _Place, check_finite: bool, *, begins: bool) -> None:
        self._path, self._block, self._place = path, block, place
        self._check_finite, self._begins = check_finite, begins

    def forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the layer's `forward` that waits, and checks its inputs and outputs."""

        def run(*args: Any) -> Any:
            inputs = _arrays(args)
            if self._begins and inputs:
                self._place.begin(inputs[0].context)
            if self._check_finite and self._path != "loss":
                self._check_inputs(inputs)
            try:
                output = original(*args)
                for array in _arrays(output):
                    array.wait_to_read()
            except Exception as error:
                if error is self._place.error:  # it names a layer inside of this one
                    raise
                raise self._place.remember(
                    StepError(
                        f"debugging: got {type(error).__name__} ({last_line(error)}) in {self._describe(inputs)}; expected "
                        "inputs that it accepts. The lines above show where in the layer it failed."
                    )
                ) from error
            if self._check_finite:
                self._check(inputs, _arrays(output))
            return output

        return run

    def hybrid_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the layer's `hybrid_forward` that checks its indices: here their meaning is known."""
        range_of = next(range_of for kind, range_of in _INDICES.items() if isinstance(self._block, kind))

        def run(F: Any, *args: Any, **kwargs: Any) -> Any:
            if all(is_device_array(array) or array is None for array in args):
                self._check_range(args, range_of(self._block, *args))
            return original(F, *args, **kwargs)

        return run

    def _describe(self, inputs: Sequence[Array]) -> str:
        kind = type(self._block).__name__
        what = f"{self._path} ({kind})" if self._path == "loss" else f"layer {self._path} ({kind})" if self._path else kind
        shapes = ", ".join(str(array.shape) for array in inputs if array is not None)
        return f"{what} for {self._place.describe(inputs)}, inputs of shapes {shapes}"

    def _check(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        for array in outputs:
            if _num_bad(array):
                size, cause = int(np.prod(array.shape)), self._cause(inputs, array.context)
                raise self._place.remember(
                    NonFiniteLossError(
                        f"debugging: got {_num_bad(array)} of {size} numbers NaN or infinite from {self._describe(inputs)}; "
                        f"expected finite numbers. {cause}"
                    )
                )

    def _check_inputs(self, inputs: Sequence[Array]) -> None:
        """Raise if inputs hold NaN: relu and max pooling turn NaN into numbers, but the gradient is NaN."""
        num_bad = sum(_num_nan(array) for array in inputs)
        if num_bad:
            raise self._place.remember(
                NonFiniteLossError(
                    f"debugging: got {num_bad} NaN in the inputs of {self._describe(inputs)}; expected numbers. Check the "
                    "data, and the weights of the layer before."
                )
            )

    def _check_range(self, inputs: Sequence[Array], found: Optional[_Range]) -> None:
        if found is None:
            return
        values, allowed = found.values, found.allowed
        wrong = ~((values >= allowed.start) & (values < allowed.stop) & (values == np.floor(values)))
        if not wrong.any():
            return
        listed = [f"{value:g}" for value in dict.fromkeys(values[wrong].tolist())]
        shown = ", ".join(listed[:_SHOWN]) + (", ..." if len(listed) > _SHOWN else "")
        first = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise self._place.remember(
            DataError(
                f"debugging: got {found.name} {shown} ({wrong.sum()} of {values.size}, the first at {first}) in "
                f"{self._describe(inputs)}; expected whole numbers {allowed.start} to {allowed.stop - 1}: {found.meaning}. "
                "Correct the data: MXNet silently takes the nearest one."
            )
        )

    def _cause(self, inputs: Sequence[Array], context: Context) -> str:
        if any(map(_num_bad, inputs)):
            return "The inputs hold such numbers: check the data."
        own = getattr(self._block, "_reg_params", self._block.params)
        bad = [name for name, param in own.items() if param._data and _num_bad(param.data(context))]
        if bad:
            return f"Its {' and '.join(bad)} held such numbers: lower the learning rate, or clip the gradient (clip_norm)."
        return "Its inputs and weights are finite: it overflows, divides by 0 or takes a logarithm of 0."


def _layers(roots: Sequence[Tuple[str, gluon.Block]]) -> Iterator[Tuple[str, gluon.Block]]:
    """Yield (structural path, block) of every block, each once."""
    seen = set()
    ahead = list(roots)
    while ahead:
        path, block = ahead.pop(0)
        if id(block) not in seen:
            seen.add(id(block))
            yield path, block
            ahead += [(f"{path}.{name}" if path else name, child) for name, child in block._children.items()]


def _watch(stack: ExitStack, block: Any, layer: _Layer) -> None:
    """Replace a layer's functions with those that check, until the stack is closed."""
    _replace(stack, block, "forward", layer.forward(_own(block, "forward")))
    if any(isinstance(block, kind) for kind in _INDICES):
        _replace(stack, block, "hybrid_forward", layer.hybrid_forward(_own(block, "hybrid_forward")))
    if getattr(block, "_active", False) and not isinstance(block, gluon.SymbolBlock):
        block._active = False  # its graph is kept for later
        stack.callback(_hybridize_again, block)


def _own(block: gluon.Block, name: str) -> Callable[..., Any]:
    """Return a method of a block, looked up in its class at each call, because convert_sync_batchnorm changes the class."""
    if name in vars(block):
        return vars(block)[name]  # type: ignore[no-any-return]
    return lambda *args, **kwargs: getattr(type(block), name)(block, *args, **kwargs)


def _hybridize_again(block: Any) -> None:
    if is_synchronised(block):  # converted in the meantime: it has no graph until it is reverted
        block._was_active = True
        block._clear_cached_op()
    else:
        block._active = True


def _replace(stack: ExitStack, block: gluon.Block, name: str, value: Any) -> None:
    attributes = vars(block)
    was = {name: attributes[name]} if name in attributes else {}

    def put_back() -> None:
        if attributes.get(name) is value:  # not replaced since
            del attributes[name]
            attributes.update(was)

    attributes[name] = value
    stack.callback(put_back)


@dataclass(frozen=True)
class _Range:
    """Integers and the range that they must lie in."""

    name: str
    values: Any
    allowed: range
    meaning: str


def _indices_of(block: Any, indices: Array, *_weight: Array) -> _Range:
    rows = block._kwargs["input_dim"]
    return _Range("indices", indices.asnumpy(), range(rows), f"one for each of {rows} rows")


def _classes_of(block: Any, pred: Array, label: Array, weight: Any = None) -> Optional[_Range]:
    if not block._sparse_label:
        return None
    values, classes = label.asnumpy(), pred.shape[block._axis]
    if weight is not None:
        # Weights have the axis of the classes, of size 1; labels may lack it.
        counts = weight.asnumpy()
        counts = counts.squeeze(block._axis) if counts.ndim == values.ndim + 1 else counts
        values = np.where(np.broadcast_to(counts, values.shape) == 0, 0, values)
    return _Range("labels", values, range(classes), f"one for each of {classes} classes")


def _symbols_of(_block: Any, pred: Array, label: Array, *lengths: Any) -> Optional[_Range]:
    if len(lengths) > 1 and lengths[1] is not None:  # values beyond a label's length are not used
        return None
    symbols = pred.shape[2] - 1
    return _Range("labels", label.asnumpy(), range(-1, symbols), f"{symbols} symbols without the blank, and -1 to pad")


_INDICES: Dict[Any, Callable[..., Optional[_Range]]] = {
    gluon.nn.Embedding: _indices_of,
    gluon.loss.SoftmaxCrossEntropyLoss: _classes_of,
    gluon.loss.CTCLoss: _symbols_of,
}


def _arrays(value: Any) -> List[Array]:
    """Return the device arrays of a layer's inputs or outputs; [] if they are not nested data."""
    try:
        return [leaf for _, leaf in leaves(value) if is_device_array(leaf)]
    except TypeError:  # symbols, for example
        return []


def _num_nan(array: Array) -> int:
    values = array.asnumpy()
    return int(np.isnan(values).sum()) if values.dtype.kind == "f" else 0


def _num_bad(array: Array) -> int:
    values = array.asnumpy()
    return int(values.size - np.isfinite(values).sum()) if values.dtype.kind == "f" else 0

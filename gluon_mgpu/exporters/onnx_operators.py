"""Operators that MXNet's converter to ONNX does not know, or converts for some attributes or sizes only."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Dict, List, NamedTuple, Sequence, Tuple

import numpy as np

from .onnx_recurrent import onnx_layers
from .sampled_graph import parsed

Node = Dict[str, Any]


class Output(NamedTuple):
    """The name and the dtype of a value in the file."""

    name: str
    dtype: Any


class Operator:
    """One operator of MXNet's graph, and what its converter adds to the file.

    Attributes
    ----------
    name : str
    attrs : dict
    sources, inputs : list of str
        The operators of its inputs, and the values in the file that it reads.
    dtypes, shapes : list
        Of its inputs, for the sample.
    params : dict of str to numpy.ndarray
    is_np : bool
        Whether the network takes np arrays.
    outputs : list of str
        The values in the file that it writes; a converter may change them.
    result : list
        The dtypes of its outputs, usually that of the first input; a converter may change them.
    nodes, constants : list
        What the converter adds.
    """

    def __init__(self, onnx: Any, node: Node, read: Sequence[Tuple[str, Output, Any]], params: Any, is_np: bool) -> None:
        self.onnx, self.name, self.params, self.is_np = onnx, node["name"], params, is_np
        self.attrs = {name: parsed(value) for name, value in node.get("attrs", {}).items()}
        self.sources, self.shapes = [source for source, _, _ in read], [shape for _, _, shape in read]
        self.inputs, self.dtypes = [value.name for _, value, _ in read], [value.dtype for _, value, _ in read]
        self.outputs, self.result = [self.name], self.dtypes[:1] * 100
        self.nodes: List[Any] = []
        self.constants: List[Any] = []

    def constant(self, value: Any, dtype: Any = None) -> str:
        """Add a constant, and return its name."""
        array = np.asarray(value, dtype, order="C")
        self.constants.append(self.onnx.numpy_helper.from_array(array, f"{self.name}_value{len(self.constants)}"))
        return str(self.constants[-1].name)

    def add(self, kind: str, *read: str, outputs: Sequence[str] = (), **options: Any) -> str:
        """Add a node, and return the name of its first output."""
        outputs = outputs or [f"{self.name}_part{len(self.nodes)}"]
        self.nodes.append(self.onnx.helper.make_node(kind, read, outputs, name=outputs[0], **options))
        return outputs[0]

    def end(self, kind: str, *read: str, **options: Any) -> None:
        """Add the last node, whose output is that of the operator."""
        self.add(kind, *read, outputs=self.outputs[:1], **options)

    def code(self, dtype: Any) -> int:
        """Return ONNX's number of a dtype."""
        return int(self.onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))

    def axes(self) -> List[int]:
        """Return the axes of a reduction."""
        rank, axis = len(self.shapes[0]), self.attrs.get("axis")
        axes = [one % rank for one in np.atleast_1d(() if axis is None else axis).astype(int).tolist()]
        if self.attrs.get("exclude"):
            axes = [one for one in range(rank) if one not in axes]
        return axes or list(range(rank))


Converter = Callable[[Operator], Any]


def _same(kind: str, op: Operator) -> None:
    op.end(kind, *op.inputs)


def _scalar(kind: str, op: Operator, *, is_first: bool = False) -> None:
    """Convert an operator of an array and a number. MXNet decides by the node's name which one is first."""
    number = op.constant(op.attrs["scalar"], op.dtypes[0])
    op.end(kind, *((number, op.inputs[0]) if is_first else (op.inputs[0], number)))


def _compared(kind: str, op: Operator) -> None:
    """Convert a comparison, to 0 and 1 of the input's type, as MXNet does."""
    dtype = op.dtypes[0]
    other = op.inputs[1] if len(op.inputs) > 1 else op.constant(op.attrs["scalar"], dtype)
    found = op.add(kind.replace("Not", ""), op.inputs[0], other)
    op.end("Cast", op.add("Not", found) if kind.startswith("Not") else found, to=op.code(dtype))


def _reduced(kind: str, op: Operator) -> None:
    axes, keep = op.axes(), bool(op.attrs.get("keepdims"))
    read = [op.inputs[0], op.constant(axes)] if kind == "ReduceSum" else op.inputs[:1]
    options: Dict[str, Any] = {} if kind == "ReduceSum" else {"axes": axes}
    if keep or op.is_np or len(axes) < len(op.shapes[0]):
        op.end(kind, *read, keepdims=int(keep), **options)
    else:  # the shape of a sum of all elements of a legacy array
        op.end("Reshape", op.add(kind, *read, keepdims=0, **options), op.constant([1]))


def _batch_norm(op: Operator) -> None:
    axis = op.attrs["axis"] % len(op.shapes[0])
    data, gamma, *rest = op.inputs
    if op.attrs["fix_gamma"]:
        gamma = op.constant(np.ones(op.shapes[0][axis]), op.dtypes[1])
    epsilon = float(op.attrs["eps"])
    if axis == 1:
        op.end("BatchNormalization", data, gamma, *rest, epsilon=epsilon)
        return
    order = list(range(len(op.shapes[0])))
    order[1], order[axis] = axis, 1
    moved = op.add("Transpose", data, perm=order)
    op.end("Transpose", op.add("BatchNormalization", moved, gamma, *rest, epsilon=epsilon), perm=order)


def _group_norm(op: Operator) -> None:
    """Convert GroupNorm: MXNet has one gamma and beta for each group, not for each channel."""
    shape = op.add("Shape", op.inputs[0])
    grouped = op.add("Reshape", op.inputs[0], op.constant([0, op.attrs["num_groups"], -1]))
    normal = op.add("InstanceNormalization", grouped, *op.inputs[1:], epsilon=float(op.attrs["eps"]))
    op.end("Reshape", normal, shape)


def _l2_normalization(op: Operator) -> None:
    rank = len(op.shapes[0])
    axes = {"instance": range(1, rank), "channel": range(1, 2), "spatial": range(2, rank)}[op.attrs["mode"]]
    squares = op.add("ReduceSumSquare", op.inputs[0], axes=list(axes), keepdims=1)
    total = op.add("Add", squares, op.constant(op.attrs["eps"], op.dtypes[0]))
    op.end("Div", op.inputs[0], op.add("Sqrt", total))


def _embedding(op: Operator) -> None:
    """Convert Embedding: MXNet clips indices that are out of range."""
    whole = op.add("Cast", op.inputs[0], to=op.code("int64"))
    clipped = op.add("Min", op.add("Max", whole, op.constant(0)), op.constant(op.attrs["input_dim"] - 1))
    op.end("Gather", op.inputs[1], clipped)
    op.result = [op.dtypes[1]]


def _one_hot(op: Operator) -> None:
    """Convert one_hot: indices out of range, such as -1, give no one."""
    dtype = op.attrs["dtype"]
    index = op.add("Unsqueeze", op.add("Cast", op.inputs[0], to=op.code("int64")), op.constant([-1]))
    values = [op.constant(op.attrs[name], dtype) for name in ("on_value", "off_value")]
    op.end("Where", op.add("Equal", index, op.constant(np.arange(op.attrs["depth"]))), *values)
    op.result = [np.dtype(dtype)]


def _leaky_relu(op: Operator) -> Any:
    if op.attrs.get("act_type") != "prelu":
        return NotImplemented
    data, slope = op.inputs
    ones = [1] * (len(op.shapes[0]) - 2)  # the axes behind the channels
    op.end("PRelu", data, op.add("Reshape", slope, op.constant([-1, *ones])) if ones else slope)
    return None


def _softmax(op: Operator) -> None:
    """Convert softmax. MXNet's converter overflows unless the axis is the last; what is beyond a length has no share."""
    axis, rank, dtype = op.attrs["axis"] % len(op.shapes[0]), len(op.shapes[0]), op.dtypes[0]
    data, temperature = op.inputs[0], op.attrs.get("temperature")
    if temperature:
        data = op.add("Div", data, op.constant(temperature, dtype))
    if not op.attrs.get("use_length"):
        op.end("Softmax", data, axis=axis)
        return
    size = op.add("Gather", op.add("Shape", data), op.constant(axis))
    places = op.add("Range", op.constant(0), size, op.constant(1))
    places = op.add("Unsqueeze", places, op.constant([one for one in range(rank) if one != axis]))
    lengths = op.add("Unsqueeze", op.add("Cast", op.inputs[1], to=op.code("int64")), op.constant([axis]))
    inside = op.add("Less", places, lengths)
    shares = op.add("Softmax", op.add("Where", inside, data, op.constant(np.finfo(dtype).min, dtype)), axis=axis)
    op.end("Where", inside, shares, op.constant(0, dtype))


def _means(size: int, parts: int) -> np.ndarray:
    """Return the matrix, shape (parts, size), of the means over parts of about one size; neighbours may overlap by one."""
    first, places = np.arange(parts), np.arange(size)
    begin, end = first * size // parts, -((first + 1) * size // -parts)
    inside = (begin[:, None] <= places) & (places < end[:, None])
    return inside / (end - begin)[:, None]


def _adaptive_pooling(op: Operator) -> None:
    height, width = op.shapes[0][2:]
    wanted = np.atleast_1d(op.attrs.get("output_size") or 1)
    if max(wanted) == 1:  # of images of any size
        op.end("GlobalAveragePool", op.inputs[0])
        return
    rows, columns = _means(height, int(wanted[0])), _means(width, int(wanted[-1])).T
    found = op.add("MatMul", op.inputs[0], op.constant(columns, op.dtypes[0]))
    op.end("MatMul", op.constant(rows, op.dtypes[0]), found)


def _last(op: Operator) -> None:
    """Convert SequenceLast: what is last within its length comes first after a reversal."""
    axis, by_length = op.attrs["axis"], bool(op.attrs.get("use_sequence_length"))
    read = op.inputs[0]
    if by_length:
        lengths = op.add("Cast", op.inputs[1], to=op.code("int64"))
        read = op.add("ReverseSequence", read, lengths, time_axis=axis, batch_axis=1 - axis)
    op.end("Gather", read, op.constant(0 if by_length else -1), axis=axis)


def _reshape(op: Operator) -> Any:
    """Convert MXNet's codes of a shape that ONNX lacks: -2 (all other axes), -3 (two become one), -4 (one becomes two)."""
    codes = np.atleast_1d(op.attrs["shape"]).tolist()
    if op.attrs.get("reverse") or not min(codes, default=0) < -1:
        return NotImplemented
    sizes, parts = op.add("Shape", op.inputs[0]), []

    def size(axis: int) -> str:
        return op.add("Gather", sizes, op.constant([axis]))

    axis, rest = 0, iter(codes)  # the axis of the input that comes next
    for code in rest:
        if code == -2:
            parts.append(op.add("Slice", sizes, op.constant([axis]), op.constant([2**31])))
        elif code == -3:
            parts.append(op.add("Mul", size(axis), size(axis + 1)))
            axis += 1
        elif code == -4:
            parts += [op.constant([next(rest)]), op.constant([next(rest)])]
        else:
            parts.append(size(axis) if code == 0 else op.constant([code]))
        axis += 1
    op.end("Reshape", op.inputs[0], op.add("Concat", *parts, axis=0))
    return None


def _recurrent(op: Operator) -> None:
    """Convert a recurrent operator: one of ONNX for each layer, in both directions. ONNX begins with zeros by itself."""
    begins = [name if source != "_zeros" else "" for name, source in zip(op.inputs[2:], op.sources[2:])]
    found, lasts = op.inputs[0], [[] for _ in begins]  # type: ignore[var-annotated]
    kind, options, layers = onnx_layers(op.attrs, op.params[op.inputs[1]])
    for number, arrays in enumerate(layers):
        num_directions = len(arrays[0])
        rows = np.arange(number * num_directions, (number + 1) * num_directions)
        read = [found, *map(op.constant, arrays), ""]
        for begin in begins:
            read.append(op.add("Gather", begin, op.constant(rows), axis=0) if begin else "")
        while not read[-1]:
            read.pop()
        outputs = [f"{op.name}_layer{number}_{part}" for part in ("all", "state", "cell")[: 1 + len(begins)]]
        steps = op.add(kind, *read, outputs=outputs, **options)
        moved, shape = op.add("Transpose", steps, perm=[0, 2, 1, 3]), op.constant([0, 0, -1])
        found = op.add("Reshape", moved, shape, outputs=[op.name] if arrays is layers[-1] else ())
        for last, name in zip(lasts, outputs[1:]):
            last.append(name)
    if op.attrs.get("state_outputs"):
        op.outputs += [op.add("Concat", *parts, outputs=[f"{op.name}{i}"], axis=0) for i, parts in enumerate(lasts, 1)]


_ARITHMETIC = {"plus": "Add", "minus": "Sub", "mul": "Mul", "div": "Div", "power": "Pow"}
_COMPARED = {"equal": "Equal", "not_equal": "NotEqual", "greater": "Greater", "greater_equal": "GreaterOrEqual"}
_COMPARED.update({"lesser": "Less", "lesser_equal": "LessOrEqual"})
_SAME = {"erf": "Erf", "sign": "Sign", "broadcast_maximum": "Max", "softsign": "Softsign", "_npi_matmul": "MatMul"}

OPERATORS: Dict[str, Converter] = {  # by the names of MXNet's operators; `NotImplemented` leaves a node to MXNet's converter
    **{name: partial(_same, kind) for name, kind in _SAME.items()},
    **{f"_{name}_scalar": partial(_scalar, kind) for name, kind in _ARITHMETIC.items()},
    **{f"_r{name}_scalar": partial(_scalar, _ARITHMETIC[name], is_first=True) for name in ("minus", "div", "power")},
    **{f"_{name}_scalar": partial(_compared, kind) for name, kind in _COMPARED.items()},
    **{f"broadcast_{name}": partial(_compared, kind) for name, kind in _COMPARED.items()},
    **{name: partial(_reduced, f"Reduce{name.capitalize()}") for name in ("sum", "mean", "prod", "max", "min")},
    "BatchNorm": _batch_norm,
    "Embedding": _embedding,
    "GroupNorm": _group_norm,
    "L2Normalization": _l2_normalization,
    "LeakyReLU": _leaky_relu,
    "RNN": _recurrent,
    "Reshape": _reshape,
    "SequenceLast": _last,
    "_contrib_AdaptiveAvgPooling2D": _adaptive_pooling,
    "_np_dot": partial(_same, "MatMul"),
    "one_hot": _one_hot,
    "softmax": _softmax,
}

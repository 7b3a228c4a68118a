"""Operators that MXNet's converter to ONNX does not know, or converts for some attributes only."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Sequence, Tuple

import numpy as np

from .graph import parsed

Node = Dict[str, Any]
Converter = Callable[..., List[Any]]

_COMPARED = {"equal": "Equal", "greater": "Greater", "greater_equal": "GreaterOrEqual"}
_COMPARED.update({"lesser": "Less", "lesser_equal": "LessOrEqual"})
_ALL = -(2**62)  # as the end of a slice that runs backwards: all


def operators(
    onnx: Any,
    translations: Any,
    older: Dict[str, Callable[..., Any]],
    *,
    constant: Callable[[Dict[str, Any], str, np.ndarray], str],
    shape_of: Callable[[Node, Dict[str, Any], int], Tuple[int, ...]],
    is_np: bool,
) -> Dict[str, Converter]:
    """Return converters by the names of MXNet's operators.

    Parameters
    ----------
    onnx : module
    translations : module
        MXNet's, with `get_inputs` and `get_input_dtypes`.
    older : dict of str to callable
        MXNet's own converters.
    constant : callable (graph, name, value) -> name
        Adds a constant to the file.
    shape_of : callable (node, graph, number) -> tuple of int
        The shape of one of a node's inputs, for the sample.
    is_np : bool
        Whether the sum of all elements has no axis, as that of an np array.
    """
    make = onnx.helper.make_node

    def read(node: Node, graph: Dict[str, Any]) -> Tuple[str, List[str], Dict[str, Any]]:
        name, inputs, attrs = translations.get_inputs(node, graph)
        return name, inputs, {key: parsed(value) for key, value in attrs.items()}

    def chain(*kinds: str) -> Converter:
        """Return a converter that applies operators of one input one after the other."""

        def converted(node: Node, **graph: Any) -> List[Any]:
            name, inputs, _ = read(node, graph)
            names = [inputs[0], *(f"{name}_{i}" for i in range(1, len(kinds))), name]
            return [make(kind, [a], [b], name=b) for kind, a, b in zip(kinds, names, names[1:])]

        return converted

    def scalar(kind: str, *, is_first: bool = False) -> Converter:
        """Return a converter for an array and a number. MXNet decides by the node's name which one is first."""

        def converted(node: Node, **graph: Any) -> List[Any]:
            name, inputs, attrs = read(node, graph)
            dtype = translations.get_input_dtypes(node, graph)[0]
            number = constant(graph, f"{name}_scalar", np.array(attrs["scalar"]).astype(dtype))
            return [make(kind, [number, inputs[0]] if is_first else [inputs[0], number], [name], name=name)]

        return converted

    def compared(kind: str, *, negated: bool = False) -> Converter:
        """Return a converter that gives 0 and 1 of the input's type, as MXNet does."""

        def converted(node: Node, **graph: Any) -> List[Any]:
            name, inputs, attrs = read(node, graph)
            dtype = translations.get_input_dtypes(node, graph)[0]
            if len(inputs) == 1:
                inputs.append(constant(graph, f"{name}_scalar", np.array(attrs["scalar"]).astype(dtype)))
            nodes, last = [make(kind, inputs, [f"{name}_found"])], f"{name}_found"
            if negated:
                nodes.append(make("Not", [last], [f"{name}_not"]))
                last = f"{name}_not"
            return [*nodes, make("Cast", [last], [name], name=name, to=onnx.helper.np_dtype_to_tensor_dtype(dtype))]

        return converted

    def along(node: Node, graph: Dict[str, Any], attrs: Dict[str, Any]) -> Tuple[List[int], bool]:
        """Return the axes of a reduction, and whether they are all axes."""
        rank, axis = len(shape_of(node, graph, 0)), attrs.get("axis")
        axes = [] if axis is None else [axis % rank] if isinstance(axis, int) else [one % rank for one in axis]
        if attrs.get("exclude"):
            axes = [one for one in range(rank) if one not in axes]
        return axes or list(range(rank)), len(axes) in (0, rank)

    def reduce_nodes(kind: str, graph: Dict[str, Any], names: Tuple[str, str], axes: Sequence[int], keep: bool) -> List[Any]:
        options = {"name": names[1], "keepdims": int(keep)}
        if kind != "ReduceSum":
            return [make(kind, [names[0]], [names[1]], axes=list(axes), **options)]
        return [make(kind, [names[0], constant(graph, f"{names[1]}_axes", np.array(axes))], [names[1]], **options)]

    def reduced(kind: str) -> Converter:
        def converted(node: Node, **graph: Any) -> List[Any]:
            name, inputs, attrs = read(node, graph)
            axes, are_all = along(node, graph, attrs)
            keep = bool(attrs.get("keepdims"))
            if not are_all or keep or is_np:
                return reduce_nodes(kind, graph, (inputs[0], name), axes, keep)
            one = constant(graph, f"{name}_one", np.array([1]))  # the shape of a sum of all elements of a legacy array
            nodes = reduce_nodes(kind, graph, (inputs[0], f"{name}_reduced"), axes, keep)
            return [*nodes, make("Reshape", [f"{name}_reduced", one], [name], name=name)]

        return converted

    def variance(*, root: bool) -> Converter:
        def converted(node: Node, **graph: Any) -> List[Any]:
            name, inputs, attrs = read(node, graph)
            if attrs.get("ddof"):
                raise NotImplementedError(f"a variance with ddof={attrs['ddof']}")
            axes, _ = along(node, graph, attrs)
            nodes = [
                *reduce_nodes("ReduceMean", graph, (inputs[0], f"{name}_mean"), axes, True),
                make("Sub", [inputs[0], f"{name}_mean"], [f"{name}_moved"]),
                make("Mul", [f"{name}_moved"] * 2, [f"{name}_squares"]),
                *reduce_nodes("ReduceMean", graph, (f"{name}_squares", f"{name}_var"), axes, bool(attrs.get("keepdims"))),
            ]
            return [*nodes, make("Sqrt" if root else "Identity", [f"{name}_var"], [name], name=name)]

        return converted

    def batch_norm(node: Node, **graph: Any) -> List[Any]:
        name, inputs, attrs = read(node, graph)
        rank = len(shape_of(node, graph, 0))
        axis = attrs.get("axis", 1) % rank
        if axis == 1:
            return list(older["BatchNorm"](node, **graph))
        order = list(range(rank))
        order[1], order[axis] = axis, 1
        options = {"epsilon": float(attrs.get("eps", 1e-3)), "momentum": float(attrs.get("momentum", 0.9))}
        return [
            make("Transpose", inputs[:1], [f"{name}_second"], perm=order),
            make("BatchNormalization", [f"{name}_second", *inputs[1:]], [f"{name}_normal"], **options),
            make("Transpose", [f"{name}_normal"], [name], name=name, perm=order),
        ]

    def l2_normalization(node: Node, **graph: Any) -> List[Any]:
        name, inputs, attrs = read(node, graph)
        rank = len(shape_of(node, graph, 0))
        axes = {"instance": range(1, rank), "channel": range(1, 2), "spatial": range(2, rank)}[attrs.get("mode", "instance")]
        dtype = translations.get_input_dtypes(node, graph)[0]
        small = constant(graph, f"{name}_eps", np.array(attrs.get("eps", 1e-10)).astype(dtype))
        return [
            *reduce_nodes("ReduceSumSquare", graph, (inputs[0], f"{name}_squares"), axes, True),
            make("Add", [f"{name}_squares", small], [f"{name}_sum"]),
            make("Sqrt", [f"{name}_sum"], [f"{name}_norm"]),
            make("Div", [inputs[0], f"{name}_norm"], [name], name=name),
        ]

    def local_response_norm(node: Node, **graph: Any) -> List[Any]:
        return list(older["LRN"]({**node, "attrs": {"knorm": "2", **node["attrs"]}}, **graph))  # MXNet's default; 1 is written

    def pick(node: Node, **graph: Any) -> List[Any]:
        name, inputs, attrs = read(node, graph)
        sizes, numbers = shape_of(node, graph, 0), shape_of(node, graph, 1)
        axis = attrs.get("axis", -1)
        if axis is None or attrs.get("mode", "clip") != "clip":
            raise NotImplementedError(f"pick with axis={axis}, mode={attrs.get('mode', 'clip')}")
        ends = [constant(graph, f"{name}_{end}", np.array(at)) for end, at in (("first", 0), ("last", sizes[axis] - 1))]
        place = constant(graph, f"{name}_axis", np.array([axis % len(sizes)]))
        nodes = [
            make("Cast", [inputs[1]], [f"{name}_whole"], to=onnx.TensorProto.INT64),
            make("Clip", [f"{name}_whole", *ends], [f"{name}_inside"]),
        ]
        last = f"{name}_inside"
        if len(numbers) < len(sizes):
            nodes.append(make("Unsqueeze", [last, place], [f"{name}_index"]))
            last = f"{name}_index"
        if attrs.get("keepdims"):
            return [*nodes, make("GatherElements", [inputs[0], last], [name], name=name, axis=axis)]
        nodes.append(make("GatherElements", [inputs[0], last], [f"{name}_found"], axis=axis))
        return [*nodes, make("Squeeze", [f"{name}_found", place], [name], name=name)]

    def reverse(node: Node, **graph: Any) -> List[Any]:
        name, inputs, attrs = read(node, graph)
        axes = np.atleast_1d(attrs["axis"])
        parts = {"from": np.full_like(axes, -1), "to": np.full_like(axes, _ALL), "axes": axes, "steps": np.full_like(axes, -1)}
        return [make("Slice", [inputs[0], *(constant(graph, f"{name}_{k}", v) for k, v in parts.items())], [name], name=name)]

    def where(node: Node, **graph: Any) -> Any:
        name, inputs, _ = read(node, graph)
        nodes = [
            make("Cast", inputs[:1], [f"{name}_bool"], to=onnx.TensorProto.BOOL),
            make("Where", [f"{name}_bool", *inputs[1:]], [name], name=name),
        ]
        return nodes, translations.get_input_dtypes(node, graph)[1:2]

    def full_like(node: Node, **graph: Any) -> List[Any]:
        name, inputs, attrs = read(node, graph)
        dtype = translations.get_input_dtypes(node, graph)[0]
        value = onnx.numpy_helper.from_array(np.array([attrs["fill_value"]]).astype(dtype))
        shape = make("Shape", inputs[:1], [f"{name}_shape"])
        return [shape, make("ConstantOfShape", [f"{name}_shape"], [name], name=name, value=value)]

    def log1p(node: Node, **graph: Any) -> List[Any]:
        name, inputs, _ = read(node, graph)
        one = constant(graph, f"{name}_one", np.ones((), translations.get_input_dtypes(node, graph)[0]))
        return [make("Add", [inputs[0], one], [f"{name}_more"]), make("Log", [f"{name}_more"], [name], name=name)]

    def expm1(node: Node, **graph: Any) -> List[Any]:
        name, inputs, _ = read(node, graph)
        one = constant(graph, f"{name}_one", np.ones((), translations.get_input_dtypes(node, graph)[0]))
        return [make("Exp", inputs[:1], [f"{name}_exp"]), make("Sub", [f"{name}_exp", one], [name], name=name)]

    def softmin(node: Node, **graph: Any) -> List[Any]:
        name, inputs, attrs = read(node, graph)
        negative = make("Neg", inputs[:1], [f"{name}_negative"])
        return [negative, make("Softmax", [f"{name}_negative"], [name], name=name, axis=attrs.get("axis", -1))]

    arithmetic = {"plus": "Add", "minus": "Sub", "mul": "Mul", "div": "Div", "power": "Pow"}
    kinds = {"sum": "Sum", "mean": "Mean", "prod": "Prod", "max": "Max", "min": "Min"}

    def matmul(node: Node, **graph: Any) -> List[Any]:
        name, inputs, _ = read(node, graph)
        return [make("MatMul", inputs, [name], name=name)]

    return {
        **{f"_{name}_scalar": scalar(kind) for name, kind in arithmetic.items()},
        **{f"_r{name}_scalar": scalar(arithmetic[name], is_first=True) for name in ("minus", "div", "power")},
        **{f"_{name}_scalar": compared(kind) for name, kind in _COMPARED.items()},
        **{f"broadcast_{name}": compared(kind) for name, kind in _COMPARED.items()},
        **{name: compared("Equal", negated=True) for name in ("_not_equal_scalar", "broadcast_not_equal")},
        **{name: reduced(f"Reduce{kind}") for name, kind in kinds.items()},
        "_npi_var": variance(root=False),
        "_npi_std": variance(root=True),
        "BatchNorm": batch_norm,
        "L2Normalization": l2_normalization,
        "LRN": local_response_norm,
        "pick": pick,
        "reverse": reverse,
        "_npi_where": where,
        "_npi_full_like": full_like,
        "_npi_matmul": matmul,
        "_np_dot": matmul,
        "softmin": softmin,
        "softsign": chain("Softsign"),
        "rsqrt": chain("Sqrt", "Reciprocal"),
        "log1p": log1p,
        "expm1": expm1,
    }

"""MXNet's `box_nms` in ONNX: what its own converter writes lets boxes of all classes suppress each other."""

from __future__ import annotations

from typing import Any, Dict, List, Sequence, Tuple

import numpy as np


def convert_box_nms(
    onnx: Any, name: str, data: str, attrs: Dict[str, str], shape: Sequence[int], initializers: List[Any]
) -> List[Any]:
    """Return the nodes that compute the first output of `box_nms`: the rows that are left, best first, then rows of -1.

    Parameters
    ----------
    onnx : module
    name : str
        Of the operator. The output is `name` and "0", as in MXNet's converter.
    data : str
        The array of boxes.
    attrs : dict of str
        The operator's options.
    shape : sequence of int
        Of the array: (..., number of boxes, width).
    initializers : list of onnx.TensorProto
        Receives the constants.

    Raises
    ------
    NotImplementedError
        Input and output have different formats.
    """
    if attrs.get("in_format", "corner") != attrs.get("out_format", "corner"):
        raise NotImplementedError("box_nms with different formats of input and output")
    num_boxes, width = shape[-2:]
    most, kind = int(attrs.get("topk", -1)), int(attrs.get("id_index", -1))
    most = num_boxes if most < 0 else min(most, num_boxes)
    make, types = onnx.helper.make_node, onnx.TensorProto
    nodes: List[Any] = []

    def value(number: Any, dtype: str = "int64") -> str:
        initializers.append(onnx.numpy_helper.from_array(np.array(number, dtype), f"{name}_value{len(initializers)}"))
        return str(initializers[-1].name)

    def add(operator: str, *read: str, **options: Any) -> str:
        nodes.append(make(operator, read, [f"{name}_{len(nodes)}"], **options))
        return str(nodes[-1].output[0])

    def columns(rows: str, first: int, count: int = 1) -> str:
        part = add("Slice", rows, value([first]), value([first + count]), value([2]))
        return part if count > 1 else add("Squeeze", part, value([2]))

    def largest(values: str) -> Tuple[str, str]:
        nodes.append(make("TopK", [values, value([most])], [f"{name}_top{len(nodes)}", f"{name}_places{len(nodes)}"], axis=1))
        return nodes[-1].output[0], add("Unsqueeze", nodes[-1].output[1], value([2]))

    # The best boxes of each example, by their scores: arrays of shape (batch, most, ...).
    never, minus = value(np.finfo("float32").min, "float32"), value(-1, "float32")
    every = add("Reshape", data, value([-1, num_boxes, width]))
    scores = columns(every, int(attrs.get("score_index", 1)))
    if kind >= 0:
        background = value(float(attrs.get("background_id", -1)), "float32")
        scores = add("Where", add("Equal", columns(every, kind), background), never, scores)
    scores, places = largest(scores)
    rows = add("GatherND", every, places, batch_dims=1)

    # Those that no better one overlaps, of the same class if there are classes: 1, else 0.
    by_class = add("Unsqueeze", scores, value([1]))
    if kind >= 0 and attrs.get("force_suppress", "False") not in ("True", "1"):
        classes = add("Cast", add("Relu", columns(rows, kind)), to=types.INT64)
        count = add("Add", add("ReduceMax", classes, keepdims=0), value(1))
        is_class = add("Cast", add("OneHot", classes, count, value([0, 1]), axis=1), to=types.BOOL)
        by_class = add("Where", is_class, by_class, never)
    boxes = columns(rows, int(attrs.get("coord_start", 2)), 4)
    overlap, valid = (float(attrs.get(key, usual)) for key, usual in (("overlap_thresh", 0.5), ("valid_thresh", 0)))
    limits = (value([most]), value([overlap], "float32"), value([valid], "float32"))
    is_center = int(attrs.get("in_format") == "center")
    chosen = add("NonMaxSuppression", boxes, by_class, *limits, center_point_box=is_center)
    chosen = add("Slice", chosen, value([0]), value([3]), value([1]), value([2]))  # example and box
    count = add("Slice", add("Shape", chosen), value([0]), value([1]))
    ones = add("ConstantOfShape", count, value=onnx.helper.make_tensor("one", types.FLOAT, [1], [1.0]))
    kept = add("ScatterND", add("ConstantOfShape", add("Shape", scores)), chosen, ones)

    # They come first, in their order.
    order, places = largest(add("Sub", add("Mul", kept, value(2 * most, "float32")), value(np.arange(most), "float32")))
    is_kept = add("Unsqueeze", add("Greater", order, value(0, "float32")), value([2]))
    rows = add("Where", is_kept, add("GatherND", rows, places, batch_dims=1), minus)
    rows = add("Pad", rows, value([0, 0, 0, 0, num_boxes - most, 0]), minus)
    nodes.append(make("Reshape", [rows, add("Shape", data)], [f"{name}0"], name=f"{name}0"))
    return nodes

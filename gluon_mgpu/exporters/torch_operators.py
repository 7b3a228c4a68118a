"""PyTorch's functions for the operators of MXNet's graphs."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence


class UnknownLayerError(Exception):
    """A layer whose counterpart in PyTorch is not known here."""


def _pooling(torch: Any, attrs: Dict[str, Any], x: Any) -> Any:
    F, axes = torch.nn.functional, x.dim() - 2
    kind = attrs.get("pool_type", "max")
    if kind not in ("max", "avg"):
        raise UnknownLayerError(f"pooling of type {kind}")
    if attrs.get("global_pool"):
        dims = tuple(range(2, x.dim()))
        return x.amax(dims, keepdim=True) if kind == "max" else x.mean(dims, keepdim=True)
    _check_layout(attrs)
    options = {
        "stride": attrs.get("stride", 1),
        "padding": attrs.get("pad", 0),
        "ceil_mode": attrs.get("pooling_convention") == "full",
    }
    if kind == "avg":
        options["count_include_pad"] = attrs.get("count_include_pad", True) is not False
    return getattr(F, f"{kind}_pool{axes}d")(x, attrs["kernel"], **options)


def _check_layout(attrs: Dict[str, Any]) -> None:
    if attrs.get("layout") not in (None, "None", "NCW", "NCHW", "NCDHW"):
        raise UnknownLayerError(f"a layer with the layout {attrs['layout']}")


def _flipped(x: Any, transposed: Any) -> Any:
    return x.transpose(1, 2) if transposed else x


def _inside(indices: Any, size: int, mode: str) -> Any:
    """Return indices as MXNet reads them: 99 is the last one, or begins again."""
    return indices.long() % size if mode == "wrap" else indices.long().clamp(0, size - 1)


def _slices(attrs: Dict[str, Any]) -> Any:
    begin, end = attrs["begin"], attrs["end"]
    steps = attrs.get("step") or (None,) * len(begin)
    return tuple(slice(*limits) for limits in zip(begin, end, steps))


def _wanted(codes: Sequence[int], shape: Sequence[int]) -> List[int]:
    """Return the sizes that the codes of MXNet's Reshape ask for.

    Examples
    --------
    >>> _wanted((-4, 2, -1, -3, -2), (6, 3, 4, 5))
    [2, 3, 12, 5]
    """
    sizes: List[int] = []
    axis, rest = 0, iter(codes)  # the axis of the input that comes next
    for code in rest:
        if code == -2:  # all others
            sizes += shape[axis:]
        elif code == -3:  # two become one
            sizes.append(shape[axis] * shape[axis + 1])
            axis += 1
        elif code == -4:  # one becomes two, of which one may be unknown
            first, second = next(rest), next(rest)
            sizes += [shape[axis] // second if first == -1 else first, shape[axis] // first if second == -1 else second]
        else:
            sizes.append(shape[axis] if code == 0 else code)
        axis += 1
    return sizes


def operators_of(torch: Any) -> Dict[str, Callable[..., Any]]:
    """Return functions of an operator's attributes and inputs."""
    F = torch.nn.functional

    def convolution(a: Dict[str, Any], x: Any, weight: Any, bias: Any = None) -> Any:
        _check_layout(a)
        run = getattr(F, f"conv{x.dim() - 2}d")
        return run(x, weight, bias, a.get("stride", 1), a.get("pad", 0), a.get("dilate", 1), a.get("num_group", 1))

    def deconvolution(a: Dict[str, Any], x: Any, weight: Any, bias: Any = None) -> Any:
        _check_layout(a)
        run = getattr(F, f"conv_transpose{x.dim() - 2}d")
        more = (a.get("adj", 0), a.get("num_group", 1), a.get("dilate", 1))
        return run(x, weight, bias, a.get("stride", 1), a.get("pad", 0), *more)

    def dense(a: Dict[str, Any], x: Any, weight: Any, bias: Any = None) -> Any:
        return F.linear(x.flatten(1) if a.get("flatten", True) else x, weight, bias)

    def batch_norm(a: Dict[str, Any], x: Any, gamma: Any, beta: Any, mean: Any, var: Any) -> Any:
        axis = a.get("axis", 1)
        return F.batch_norm(x.swapaxes(1, axis), mean, var, gamma, beta, False, 0.0, a.get("eps", 1e-3)).swapaxes(1, axis)

    def layer_norm(a: Dict[str, Any], x: Any, gamma: Any, beta: Any) -> Any:
        last = x.movedim(a.get("axis", -1), -1)
        return F.layer_norm(last, last.shape[-1:], gamma, beta, a.get("eps", 1e-5)).movedim(-1, a.get("axis", -1))

    def group_norm(a: Dict[str, Any], x: Any, gamma: Any, beta: Any) -> Any:
        number, channels = a.get("num_groups", 1), x.shape[1]
        each = [value.repeat_interleave(channels // number) for value in (gamma, beta)]  # MXNet has one value for each group
        return F.group_norm(x, number, *each, a.get("eps", 1e-5))

    def activation(a: Dict[str, Any], x: Any) -> Any:
        named = {"relu": F.relu, "sigmoid": torch.sigmoid, "tanh": torch.tanh, "softrelu": F.softplus, "softsign": F.softsign}
        return named[a["act_type"]](x)

    def leaky(a: Dict[str, Any], x: Any, alpha: Any = None) -> Any:
        kind, slope = a.get("act_type", "leaky"), a.get("slope", 0.25)
        if kind == "prelu":
            return F.prelu(x, alpha)
        named: Dict[str, Callable[[], Any]] = {
            "leaky": lambda: F.leaky_relu(x, slope),
            "elu": lambda: F.elu(x, slope),
            "selu": lambda: F.selu(x),
            "gelu": lambda: F.gelu(x),
        }
        if kind not in named:
            raise UnknownLayerError(f"LeakyReLU of type {kind}")
        return named[kind]()

    def reshape(a: Dict[str, Any], x: Any) -> Any:
        shape = a["shape"] if isinstance(a["shape"], tuple) else (a["shape"],)
        if a.get("reverse"):
            raise UnknownLayerError(f"reshape to {shape} from the right")
        return x.reshape(_wanted(shape, x.shape))

    def reduced(kind: str) -> Callable[..., Any]:
        def run(a: Dict[str, Any], x: Any) -> Any:
            axis: Optional[Any] = a.get("axis")
            axes = () if axis in (None, (), "None") else axis if isinstance(axis, tuple) else (axis,)
            if a.get("exclude"):
                axes = tuple(i for i in range(x.dim()) if i not in [one % x.dim() for one in axes])
            return getattr(x, kind)(axes or tuple(range(x.dim())), keepdim=bool(a.get("keepdims", False)))

        return run

    def split(a: Dict[str, Any], x: Any) -> Any:
        parts = x.chunk(a["num_outputs"], a.get("axis", 1))
        return [part.squeeze(a.get("axis", 1)) for part in parts] if a.get("squeeze_axis") else parts

    def softmax(kind: str) -> Callable[..., Any]:
        def run(a: Dict[str, Any], x: Any, length: Any = None) -> Any:
            if length is not None:
                raise UnknownLayerError(f"{kind} with lengths")
            return getattr(torch, kind)(x / (a.get("temperature") or 1.0), a.get("axis", -1))

        return run

    def take(a: Dict[str, Any], x: Any, indices: Any) -> Any:
        axis = a.get("axis", 0) % x.dim()
        places = _inside(indices, x.shape[axis], a.get("mode", "clip"))
        return x.index_select(axis, places.flatten()).reshape([*x.shape[:axis], *places.shape, *x.shape[axis + 1 :]])

    def pick(a: Dict[str, Any], x: Any, indices: Any) -> Any:
        axis = a.get("axis", -1)
        places = _inside(indices, x.shape[axis], a.get("mode", "clip"))
        places = places.unsqueeze(axis) if places.dim() < x.dim() else places
        found = x.gather(axis, places)
        return found if a.get("keepdims") else found.squeeze(axis)

    def dot(a: Dict[str, Any], x: Any, y: Any) -> Any:
        x = x.movedim(0, -1) if a.get("transpose_a") else x
        return torch.tensordot(x, y.movedim(-1, 0) if a.get("transpose_b") else y, 1)

    def padded(a: Dict[str, Any], x: Any) -> Any:
        pairs = list(zip(a["pad_width"][::2], a["pad_width"][1::2]))
        if any(pairs[0]) or any(pairs[1]):
            raise UnknownLayerError("padding of the batch or the channels")
        kind = {"edge": "replicate"}.get(a["mode"], a["mode"])
        value = {"value": a.get("constant_value", 0.0)} if kind == "constant" else {}
        return F.pad(x, [size for pair in pairs[:1:-1] for size in pair], kind, **value)

    def sequence_last(a: Dict[str, Any], x: Any, length: Any = None) -> Any:
        if length is not None:
            raise UnknownLayerError("SequenceLast with lengths")
        return x.select(a.get("axis", 0), -1)

    def sequence_mask(a: Dict[str, Any], x: Any, length: Any = None) -> Any:
        if length is None:
            return x
        steps = torch.arange(x.shape[a.get("axis", 0)]).unsqueeze(1) < length  # (steps, batch)
        inside = (steps.T if a.get("axis", 0) else steps).reshape([*x.shape[:2], *[1] * (x.dim() - 2)])
        return torch.where(inside, x, torch.tensor(float(a.get("value", 0.0))))

    def l2_normalization(a: Dict[str, Any], x: Any) -> Any:
        axes = {"instance": range(1, x.dim()), "channel": (1,), "spatial": range(2, x.dim())}[a.get("mode", "instance")]
        return x / torch.sqrt(x.square().sum(tuple(axes), keepdim=True) + a.get("eps", 1e-10))

    def upsampling(a: Dict[str, Any], x: Any) -> Any:
        if a["sample_type"] != "nearest":
            raise UnknownLayerError(f"UpSampling of type {a['sample_type']}")
        return F.interpolate(x, scale_factor=a["scale"])

    def compared(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
        return lambda a, x, *y: function(x, y[0] if y else float(a["scalar"])).to(x.dtype)

    def unary(function: Callable[[Any], Any]) -> Callable[..., Any]:
        return lambda a, x: function(x)

    def binary(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
        return lambda a, x, y: function(x, y)

    def scalar(function: Callable[[Any, float], Any]) -> Callable[..., Any]:
        return lambda a, x: function(x, float(a["scalar"]))

    comparisons = {"equal": torch.eq, "not_equal": torch.ne, "greater": torch.gt, "greater_equal": torch.ge}
    comparisons.update(lesser=torch.lt, lesser_equal=torch.le)
    compares = {name.format(kind): compared(f) for kind, f in comparisons.items() for name in ("broadcast_{}", "_{}_scalar")}
    arithmetic = {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div}
    pairs = {f"{kind}_{name}": binary(f) for kind in ("elemwise", "broadcast") for name, f in arithmetic.items()}
    names = ["relu", "sigmoid", "tanh", "exp", "log", "sqrt", "square", "abs", "negative", "erf", "rsqrt", "log1p", "expm1"]
    names += ["sin", "cos", "tan", "arctan", "sign", "floor", "ceil", "log2", "reciprocal"]
    return {
        **pairs,
        **compares,
        **{name: unary(getattr(torch, name)) for name in names},
        **{name: unary(lambda x: x) for name in ("Dropout", "_copy", "identity", "BlockGrad")},
        **{"mean": reduced("mean"), "sum": reduced("sum"), "max": reduced("amax"), "min": reduced("amin")},
        "Convolution": convolution,
        "Deconvolution": deconvolution,
        "FullyConnected": dense,
        "BatchNorm": batch_norm,
        "LayerNorm": layer_norm,
        "GroupNorm": group_norm,
        "LRN": lambda a, x: F.local_response_norm(x, a["nsize"], a.get("alpha", 1e-4), a.get("beta", 0.75), a.get("knorm", 2.0)),
        "L2Normalization": l2_normalization,
        "Pad": padded,
        "SequenceLast": sequence_last,
        "SequenceMask": sequence_mask,
        "take": take,
        "pick": pick,
        "dot": dot,
        **{name: lambda a, x, y: torch.matmul(x, y) for name in ("_npi_matmul", "_np_dot")},
        **{name: lambda a, where, x, y: torch.where(where != 0, x, y) for name in ("where", "_npi_where")},
        **{name: lambda a, x, y: torch.maximum(x, y) for name in ("_maximum", "broadcast_maximum")},
        **{name: lambda a, x, y: torch.minimum(x, y) for name in ("_minimum", "broadcast_minimum")},
        "zeros_like": lambda a, x: torch.zeros_like(x),
        "ones_like": lambda a, x: torch.ones_like(x),
        "slice": lambda a, x: x[_slices(a)],
        "squeeze": lambda a, x: x.squeeze() if a.get("axis") is None else x.squeeze(a["axis"]),
        "Cast": lambda a, x: x.to(getattr(torch, a["dtype"])),
        "argmax": lambda a, x: x.argmax(a.get("axis"), keepdim=bool(a.get("keepdims"))).to(x.dtype),
        "UpSampling": upsampling,
        "_contrib_AdaptiveAvgPooling2D": lambda a, x: F.adaptive_avg_pool2d(x, a.get("output_size") or 1),
        "one_hot": lambda a, x: (
            F.one_hot(x.long(), a["depth"]).float() * (a.get("on_value", 1.0) - a.get("off_value", 0.0)) + a.get("off_value", 0.0)
        ),
        "InstanceNorm": lambda a, x, g, b: F.instance_norm(x, None, None, g, b, eps=a.get("eps", 1e-3)),
        "Embedding": lambda a, x, weight: F.embedding(x.long(), weight),
        "Pooling": lambda a, x: _pooling(torch, a, x),
        "Activation": activation,
        "LeakyReLU": leaky,
        "Flatten": lambda a, x: x.flatten(1),
        "Reshape": reshape,
        "Concat": lambda a, *xs: torch.cat(xs, a.get("dim", 1)),
        "stack": lambda a, *xs: torch.stack(xs, a.get("axis", 0)),
        "SwapAxis": lambda a, x: x.swapaxes(a.get("dim1", 0), a.get("dim2", 0)),
        "transpose": lambda a, x: x.permute(a.get("axes") or tuple(range(x.dim()))[::-1]),
        "expand_dims": lambda a, x: x.unsqueeze(a["axis"]),
        "SliceChannel": split,
        "slice_axis": lambda a, x: x.movedim(a["axis"], 0)[slice(a["begin"], a["end"])].movedim(0, a["axis"]),
        "batch_dot": lambda a, x, y: torch.bmm(_flipped(x, a.get("transpose_a")), _flipped(y, a.get("transpose_b"))),
        **{kind: softmax(kind) for kind in ("softmax", "log_softmax")},
        "clip": lambda a, x: x.clamp(a["a_min"], a["a_max"]),
        "_plus_scalar": scalar(lambda x, y: x + y),
        "_minus_scalar": scalar(lambda x, y: x - y),
        "_rminus_scalar": scalar(lambda x, y: y - x),
        "_mul_scalar": scalar(lambda x, y: x * y),
        "_div_scalar": scalar(lambda x, y: x / y),
        "_rdiv_scalar": scalar(lambda x, y: y / x),
        "_power_scalar": scalar(lambda x, y: x**y),
        "_rpower_scalar": scalar(lambda x, y: y**x),
        "_maximum_scalar": scalar(lambda x, y: x.clamp(min=y)),
        "_minimum_scalar": scalar(lambda x, y: x.clamp(max=y)),
    }

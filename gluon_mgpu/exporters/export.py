"""Export a network to a format that other programs read, and check the file against the network."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import numpy as np
from mxnet import gluon

from ..checkpoint.atomic_folder import explained, new_file
from ..checks import flag, one_of, path_of, real_number, short
from ..errors import TrainerError
from ..models import Seq2Seq
from ..models.seq2seq.translator import Translator
from ..runtime.environment import logger, require
from ..runtime.mxnet2 import require_mxnet1
from .graph import ExportGraph, NotTraceableError, arguments_of, check_exportable, in_plain_form, predict_sample, trace
from .onnx import Group, OpenAxes, open_axes, run_onnx, write_onnx
from .symbol import files_of, mode_of, run_symbol, write_symbol
from .torch import run_torch, state_of
from .torch_operators import UnknownLayerError
from .translator import FILES, graphs_of, write_folder

FORMATS = ("onnx", "symbol", "torch")
_SUFFIXES = {".onnx": "onnx", ".pt": "torch", ".pth": "torch", "": "symbol"}
TOLERANCE = 1e-4
_SMALLEST = 1e-30  # an output's largest value that still has all digits of float32 in both programs

PathLike = Union[str, Path]


@dataclass(frozen=True)
class Exported:
    """What `export` wrote.

    Attributes
    ----------
    files : tuple of pathlib.Path
    difference : float, optional
        The largest difference between the file's outputs and the network's, divided by the output's largest absolute value.
        None if it was not checked.
    inputs : dict of str to tuple
        The shape of each input. An axis of any size has a name.
    unchecked : str
        Why it was not checked; "" if it was.
    """

    files: Tuple[Path, ...]
    difference: Optional[float] = None
    inputs: Dict[str, Tuple[Union[int, str], ...]] = field(default_factory=dict)
    unchecked: str = ""

    def __str__(self) -> str:
        """Return a line for the terminal."""
        names = ", ".join(map(str, self.files))
        if self.difference is None:
            return f"saved {names}: not checked, {self.unchecked}"
        return f"saved {names}: largest difference {self.difference:.1e} of the output's largest value"


def export(
    net: gluon.Block,
    path: PathLike,
    sample: Any = None,
    check: bool = True,
    *,
    format: Optional[str] = None,
    tolerance: float = TOLERANCE,
    dynamic_axes: Optional[Sequence[Group]] = None,
) -> Exported:
    """Write a network to a file that other programs read, and compare what the file computes with the network.

    | path | format | read by | compared in |
    |---|---|---|---|
    | `model.onnx` | ONNX, opset 13 | ONNX Runtime and others | ONNX Runtime |
    | `model.pt`, `model.pth` | a state dict | `torch.load`, `load_state_dict` | PyTorch |
    | `folder/model` | `model-symbol.json`, `model-0000.params` | `gluon.SymbolBlock.imports` | MXNet |

    The file holds the network in prediction, in float32. BatchNorm's running statistics are averaged over the devices first, as
    by `evaluate`. An ONNX file takes batches of any size if the network does; with recurrent layers, also any number of steps.
    In a job of several processes, one of them calls it.

    Parameters
    ----------
    net : gluon.Block or Translator
        Initialised, with float32 parameters; hybridized or not. Its shapes may still be unknown. A `Translator` becomes a folder
        with an encoder, a decoder, the vocabularies, and a program that translates with ONNX Runtime alone.
    path : str or pathlib.Path
        Missing folders are created. Existing files are replaced once the new ones are complete and checked.
    sample : array, or tuple of them
        One batch as the network takes it: MXNet or NumPy arrays. A tuple holds one argument each, which may be nested. Of a
        `Translator`: a list of texts, or None.
    check : bool
        Compare the file with the network. Otherwise `onnxruntime` is not required, and for PyTorch no sample.
    format : "onnx", "symbol" or "torch", optional
        Overrides the suffix of the path.
    tolerance : float
        The largest difference, divided by the output's largest absolute value.
    dynamic_axes : list of lists of (str, int), optional
        Axes of any size in an ONNX file: each the name of an input and the number of an axis, such as
        `[[("data", 0)], [("data", 2)], [("data", 3)]]` for images of any size. Axes of one list have one size. Inputs are called
        `data`, or `data0`, `data1`, ... By default, the batch, and the steps of recurrent layers.

    Returns
    -------
    Exported

    Raises
    ------
    TrainerError
        An argument is invalid, the format cannot hold the network, or the outputs differ. No file was written or replaced.
    MissingExtraError
        `onnx`, `onnxruntime` or `torch` is not installed.
    SaveError
        The files cannot be written.

    Examples
    --------
    >>> import tempfile
    >>> net = gluon.nn.Dense(2)
    >>> net.initialize()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     exported = export(net, folder + "/dense", np.ones((4, 3), "float32"))
    >>> [file.name for file in exported.files], exported.difference
    (['dense-symbol.json', 'dense-0000.params'], 0.0)
    """
    require_mxnet1("export")
    is_folder = isinstance(path, str) and path.endswith(os.sep)
    path = path_of("export", "path", path)
    flag("export", "check", check)
    real_number("export", "tolerance", tolerance, advice=f"{TOLERANCE:g} is usual.")
    if isinstance(net, Translator):
        return _export_translator(net, path, sample, check, format, tolerance)
    format = _format_of(path, format)
    if isinstance(net, Seq2Seq) and format != "torch":
        raise TrainerError(
            "export: got a Seq2Seq; expected a network that one call runs: a translation takes several. Pass a Translator "
            "with its vocabularies, which becomes encoder and decoder."
        )
    check_exportable("export", net)
    if sample is None and not (format == "torch" and not check):
        raise TrainerError("export: got no sample; expected one batch, which decides shapes and is compared. Pass sample=X.")
    _check_place(path, format, is_folder)
    if format == "torch":
        return _export_torch(net, path, sample, check, tolerance)
    _require(format, check)
    with in_plain_form(net):
        graph = trace("export", net, arguments_of("export", net, sample))
        _check_axes(dynamic_axes, graph)
        return export_graph(graph, path, format, check=check, tolerance=tolerance, axes=dynamic_axes)


def export_graph(
    graph: ExportGraph,
    path: Path,
    format: str,
    *,
    check: bool = True,
    tolerance: float = TOLERANCE,
    axes: Optional[Sequence[Group]] = None,
) -> Exported:
    """Write a graph as ONNX or symbol files, and compare them with the network that the graph is of.

    `axes` are the axes that an ONNX file leaves open if the network allows it; see `open_axes`.
    """
    with explained("export", path.parent), ExitStack() as stack:
        path.parent.mkdir(parents=True, exist_ok=True)
        if format == "symbol":
            files = files_of(path)
            new = [stack.enter_context(new_file(file)) for file in files]
            stack.enter_context(mode_of(graph))
            write_symbol(graph, *new)
            sizes = {name: value.shape for name, value in graph.inputs.items()}
            if not check:
                return Exported(files, None, sizes, "check=False")
            return Exported(files, _compared("symbol", run_symbol(graph, *new), graph.outputs, tolerance), sizes)
        (file,) = [stack.enter_context(new_file(path))]
        choices = open_axes(graph, axes)
        for chosen in choices:
            try:
                write_onnx("export", graph, file, chosen)
                difference = _checked_onnx(graph, file, chosen, tolerance) if check else None
                break
            except TrainerError:
                if chosen is choices[-1]:
                    raise
        if chosen is not choices[0] or not chosen.names:
            logger.warning("export: %s takes inputs of fixed sizes: %s", path, _sizes(graph, chosen))
        return Exported((path,), difference, _sizes(graph, chosen), "" if check else "check=False")


def _export_translator(
    translator: Translator, path: Path, texts: Optional[Sequence[str]], check: bool, format: Optional[str], tolerance: float
) -> Exported:
    format = format or ("torch" if _SUFFIXES.get(path.suffix) == "torch" else "onnx")
    one_of("export", "format", format, FORMATS, advice="None writes ONNX.")
    check_exportable("export", translator.net)
    if format == "torch":
        _check_place(path, format)
        return _export_torch(translator.net, path, None, check, tolerance)
    _require(format, check)
    options: Dict[str, Any] = {"check": check, "tolerance": tolerance}
    with in_plain_form(translator.net):
        if format == "symbol":
            made = []
            for part, (graph, _) in graphs_of(translator.net).items():
                made.append(export_graph(graph, path.with_name(f"{path.name}-{part}"), format, **options))
            return _joined(made)
        if path.suffix in _SUFFIXES and path.suffix:
            raise TrainerError(f"export: got path={str(path)!r} for a Translator; expected a folder. Pass one without a suffix.")

        def write_graph(graph: ExportGraph, file: Path, axes: Sequence[Group]) -> Exported:
            return export_graph(graph, file, "onnx", axes=axes, **options)

        made = write_folder(translator, path, write_graph, texts, check)
    return replace(_joined(made), files=tuple(path / name for name in FILES))


def _joined(made: Sequence[Exported]) -> Exported:
    differences = [one.difference for one in made if one.difference is not None]
    inputs = {name: size for one in made for name, size in one.inputs.items()}
    files = tuple(file for one in made for file in one.files)
    return Exported(files, max(differences, default=None), inputs, made[0].unchecked)


def _export_torch(net: gluon.Block, path: Path, sample: Any, check: bool, tolerance: float) -> Exported:
    torch = require("torch", "torch", "export")
    with in_plain_form(net), explained("export", path.parent):
        difference, unchecked = None, "check=False"
        outputs: List[np.ndarray] = []
        if sample is not None:
            arguments = arguments_of("export", net, sample)
            outputs = predict_sample("export", net, arguments)  # decides shapes
        if any(param._data is None for param in net.collect_params().values()):
            raise TrainerError("export: got parameters of unknown shapes and no sample; expected values. Pass sample=X.")
        named = state_of(net)
        state = {key: torch.from_numpy(np.array(value)) for key, (_, value) in named.items()}
        if check and sample is None:
            unchecked = "a translator has no counterpart in PyTorch"
        elif check:
            try:
                graph = trace("export", net, arguments)
                found = run_torch(torch, graph, state, {name: key for key, (name, _) in named.items()})
                difference, unchecked = _compared("torch", found, outputs, tolerance), ""
            except (UnknownLayerError, NotTraceableError) as error:
                unchecked = f"PyTorch's counterpart is not known: {error}"
                logger.warning(
                    "export: %s holds the values of the network, but its forward pass was not checked: %s", path, error
                )
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_file(path) as new:
            torch.save(state, str(new))
    return Exported((path,), difference, {}, unchecked)


def _checked_onnx(graph: ExportGraph, file: Path, axes: OpenAxes, tolerance: float) -> float:
    """Return the largest difference for the sample, and for other sizes of the open axes."""
    difference = _compared("onnx", run_onnx("export", file, graph.inputs), graph.outputs, tolerance)
    if axes.names:
        difference = max(difference, _compared("onnx", run_onnx("export", file, axes.inputs), axes.outputs, tolerance))
    return difference


def _compared(format: str, found: Sequence[np.ndarray], expected: Sequence[np.ndarray], tolerance: float) -> float:
    """Return the largest difference relative to each output's largest value; raise if it exceeds the tolerance."""
    shapes = [", ".join(str(array.shape) for array in arrays) for arrays in (found, expected)]
    if shapes[0] != shapes[1]:
        raise TrainerError(
            f"export: got outputs of the {format} file with shapes {shapes[0]}; expected the network's, {shapes[1]}. Nothing was "
            "written: export with a symbol prefix."
        )
    differences = [_difference(a, b) for a, b in zip(found, expected)]
    largest = float(np.max([0.0, *differences]))  # NaN, if there is one
    if not largest <= tolerance:
        raise TrainerError(
            f"export: got outputs of the {format} file that differ from the network's by {largest:.1e} of their largest value; "
            f"expected at most {tolerance:g}. NaN and infinity count as a difference. Nothing was written: export with a symbol "
            "prefix, or raise the tolerance."
        )
    return largest


def _difference(found: np.ndarray, expected: np.ndarray) -> float:
    if not expected.size:
        return 0.0
    exact = expected.astype("float64")
    with np.errstate(all="ignore"):
        difference, scale = np.abs(found.astype("float64") - exact).max(), np.abs(exact).max()
        return float(difference / max(scale, _SMALLEST)) if difference else 0.0


def _sizes(graph: ExportGraph, axes: OpenAxes) -> Dict[str, Tuple[Union[int, str], ...]]:
    return {
        name: tuple(axes.names.get(name, {}).get(i, size) for i, size in enumerate(value.shape))
        for name, value in graph.inputs.items()
    }


def _check_axes(groups: Any, graph: ExportGraph) -> None:
    known = {(name, axis) for name, value in graph.inputs.items() for axis in range(value.ndim)}
    try:
        unknown = [tuple(one) for group in groups or () for one in group if tuple(one) not in known]
    except TypeError:
        unknown = [groups]
    if unknown:
        sizes = ", ".join(f"{name} {value.shape}" for name, value in graph.inputs.items())
        raise TrainerError(
            f"export: got {short(unknown[0])} in dynamic_axes; expected lists of (input, axis), of {sizes}. Pass for example "
            "[[('data', 0)]]."
        )


def _format_of(path: Path, format: Optional[str]) -> str:
    if format is not None:
        one_of("export", "format", format, FORMATS, advice="None decides by the path.")
        if path.suffix and _SUFFIXES.get(path.suffix, format) != format:
            raise TrainerError(
                f"export: got path={str(path)!r} for the format {format}; expected another suffix than {path.suffix}, which "
                "another format has. Rename it."
            )
        return format
    if path.suffix not in _SUFFIXES:
        raise TrainerError(
            f"export: got path={str(path)!r} with the suffix {path.suffix!r}; expected .onnx, .pt, .pth, or none for a symbol "
            "prefix. Rename it, or pass format=."
        )
    return _SUFFIXES[path.suffix]


def _check_place(path: Path, format: str, is_folder: bool = False) -> None:
    """Raise before any work if the path is a folder."""
    if is_folder or not path.name or (format != "symbol" and path.is_dir()):
        raise TrainerError(f"export: got path={str(path)!r}, which is a folder; expected a file. Pass a name in it.")


def _require(format: str, check: bool) -> None:
    if format == "onnx":
        require("onnx", "onnx", "export")
        if check:
            require("onnxruntime", "onnx", "export")

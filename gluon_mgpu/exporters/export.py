"""Export a network to a format that other programs read, and check the file against the network."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, Optional, Sequence, Tuple, Union

import numpy as np
from mxnet import gluon

from ..checkpoint.replace_folder import explained, new_folder
from ..checkpoint.save_and_load import check_folder
from ..checks import flag, path_of, real_number, short
from ..errors import TrainerError
from ..models import Seq2Seq
from ..models.seq2seq.translator import Translator
from ..mxnet_internals.versions import require_mxnet1
from ..runtime.environment import logger, require
from ..runtime.new_files import new_file
from .export_translator import FILES, graphs_of, write_rest
from .sampled_graph import ExportGraph, Trial, arguments_of, check_exportable, in_plain_form, legacy_mode, trace
from .symbol_files import files_of, run_symbol, write_symbol
from .write_onnx import Group, open_axes, run_onnx, write_onnx

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
    """

    files: Tuple[Path, ...]
    difference: Optional[float] = None
    inputs: Dict[str, Tuple[Union[int, str], ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return a line for the terminal."""
        found = f"largest difference {self.difference:.1e} of the output's largest value" if self.difference is not None else ""
        return f"saved {', '.join(map(str, self.files))}: {found or 'not checked'}"


def export(
    net: gluon.Block,
    path: PathLike,
    sample: Any = None,
    *,
    check: bool = True,
    tolerance: float = TOLERANCE,
    dynamic_axes: Optional[Sequence[Group]] = None,
) -> Exported:
    """Write a network to a file that other programs read, and compare what the file computes with the network.

    - `model.onnx`: ONNX, opset 13, for ONNX Runtime and others; compared in ONNX Runtime.
    - `folder/model`: `model-symbol.json` and `model-0000.params` for `gluon.SymbolBlock.imports`; compared in MXNet.

    The file holds the network in prediction, in float32. An ONNX file takes batches of any size if the network does;
    with recurrent layers, also any number of steps. In a job of several processes, one of them calls it.

    Parameters
    ----------
    net : gluon.Block or Translator
        Initialised, with float32 parameters; hybridized or not. Its shapes may still be unknown. A `Translator` becomes a folder
        with an encoder, a decoder, the vocabularies, and a program that translates with ONNX Runtime alone.
    path : str or pathlib.Path
        Missing folders are created. Existing files are replaced once the new ones are complete and checked.
    sample : array, or tuple of them
        One batch as the network takes it: MXNet or NumPy arrays. A tuple holds one argument each, which may be nested. Of a
        `Translator`, it is not used.
    check : bool
        Compare the file with the network, for the sample and for random values in its range (integers: some of the sample's
        own). Otherwise `onnxruntime` is not required.
    tolerance : float
        The largest difference, divided by the output's largest absolute value.
    dynamic_axes : list of lists of (str, int), optional
        Axes of any size in an ONNX file: each the name of an input and the number of an axis, such as
        `[[("data", 0)], [("data", 2)], [("data", 3)]]` for images of any size. Axes of one list have one size. Inputs are called
        `data`, or `data0`, `data1`, ... By default, the batch, and the steps of recurrent layers, where the network allows it.

    Returns
    -------
    Exported

    Raises
    ------
    TrainerError
        An argument is invalid, a file cannot hold the network, or the outputs differ. No file was written or replaced.
    MissingExtraError
        `onnx` or `onnxruntime` is not installed.
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
        return _export_translator(net, path, check, tolerance)
    if isinstance(net, Seq2Seq):
        raise TrainerError(
            "export: got a Seq2Seq; expected a network that one call runs: a translation takes several. Pass a Translator "
            "with its vocabularies, which becomes encoder and decoder."
        )
    check_exportable(net)
    if sample is None:
        raise TrainerError("export: got no sample; expected one batch, from which shapes are inferred. Pass sample=X.")
    _check_place(path, is_folder)
    if path.suffix:
        _require_onnx(check)
    with in_plain_form(net):
        graph = trace(net, arguments_of(net, sample))
        if not path.suffix:
            return _export_symbol(graph, path, check, tolerance)
        _check_axes(dynamic_axes, graph)
        return _export_onnx(graph, path, check, tolerance, dynamic_axes)


def _export_symbol(graph: ExportGraph, path: Path, check: bool, tolerance: float) -> Exported:
    with explained("export", path.parent), ExitStack() as stack:
        path.parent.mkdir(parents=True, exist_ok=True)
        files = files_of(path)
        new = [stack.enter_context(new_file(file)) for file in files]
        if not graph.is_np:
            stack.enter_context(legacy_mode())
        write_symbol(graph, *new)
        difference = _largest("symbol", run_symbol(graph, *new), graph.trials, tolerance) if check else None
        return Exported(files, difference, {name: value.shape for name, value in graph.inputs.items()})


def _export_onnx(graph: ExportGraph, path: Path, check: bool, tolerance: float, axes: Optional[Sequence[Group]]) -> Exported:
    """Write a graph as an ONNX file with the most open axes that the network and the file allow."""
    with explained("export", path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_file(path) as file:
            choices = open_axes(graph, axes)
            for chosen in filter(None, choices):
                try:
                    write_onnx(graph, file, chosen)
                    trials = [*graph.trials, *chosen.trials]
                    difference = _largest("onnx", run_onnx(file, trials), trials, tolerance) if check else None
                    break
                except TrainerError:
                    if chosen is choices[-1]:
                        raise
    sizes = {name: chosen.sizes(name, value.shape) for name, value in graph.inputs.items()}
    if chosen is not choices[0]:
        logger.warning("export: %s takes inputs of fixed sizes: %s", path, sizes)
    return Exported((path,), difference, sizes)


def _export_translator(translator: Translator, path: Path, check: bool, tolerance: float) -> Exported:
    check_exportable(translator.net)
    _require_onnx(check)
    if path.suffix == ".onnx":
        raise TrainerError(f"export: got path={str(path)!r} for a Translator; expected a folder. Pass one without a suffix.")
    check_folder(path, FILES, "export", "translator")
    with in_plain_form(translator.net), explained("export", path), new_folder(path) as new:
        made = [
            _export_onnx(graph, new / f"{part}.onnx", check, tolerance, axes)
            for part, (graph, axes) in graphs_of(translator.net).items()
        ]
        write_rest(translator, new)
    differences = [one.difference for one in made if one.difference is not None]
    inputs = {name: size for one in made for name, size in one.inputs.items()}
    return Exported(tuple(path / name for name in FILES), max(differences, default=None), inputs)


def _largest(format: str, found: Sequence[Sequence[np.ndarray]], trials: Sequence[Trial], tolerance: float) -> float:
    """Return the largest difference of the trials."""
    return max(_compared(format, one, outputs, tolerance) for one, (_, outputs) in zip(found, trials))


def _compared(format: str, found: Sequence[np.ndarray], expected: Sequence[np.ndarray], tolerance: float) -> float:
    """Return the largest difference relative to each output's largest value; raise if it exceeds the tolerance."""
    shapes = [", ".join(str(array.shape) for array in arrays) for arrays in (found, expected)]
    advice = "export with a symbol prefix, or fewer dynamic_axes" if format == "onnx" else "leave random operators out"
    if shapes[0] != shapes[1]:
        raise TrainerError(
            f"export: got outputs of the {format} file with shapes {shapes[0]}; expected the network's, {shapes[1]}. Nothing was "
            f"written: {advice}."
        )
    largest = float(np.max([0.0, *map(_difference, found, expected)]))  # NaN, if there is one
    if not largest <= tolerance:
        raise TrainerError(
            f"export: got outputs of the {format} file that differ from the network's by {largest:.1e} of their largest value; "
            f"expected at most {tolerance:g}. NaN and infinity count as a difference. Nothing was written: {advice}, or raise "
            "the tolerance."
        )
    return largest


def _difference(found: np.ndarray, expected: np.ndarray) -> float:
    exact = expected.astype("float64")
    with np.errstate(all="ignore"):
        difference, scale = np.abs(found.astype("float64") - exact).max(initial=0), np.abs(exact).max(initial=0)
        return float(difference / max(scale, _SMALLEST)) if difference else 0.0


def _check_axes(groups: Any, graph: ExportGraph) -> None:
    known = {(name, axis) for name, value in graph.inputs.items() for axis in range(value.ndim)}
    try:
        unknown = [tuple(one) for group in groups or () for one in group or [()] if tuple(one) not in known]
    except TypeError:
        unknown = [groups]
    if unknown:
        sizes = ", ".join(f"{name} {value.shape}" for name, value in graph.inputs.items())
        raise TrainerError(
            f"export: got {short(unknown[0])} in dynamic_axes; expected lists of (input, axis), of {sizes}. Pass [[('data', 0)]]."
        )


def _check_place(path: Path, is_folder: bool) -> None:
    """Raise before any work unless the path names an ONNX file or a prefix."""
    if path.suffix not in ("", ".onnx"):
        raise TrainerError(
            f"export: got path={str(path)!r} with the suffix {path.suffix!r}; expected .onnx, or none for a prefix. Rename it."
        )
    if is_folder or not path.name or (path.suffix and path.is_dir()):
        raise TrainerError(f"export: got path={str(path)!r}, which is a folder; expected a file. Pass a name in it.")


def _require_onnx(check: bool) -> None:
    for name in ("onnx", "onnxruntime") if check else ("onnx",):
        require(name, "onnx", "export")

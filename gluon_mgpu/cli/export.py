"""gluon-mgpu export: a trained network in files that other programs read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Tuple

import click
import numpy as np

from ..errors import StateError
from ._options import FOLDER, best_of, positive

if TYPE_CHECKING:
    from mxnet import gluon

PATH = click.Path(path_type=Path)

_ANY_SIZE = [[("data", axis)] for axis in (0, 2, 3)]  # this ResNet-18 ends with a mean over all places


@click.command()
@click.argument("run", type=FOLDER)
@click.option("--onnx", metavar="FILE.onnx", type=PATH, help="ONNX file; of a translator, a folder with encoder and decoder.")
@click.option("--symbol", metavar="PREFIX", type=PATH, help="Files for plain MXNet: PREFIX-symbol.json, PREFIX-0000.params.")
@click.option("--check/--no-check", default=True, help="Compare each file with the network, and remove it if it differs.")
@positive("--tolerance", default=1e-4, help="Largest difference, divided by the output's largest value.")
def export(run: Path, onnx: Optional[Path], symbol: Optional[Path], check: bool, tolerance: float) -> None:
    """Export a trained network, and check the files.

    RUN is a folder of train resnet18 or train seq2seq. The best checkpoint is taken, or last if there is none; RUN may also
    be best or last itself. A translator's folder holds translate.py, which needs ONNX Runtime but no MXNet.
    """
    if onnx is None and symbol is None:
        raise click.UsageError("got no format; expected --onnx or --symbol. Pass one or both of them.")
    from ..checkpoint.replace_folder import recover_path
    from ..exporters.export import export as export_network
    from ..loop.stop_signals import raise_on_sigterm
    from ..models.seq2seq.translator import CONFIG_FILE, load_translator
    from ..runtime.loaded import mxnet as mx

    folder = best_of(run)
    options: Dict[str, Any] = {"check": check, "tolerance": tolerance}
    with raise_on_sigterm("export: stopped"):  # new files are removed
        if (recover_path(folder) / CONFIG_FILE).exists():
            if onnx is None or symbol is not None:
                raise click.UsageError(
                    "got --symbol for a translator; expected --onnx FOLDER. gluon-mgpu translate reads RUN itself."
                )
            click.echo(str(export_network(load_translator(folder, mx.cpu()), onnx, **options)))
            return
        if onnx is not None and onnx.suffix != ".onnx":
            raise click.UsageError(f"got --onnx {onnx}; expected a file with the suffix .onnx. Rename it.")
        net, shape = classifier("export", folder, mx.cpu())
        sample = np.random.RandomState(0).uniform(0, 1, (2, *shape)).astype("float32")
        for path in filter(None, (onnx, symbol)):
            click.echo(str(export_network(net, path, sample, dynamic_axes=_ANY_SIZE if path is onnx else None, **options)))


def classifier(operation: str, folder: Path, ctx: Any) -> Tuple[gluon.Block, Tuple[int, int, int]]:
    """Return the network of a checkpoint of train resnet18, and the shape of an image that it takes."""
    from ..checkpoint.save_and_load import check_parameters, set_parameters
    from ..checkpoint.snapshot import PARAMS, read_content
    from ..models import resnet18

    content = read_content(folder, with_training=False)
    shapes: List[Tuple[int, ...]] = [array.shape for array in content.params.values()] or [()]
    first, last = shapes[0], shapes[-1]
    if len(first) != 4 or len(last) != 1:
        raise StateError(
            f"{operation}: got {folder}, whose {PARAMS} holds another network than ResNet-18; expected a folder of train "
            "resnet18. In Python, build the network and call load_checkpoint, for gluon_mgpu.predict and gluon_mgpu.export."
        )
    net = resnet18(last[0])
    check_parameters(content, net)
    net.initialize(ctx=ctx)
    set_parameters(content, net)
    return net, (first[1], 28, 28)

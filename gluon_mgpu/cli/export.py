"""gluon-mgpu export: a trained network in files that other programs read."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import click
import mxnet as mx
import numpy as np
from mxnet import gluon

from ..checkpoint.atomic_folder import recover_path
from ..checkpoint.checkpoint import check_parameters, set_parameters
from ..checkpoint.snapshot import FILES, PARAMS, read_content
from ..errors import StateError
from ..exporters.export import TOLERANCE
from ..exporters.export import export as export_network
from ..models import resnet18
from ..models.seq2seq.translator import CONFIG_FILE, load_translator
from ._options import FILE, best_of, positive

_ANY_SIZE = [
    [("data", 0)],
    [("data", 2)],
    [("data", 3)],
]  # of the images of this ResNet-18, which ends with a mean over all places


@click.command()
@click.argument("run", type=click.Path(file_okay=False, path_type=Path))
@click.option("--onnx", type=click.Path(path_type=Path), help="ONNX file; of a translator, a folder with encoder and decoder.")
@click.option(
    "--symbol",
    metavar="PREFIX",
    type=click.Path(path_type=Path),
    help="Files for plain MXNet: PREFIX-symbol.json, PREFIX-0000.params.",
)
@click.option("--torch", type=FILE, help="File with PyTorch's state dict.")
@click.option(
    "--check/--no-check", default=True, show_default=True, help="Compare each file with the network, and remove it if it differs."
)
@positive("--tolerance", default=TOLERANCE, show_default=True, help="Largest difference, divided by the output's largest value.")
def export(run: Path, onnx: Optional[Path], symbol: Optional[Path], torch: Optional[Path], check: bool, tolerance: float) -> None:
    """Export the network of RUN, a folder of train resnet18 or train seq2seq, and compare the files with it.

    The best checkpoint is taken, or last if there is none; RUN may also be best or last itself. A translator's folder holds
    translate.py, which needs ONNX Runtime but no MXNet.
    """
    wanted = {name: path for name, path in (("onnx", onnx), ("symbol", symbol), ("torch", torch)) if path is not None}
    if not wanted:
        raise click.UsageError("got no format; expected --onnx, --symbol or --torch. Pass one or more of them.")
    folder = best_of(run, [*FILES, CONFIG_FILE])
    options: Dict[str, Any] = {"check": check, "tolerance": tolerance}
    if (recover_path(folder) / CONFIG_FILE).exists():
        translator = load_translator(folder, mx.cpu())
        for name, path in wanted.items():
            click.echo(str(export_network(translator, path, format=name, **options)))
        return
    net, sample = _classifier(folder)
    for name, path in wanted.items():
        axes = _ANY_SIZE if name == "onnx" else None
        click.echo(str(export_network(net, path, sample, format=name, dynamic_axes=axes, **options)))


def _classifier(folder: Path) -> Tuple[gluon.Block, np.ndarray]:
    """Return the network of a checkpoint of train resnet18, and images of its number of channels."""
    content = read_content(folder, with_training=False)
    shapes: List[Tuple[int, ...]] = [array.shape for array in content.params.values()] or [()]
    first, last = shapes[0], shapes[-1]
    if len(first) != 4 or len(last) != 1:
        raise StateError(
            f"export: got {folder}, whose {PARAMS} holds another network than ResNet-18; expected a folder of train resnet18 or "
            "train seq2seq. Build the network in Python, and call load_checkpoint and gluon_mgpu.export."
        )
    net = resnet18(last[0])
    check_parameters(content, net)
    net.initialize(ctx=mx.cpu())
    set_parameters(content, net)
    return net, np.random.RandomState(0).uniform(0, 1, (2, first[1], 28, 28)).astype("float32")

"""gluon-mgpu predict: classes of images, by a saved network."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any, Dict, Optional

import click
import numpy as np

from ..checkpoint.checkpoint import load_checkpoint
from ..checkpoint.snapshot import FILES
from ..data import ArrayLoader
from ..devices.select import use_devices
from ..loop.predict import predict as run_prediction
from ..models import resnet18
from ._gpus import choosing_gpus
from ._options import best_of
from .train import load_images

_FOLDER = click.Path(file_okay=False, path_type=Path)


@click.group()
def predict() -> None:
    """Predict with a trained network."""


@predict.command("resnet18")
@click.option(
    "--checkpoint",
    type=_FOLDER,
    default=Path("runs/resnet18/best"),
    show_default=True,
    help="Folder of train resnet18, whose best is used; or best or last itself.",
)
@click.option("--devices", default="auto", show_default=True, help="As for train.")
@choosing_gpus
@click.option("--batch-size", type=click.IntRange(1), default=256, show_default=True, help="Images per batch.")
@click.option(
    "--data",
    type=click.Choice(["digits", "mnist", "fashion-mnist"]),
    default="digits",
    show_default=True,
    help="Data set, whose test images are predicted.",
)
@click.option("--data-dir", type=_FOLDER, help="Folder with idx files instead: its test images.")
@click.option(
    "--seed",
    type=click.IntRange(0, 2**31 - 1),
    default=0,
    show_default=True,
    help="The seed of train: it selects the test images if --data-dir has one pair of files.",
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("predictions.csv"),
    show_default=True,
    help="File with one line per image: its number, class, probability and label.",
)
def predict_resnet18(
    checkpoint: Path,
    devices: str,
    choice: Dict[str, Any],
    batch_size: int,
    data: str,
    data_dir: Optional[Path],
    seed: int,
    output: Path,
) -> None:
    """Write the classes of images to a file, in their order."""
    images = load_images(data, data_dir, seed)
    output.parent.mkdir(parents=True, exist_ok=True)  # raises before the prediction if it cannot be created
    with use_devices(devices, **choice) as ctx:
        net = resnet18(images.num_classes)
        net.initialize(ctx=ctx)
        load_checkpoint(best_of(checkpoint, FILES), net)
        net.hybridize(static_alloc=True, static_shape=True)
        scores = run_prediction(net, ArrayLoader(images.test_images, images.test_labels, batch_size), pairs=True, progress=True)
    scores = scores - scores.max(axis=1, keepdims=True)
    odds = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    found = odds.argmax(axis=1)
    with open(output, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "class", "probability", "label"])
        writer.writerows(
            (i, int(k), f"{odds[i, k]:.4f}", int(label)) for i, (k, label) in enumerate(zip(found, images.test_labels))
        )
    right = int((found == images.test_labels).sum())
    print(f"saved {output}: {right} of {len(found)} classes as labelled, {right / len(found):.4f}")

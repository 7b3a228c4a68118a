"""gluon-mgpu predict: classes of images, by a saved network."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any, List, Optional

import click
import numpy as np

from ..errors import DataError
from ._options import FILE, FOLDER, best_of, count, devices_option, image_options, seed_option
from ._output import showing


@click.group()
def predict() -> None:
    """Predict with a trained network."""


@predict.command("resnet18")
@click.option(
    "--checkpoint",
    type=FOLDER,
    default=Path("runs/resnet18/best"),
    help="Folder of train resnet18, whose best is used; or best or last itself.",
)
@image_options
@seed_option(help="The seed of train: it selects the test images if --data-dir has one pair of files.")
@devices_option
@count("--batch-size", default=256, help="Images per batch, over all devices.")
@click.option(
    "--output",
    type=FILE,
    default=Path("predictions.csv"),
    help="File with one line per image: its number, class, probability and label.",
)
def predict_resnet18(
    checkpoint: Path, data: str, data_dir: Optional[Path], seed: int, batch_size: int, output: Path, **choice: Any
) -> None:
    """Write the classes of the test images to a file, in their order."""
    from ..data import ArrayLoader
    from ..devices.select import use_devices
    from ..loop.predict import predict_batches
    from ..runtime.new_files import new_file
    from .export import classifier
    from .train_resnet18 import load_images

    images = load_images(data, data_dir, seed)
    output.parent.mkdir(parents=True, exist_ok=True)  # raises before the prediction if it cannot be created
    scores: List[np.ndarray] = []
    with use_devices(**choice) as ctx, showing("reading the network") as show:
        folder = best_of(checkpoint)
        net, _ = classifier("predict", folder, ctx)
        if images.num_classes > net[-1].weight.shape[0]:  # fewer: not every class must be among the images
            raise DataError(
                f"predict: got the label {images.num_classes - 1} and a network of {net[-1].weight.shape[0]} classes, {folder}; "
                "expected its classes. Check --data-dir."
            )
        net.hybridize(static_alloc=True, static_shape=True)
        loader = ArrayLoader(images.test_images, images.test_labels, batch_size)
        for batch in predict_batches(net, loader, pairs=True, max_inflight=2):  # Ctrl-C waits for those
            scores.append(batch)
            show(f"{sum(map(len, scores))} of {len(images.test_images)} images")
    joined = np.concatenate(scores)
    if not np.isfinite(joined).all():
        raise DataError(f"predict: got scores of {folder} that are not finite; expected numbers. Train it with a lower --lr.")
    odds = np.exp(joined - joined.max(axis=1, keepdims=True))
    odds /= odds.sum(axis=1, keepdims=True)
    found = odds.argmax(axis=1)
    with new_file(output) as new, open(new, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "class", "probability", "label"])
        for number, (chosen, label) in enumerate(zip(found, images.test_labels)):
            writer.writerow([number, chosen, f"{odds[number, chosen]:.4f}", int(label)])
    right = int((found == images.test_labels).sum())
    print(f"saved {output}: {right} of {len(found)} right, {right / len(found):.2%}; with {folder} on {', '.join(map(str, ctx))}")

"""gluon-mgpu train: the training programs."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import median
from typing import Any, Dict, Optional

import click
import mxnet as mx
import numpy as np
from mxnet import gluon, init

from ..callbacks import Checkpoint, Progress, SaveHistory
from ..data import ArrayLoader, ImageData, load_digits, load_fashion_mnist, load_idx_folder, load_mnist
from ..devices import use_devices
from ..fit import fit
from ..models import resnet18
from ..trainer import Trainer

HYBRIDIZE: Dict[str, Optional[Dict[str, bool]]] = {
    "off": None,
    "on": {},
    "static": {"static_alloc": True, "static_shape": True},
}
_FOLDER = click.Path(file_okay=False, path_type=Path)


def _finite(_context: click.Context, _parameter: click.Parameter, number: float) -> float:
    if not math.isfinite(number):
        raise click.BadParameter(f"got {number}; need a finite number.")
    return number


@click.group()
def train() -> None:
    """Train a network."""


@train.command("resnet18")
@click.option(
    "--devices",
    default="auto",
    show_default=True,
    help="auto, gpu, gpu:0,2, gpu:4-7, cpu:2 (two CPU contexts), or a count.",
)
@click.option("--epochs", type=click.IntRange(1), default=8, show_default=True, help="Passes over the training images.")
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    default=64,
    show_default=True,
    help="Images of a batch, over all devices together.",
)
@click.option(
    "--lr",
    callback=_finite,
    type=click.FloatRange(0, min_open=True),
    default=0.1,
    show_default=True,
    help="Highest learning rate: it warms up for an epoch, then falls along a cosine.",
)
@click.option("--optimizer", default="sgd", show_default=True, help="Any optimizer of MXNet's: sgd, nag, adam, ...")
@click.option(
    "--data",
    type=click.Choice(["digits", "mnist", "fashion-mnist"]),
    default="digits",
    show_default=True,
    help="digits needs no network; Gluon downloads the others.",
)
@click.option(
    "--data-dir",
    type=_FOLDER,
    help="Folder with idx files (MNIST's format) to train on instead. With one pair of files, 80% train and 20% test.",
)
@click.option(
    "--output",
    type=_FOLDER,
    default=Path("runs/resnet18"),
    show_default=True,
    help="Folder for curves.png, history.csv, history.json, and the checkpoints best and last.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**31 - 1),
    default=0,
    show_default=True,
    help="Of the weights and of the order of the images.",
)
@click.option(
    "--hybridize",
    type=click.Choice(list(HYBRIDIZE)),
    default="static",
    show_default=True,
    help="Compile the network: not, or with memory kept (static).",
)
def train_resnet18(
    devices: str,
    epochs: int,
    batch_size: int,
    lr: float,
    optimizer: str,
    data: str,
    data_dir: Optional[Path],
    output: Path,
    seed: int,
    hybridize: str,
) -> None:
    """Train ResNet-18 on images of digits or clothes, on several devices.

    The defaults train on scikit-learn's handwritten digits. Ctrl-C stops after the batch under way, and saves.
    """
    images = _load(data, data_dir, seed)
    train_iter = ArrayLoader(images.train_images, images.train_labels, batch_size, shuffle=True, seed=seed)
    test_iter = ArrayLoader(images.test_images, images.test_labels, max(256, batch_size))
    with use_devices(devices) as ctx:  # before anything runs on a device: it settles their threads
        mx.random.seed(seed)
        np.random.seed(seed)
        print(
            f"{images.name}: {len(images.train_images)} images to train on, {len(images.test_images)} to test, "
            f"{images.num_classes} classes, on {', '.join(map(str, ctx))}"
        )
        net = resnet18(images.num_classes)
        net.initialize(init.Xavier(), ctx=ctx)
        options = HYBRIDIZE[hybridize]
        if options is not None:
            net.hybridize(**options)
        trainer = Trainer(net, optimizer, _optimizer_params(lr, len(train_iter), epochs))
        loss = gluon.loss.SoftmaxCrossEntropyLoss()
        callbacks = [Progress("images"), Checkpoint(output), SaveHistory(output)]
        try:
            history = fit(net, loss, trainer, train_iter, test_iter, epochs=epochs, callbacks=callbacks)
        except KeyboardInterrupt as interrupt:
            raise KeyboardInterrupt(f"{interrupt}; what was saved is in {output}") from None
    seconds = median(history.column("seconds"))
    print(f"saved curves.png, history.csv, history.json, best and last in {output}")
    print(f"test accuracy {history.column('test_accuracy')[-1]:.4f}, {seconds:.1f} s/epoch on {', '.join(map(str, ctx))}")


def _load(data: str, data_dir: Optional[Path], seed: int) -> ImageData:
    if data_dir is not None:
        return load_idx_folder(data_dir, seed=seed)
    if data == "digits":
        return load_digits()
    root = str(Path.home() / ".mxnet" / "datasets" / data)
    return load_mnist(root) if data == "mnist" else load_fashion_mnist(root)


def _optimizer_params(lr: float, steps_per_epoch: int, epochs: int) -> Dict[str, Any]:
    warm_up = steps_per_epoch if epochs > 1 else 0
    schedule = mx.lr_scheduler.CosineScheduler(
        max_update=steps_per_epoch * epochs, base_lr=lr, final_lr=0.0, warmup_steps=warm_up, warmup_begin_lr=lr / 10
    )
    return {"learning_rate": lr, "lr_scheduler": schedule}

"""gluon-mgpu train: the training programs."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any, List, Optional

import click
import mxnet as mx
from mxnet import gluon

from ..data import ArrayLoader, ImageData, load_digits, load_fashion_mnist, load_idx_folder, load_mnist
from ..data_parallel.batchnorm import BATCH_NORMS
from ..loop.callbacks import Callback, Checkpoint, Progress, SaveHistory
from ..models import resnet18
from ..runtime.units import format_column
from ._command import RecordedCommand
from ._options import FOLDER, count, devices_option, output_option, positive, seed_option, training_options
from ._output import print_once
from ._pipeline import pipeline_options
from ._training import create_trainer, enable_debugging, prepare_network, prepared_devices, run_fit, split_options


@click.group()
def train() -> None:
    """Train a network."""


@train.command("resnet18", cls=RecordedCommand)
@devices_option
@count("--epochs", default=8, help="Passes over the training images.")
@count("--batch-size", default=64, help="Images per batch, over all devices together.")
@positive("--lr", default=0.1, show_default=True, help="Highest learning rate: it warms up for an epoch, then follows a cosine.")
@click.option("--optimizer", default="sgd", show_default=True, help="Any optimizer of MXNet: sgd, nag, adam, ...")
@click.option(
    "--data",
    type=click.Choice(["digits", "mnist", "fashion-mnist"]),
    default="digits",
    show_default=True,
    help="digits needs no network; Gluon downloads the others.",
)
@click.option(
    "--data-dir",
    type=FOLDER,
    help="Folder with idx files (MNIST's format) to train on instead. With one pair of files, 80% train and 20% test.",
)
@output_option("runs/resnet18", "command.json, curves.png, history.csv, history.json, and the checkpoints best and last")
@seed_option("Seed of the weights and of the order of the images.")
@click.option(
    "--bn",
    type=click.Choice(BATCH_NORMS),
    default="average",
    show_default=True,
    help="BatchNorm's statistics: separate per device (local), averaged to predict and to save, or of the whole batch (sync).",
)
@training_options(hybridize="static", clip_norm=None, precise_layers="convolutions and Dense layers")
@pipeline_options()
def train_resnet18(batch_size: int, data: str, data_dir: Optional[Path], bn: str, **options: Any) -> None:
    """Train ResNet-18 on images of digits or clothes, on several devices.

    The defaults train on scikit-learn's handwritten digits. Ctrl-C and SIGTERM stop after the current batch and save;
    --resume auto resumes.
    """
    shared, _ = split_options(options)
    if shared.debug:
        enable_debugging()
    images = load_images(data, data_dir, shared.seed)
    train_iter = ArrayLoader(images.train_images, images.train_labels, batch_size, shuffle=True, seed=shared.seed)
    test_iter = ArrayLoader(images.test_images, images.test_labels, max(256, batch_size))
    with prepared_devices(shared) as ctx:
        names = ", ".join(map(str, ctx))
        print_once(
            f"{images.name}: {len(images.train_images)} images to train on, {len(images.test_images)} to test, "
            f"{images.num_classes} classes, on {names}"
        )
        net = resnet18(images.num_classes)
        net = prepare_network(net, ctx, shared, train_iter)
        trainer = create_trainer(net, _schedule(shared.lr, len(train_iter), shared.epochs), shared)
        loss = gluon.loss.SoftmaxCrossEntropyLoss()
        callbacks: List[Callback] = [
            Progress("images"),
            Checkpoint(shared.output, **shared.saving),
            SaveHistory(shared.output),
        ]
        history = run_fit(
            net, loss, trainer, train_iter, test_iter, callbacks=callbacks, options=shared, weights=shared.weights, bn=bn
        )
    seconds = median(history.column("seconds"))
    print_once(f"saved curves.png, history.csv, history.json, best and last in {shared.output}")
    print_once(f"{format_column('test_accuracy', history.column('test_accuracy')[-1])}, {seconds:.1f} s/epoch on {names}")


def load_images(data: str, data_dir: Optional[Path], seed: int) -> ImageData:
    """Return the images of `--data` or `--data-dir`."""
    if data_dir is not None:
        return load_idx_folder(data_dir, seed=seed)
    if data == "digits":
        return load_digits()
    root = str(Path.home() / ".mxnet" / "datasets" / data)
    return load_mnist(root) if data == "mnist" else load_fashion_mnist(root)


def _schedule(lr: float, steps_per_epoch: int, epochs: int) -> Any:
    """Return a learning rate that warms up for an epoch, then falls along a cosine."""
    warm_up = steps_per_epoch if epochs > 1 else 0
    return mx.lr_scheduler.CosineScheduler(
        max_update=steps_per_epoch * epochs, base_lr=lr, final_lr=0.0, warmup_steps=warm_up, warmup_begin_lr=lr / 10
    )

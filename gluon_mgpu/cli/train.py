"""gluon-mgpu train: the training programs."""

from __future__ import annotations

import math
import os
from pathlib import Path
from statistics import median
from typing import Any, Dict, Iterable, List, Optional, Union

import click
import mxnet as mx
import numpy as np
from mxnet import gluon, init

from ..data import ArrayLoader, ImageData, load_digits, load_fashion_mnist, load_idx_folder, load_mnist
from ..data_parallel.batchnorm import BATCH_NORMS
from ..data_parallel.debug import run_serially
from ..devices.select import use_devices
from ..loop.callbacks import Callback, Checkpoint, Progress, SaveHistory
from ..loop.fit import fit
from ..loop.stopping import Terminated
from ..models import resnet18
from ..monitor.leaks import LeakCheck
from ..monitor.watchdog import Watchdog
from ..trainer.local_sgd import LocalSGD
from ..trainer.trainer import Trainer
from ._gpus import choosing_gpus
from ._output import tell

HYBRIDIZE: Dict[str, Optional[Dict[str, bool]]] = {
    "off": None,
    "on": {},
    "static": {"static_alloc": True, "static_shape": True},
}
_FOLDER = click.Path(file_okay=False, path_type=Path)


def finite(_context: click.Context, _parameter: click.Parameter, number: Optional[float]) -> Optional[float]:
    """Return an option's number, refused if it is infinite or NaN."""
    if number is not None and not math.isfinite(number):
        raise click.BadParameter(f"got {number}; expected a finite number.")
    return number


def shares(_context: click.Context, _parameter: click.Parameter, text: Optional[str]) -> Union[None, str, List[float]]:
    """Return "auto", or a number for each device."""
    if text is None or text == "auto":
        return text
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"got {text!r}; expected auto, or a number for each device, separated by commas.") from None


def saving(command: Any) -> Any:
    """Give a training program the options that say what is saved, and what it goes on from."""
    every = click.option(
        "--checkpoint-every",
        type=click.IntRange(1),
        help="Save after so many batches, too. By default after each epoch, and when Ctrl-C ends it.",
    )
    keep = click.option(
        "--keep",
        type=click.IntRange(1),
        default=1,
        show_default=True,
        help="How many of the last checkpoints stay.",
    )
    resume = click.option(
        "--resume",
        metavar="auto|FOLDER",
        help="Go on from a checkpoint, with the other options as they were: auto, the latest good one in --output, or from the "
        "beginning where there is none; or its folder.",
    )
    return every(keep(resume(command)))


def check_shares(weights: Union[None, str, List[float]], num_devices: int) -> None:
    """Refuse numbers of --weights that are not one for each device, or make no sense."""
    if isinstance(weights, list):
        if len(weights) != num_devices:
            found = f"{len(weights)} numbers for {num_devices} devices; expected one for each."
        elif not all(0 <= weight < math.inf for weight in weights) or not sum(weights):
            found = f"{', '.join(f'{weight:g}' for weight in weights)}; expected finite numbers of 0 or more, not all 0."
        else:
            return
        raise click.BadParameter(f"got {found}", param_hint="--weights")


@click.group()
def train() -> None:
    """Train a network."""


@train.command("resnet18")
@click.option(
    "--devices",
    default="auto",
    show_default=True,
    help="auto, gpu, gpu:0,2, gpu:4-7, gpu:free (those that nobody uses), gpu:free:2, cpu:2 (two CPU contexts), or a count.",
)
@choosing_gpus
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
    callback=finite,
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
@click.option(
    "--micro-steps",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Parts that a batch is done in, one after the other, for less memory.",
)
@click.option(
    "--clip-norm",
    callback=finite,
    type=click.FloatRange(0, min_open=True),
    help="Largest norm of the gradient; none by default.",
)
@click.option(
    "--clip-value",
    callback=finite,
    type=click.FloatRange(0, min_open=True),
    help="Largest absolute value of an element of the gradient; none by default.",
)
@click.option(
    "--average-every",
    type=click.IntRange(1),
    help="Train the devices apart, and average their weights after so many steps (local SGD). By default gradients are summed "
    "at each step.",
)
@click.option(
    "--precision",
    type=click.Choice(["fp32", "bf16", "fp16"]),
    default="fp32",
    show_default=True,
    help="What convolutions and Dense layers compute in: bf16 on CPUs with AVX-512, fp16 on GPUs.",
)
@click.option(
    "--bn",
    type=click.Choice(BATCH_NORMS),
    default="average",
    show_default=True,
    help="BatchNorm's statistics: each device's own, averaged to predict and to save, or the whole batch's.",
)
@click.option(
    "--weights",
    callback=shares,
    help="How batches are shared out: auto, as fast as each device is; or numbers, 3,1. By default evenly.",
)
@saving
@click.option("--debug", is_flag=True, help="One operation after another; every layer, label and index looked at. Slow.")
@click.option(
    "--watchdog",
    callback=finite,
    type=click.FloatRange(0, min_open=True),
    help="Seconds without a step after which every thread is shown.",
)
@click.option("--leak-check", is_flag=True, help="Say at the end whether memory grows with the steps.")
def train_resnet18(
    devices: str,
    choice: Dict[str, Any],
    epochs: int,
    batch_size: int,
    lr: float,
    optimizer: str,
    data: str,
    data_dir: Optional[Path],
    output: Path,
    seed: int,
    hybridize: str,
    micro_steps: int,
    clip_norm: Optional[float],
    clip_value: Optional[float],
    average_every: Optional[int],
    precision: str,
    bn: str,
    weights: Any,
    checkpoint_every: Optional[int],
    keep: int,
    resume: Optional[str],
    debug: bool,
    watchdog: Optional[float],
    leak_check: bool,
) -> None:
    """Train ResNet-18 on images of digits or clothes, on several devices.

    The defaults train on scikit-learn's handwritten digits. Ctrl-C and SIGTERM stop after the batch under way, and save;
    --resume auto goes on.
    """
    if debug:
        os.environ["GLUON_MGPU_DEBUG"] = "1"  # fit asks
        run_serially()
    images = load_images(data, data_dir, seed)
    train_iter = ArrayLoader(images.train_images, images.train_labels, batch_size, shuffle=True, seed=seed)
    test_iter = ArrayLoader(images.test_images, images.test_labels, max(256, batch_size))
    with use_devices(devices, **choice) as ctx:  # before anything runs on a device: it settles their threads
        check_shares(weights, len(ctx))
        mx.random.seed(seed)
        np.random.seed(seed)
        tell(
            f"{images.name}: {len(images.train_images)} images to train on, {len(images.test_images)} to test, "
            f"{images.num_classes} classes, on {', '.join(map(str, ctx))}"
        )
        net = resnet18(images.num_classes)
        net.initialize(init.Xavier(), ctx=ctx)
        how = HYBRIDIZE[hybridize]
        if how is not None:
            net.hybridize(**how)
        params = _optimizer_params(lr, len(train_iter), epochs)
        more: Dict[str, Any] = {"clip_norm": clip_norm, "clip_value": clip_value, "precision": precision}
        if average_every is None:
            trainer = Trainer(net, optimizer, params, **more)
        else:
            trainer = LocalSGD(net, optimizer, params, every=average_every, **more)
        loss = gluon.loss.SoftmaxCrossEntropyLoss()
        checkpoint = Checkpoint(output, every=checkpoint_every, keep=keep, background=True)
        callbacks: List[Callback] = [Progress("images"), checkpoint, SaveHistory(output)]
        check = LeakCheck() if leak_check else None
        callbacks += [check] if check else []
        tests: Iterable[Any] = test_iter
        if watchdog is not None:
            dog = Watchdog(watchdog)
            callbacks.append(dog)
            tests = dog.watch(test_iter)
        options: Dict[str, Any] = {
            "epochs": epochs,
            "callbacks": callbacks,
            "micro_steps": micro_steps,
            "weights": weights,
            "bn": bn,
            "resume": resume,
        }
        try:
            history = fit(net, loss, trainer, train_iter, tests, **options)
        except (KeyboardInterrupt, Terminated) as interrupt:
            raise type(interrupt)(f"{interrupt}; --resume auto goes on; what was saved is in {output}") from None
    if check is not None:
        tell(check.report())
    seconds = median(history.column("seconds"))
    tell(f"saved curves.png, history.csv, history.json, best and last in {output}")
    tell(f"test accuracy {history.column('test_accuracy')[-1]:.4f}, {seconds:.1f} s/epoch on {', '.join(map(str, ctx))}")


def load_images(data: str, data_dir: Optional[Path], seed: int) -> ImageData:
    """Return the images that `--data` and `--data-dir` ask for."""
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

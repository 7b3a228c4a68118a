"""The program of gluon-mgpu train resnet18."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, Callable, List, Optional, Sequence

import click

from ..checkpoint.resume import num_batches_of
from ..data import ArrayLoader, ImageData, load_digits, load_fashion_mnist, load_idx_folder, load_mnist
from ..data_parallel.sharding import plan_shards, split_batch
from ..errors import DataError
from ..loop.callbacks import Progress, SaveHistory
from ..loop.epoch_loop import Limits
from ..loop.save_checkpoints import Checkpoint
from ..loop.trace import Trace
from ..models import resnet18
from ..plots import plot_schedule, plot_trace, save
from ..runtime.loaded import mxnet as mx
from ..runtime.units import format_column
from ._output import print_once
from ._training import create_trainer, in_processes, is_divided, prepare_network, prepared_devices, run_fit


def train(options: SimpleNamespace) -> None:
    """Train ResNet-18 with the options of `train resnet18`."""
    images = load_images(options.data, options.data_dir, options.seed)
    if images.num_classes < 2:
        raise DataError("train resnet18: got labels of one class; expected two or more. Check the files of labels.")
    batch_size = options.batch_size
    train_iter = ArrayLoader(images.train_images, images.train_labels, batch_size, shuffle=True, seed=options.seed)
    test_iter = ArrayLoader(images.test_images, images.test_labels, max(256, batch_size))
    title = (
        f"{images.name}: {len(images.train_images)} images to train on, {len(images.test_images)} to test, "
        f"{images.num_classes} classes"
    )
    loss = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    train_network(lambda ctx: (resnet18(images.num_classes), loss, train_iter, test_iter), options, title=title, unit="images")


def train_network(make: Callable[[List[mx.Context]], Sequence[Any]], options: SimpleNamespace, *, title: str, unit: str) -> None:
    """Train what `make(ctx)` returns: a network, a loss, data to train on and, or None, to test on."""
    with prepared_devices(options) as ctx:
        net, loss, train_iter, test_iter = make(ctx)
        names = ", ".join(map(str, ctx))
        print_once(f"{title}, on {names}{in_processes()}")
        if isinstance(net, mx.gluon.HybridBlock):
            net.hybridize(static_alloc=True, static_shape=True)
        net = prepare_network(net, ctx, options, train_iter)
        limits = Limits(options.max_steps, options.limit_batches)
        steps_per_epoch = limits.num_batches(num_batches_of(train_iter))
        most = steps_per_epoch * options.epochs or options.max_steps or 0
        steps = min(most, options.max_steps or most)
        least = Trace("trace.json").warm_up + 1
        if options.trace is not None and options.resume is None and 0 < steps <= least:
            raise click.UsageError(
                f"got --trace with {steps} steps; expected more than {least}, as it records the steps from {least} on. Raise "
                "--epochs or --limit-batches."
            )
        warmup_steps = steps_per_epoch if steps > steps_per_epoch else 0
        trainer = create_trainer(net, options.optimizer, options, steps=steps, warmup_steps=warmup_steps)
        trace = None if options.trace is None else Trace(options.trace)
        checkpoint = Checkpoint(options.output, keep=options.keep, every=options.checkpoint_every, background=True)
        plan_shards(1, len(trainer.contexts), options.weights)  # raises on weights for other devices
        history = run_fit(
            net,
            loss,
            trainer,
            train_iter,
            test_iter,
            options=options,
            callbacks=[Progress(unit), checkpoint, SaveHistory(options.output)],
            trace=trace,
            split_f=split_batch if options.weights is None else partial(split_batch, weights=options.weights),
            bn=options.bn,
            micro_steps=options.micro_steps,
            max_steps=options.max_steps,
            evaluate_every=options.evaluate_every,
        )
    if trace is not None and trace.summary is not None:
        print_once(f"trace: {trace.summary}\n{_draw(trace.summary.path, is_divided(options))}")
    seconds, row = median(history.column("seconds")), history.rows[-1]
    result = next(name for name in ("test_accuracy", "test_loss", "train_accuracy", "train_loss") if name in row)
    saved = [name for name in ("curves.png", "history.csv", "history.json", "best", "last") if (options.output / name).exists()]
    print_once(f"saved {', '.join(saved[:-1])} and {saved[-1]} in {options.output}")
    print_once(f"{format_column(result, row[result])}, {seconds:.1f} s/epoch on {names}")


def load_images(data: str, data_dir: Optional[Path], seed: int) -> ImageData:
    """Return the images of `--data` or `--data-dir`."""
    if data_dir is not None:
        return load_idx_folder(data_dir, seed=seed)
    if data == "digits":
        return load_digits()
    root = str(Path.home() / ".mxnet" / "datasets" / data)
    return load_mnist(root) if data == "mnist" else load_fashion_mnist(root)


def _draw(trace: Path, has_stages: bool) -> str:
    """Draw a trace, and return a line that says where."""
    picture, schedule = trace.with_suffix(".png"), trace.with_name(f"{trace.stem}-schedule.png")
    save(plot_trace(trace), picture)
    if has_stages:
        save(plot_schedule(trace), schedule)
    also = f", and the schedule in {schedule}" if has_stages else ""
    return f"drawn in {picture}{also}; https://ui.perfetto.dev shows the file"

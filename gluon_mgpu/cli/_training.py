"""The parts that the training programs share: devices, network, trainer, callbacks, and the call of `fit`."""

from __future__ import annotations

import math
import os
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, NoReturn, Optional, Sequence, Tuple, Union

import click
import mxnet as mx
from mxnet import gluon, init

from ..data_parallel.debug import run_serially
from ..devices.select import use_devices
from ..loop.callbacks import Callback
from ..loop.fit import fit
from ..loop.history import History
from ..loop.recording import TensorBoard
from ..loop.stopping import Terminated
from ..loop.trace import Trace
from ..monitor.leaks import LeakCheck
from ..monitor.watchdog import Watchdog
from ..plots import plot_schedule, plot_trace, save
from ..runtime.determinism import seed_everything
from ..trainer.local_sgd import LocalSGD
from ..trainer.trainer import Trainer
from ._command import SaveCommand
from ._options import HYBRIDIZE
from ._output import print_once
from ._pipeline import check_stages, divided, is_divided, num_replicas, number_of


@dataclass(frozen=True)
class FitExtras:
    """What another command adds to the call of `fit` in a training program: it passes this as click's `obj`.

    Attributes
    ----------
    callbacks : callable (list of Callback) -> list of Callback
        Returns the callbacks to use instead of the program's.
    options : dict
        Further arguments of `fit`.
    instead : callable, optional
        Called instead of `fit` with its net, loss, trainer, train_iter and options; it raises.
    """

    callbacks: Callable[[List[Callback]], List[Callback]] = list
    options: Dict[str, Any] = field(default_factory=dict)
    instead: Optional[Callable[..., NoReturn]] = None


@dataclass(frozen=True)
class TrainingOptions:
    """The command-line options that the training programs share; see `training_options`."""

    devices: str
    choice: Dict[str, Any]
    epochs: int
    lr: float
    optimizer: str
    output: Path
    seed: int
    hybridize: str
    compiled: str
    micro_steps: int
    clip_norm: Optional[float]
    clip_value: Optional[float]
    average_every: Optional[int]
    shard_optimizer: bool
    virtual_shards: Optional[int]
    check_replicas_every: Optional[int]
    precision: str
    weights: Union[None, str, List[float]]
    checkpoint_every: Optional[int]
    keep: int
    resume: Optional[str]
    resume_schedule: str
    deterministic: bool
    debug: bool
    tensorboard: bool
    trace: Optional[Path]
    watchdog: Optional[float]
    leak_check: bool
    parallel: Optional[str]
    stages: Optional[int]
    micro_batches: Optional[int]
    pipeline_schedule: Optional[str]
    recompute: bool

    @property
    def saving(self) -> Dict[str, Any]:
        """Options of a `Checkpoint`."""
        return {"every": self.checkpoint_every, "keep": self.keep, "background": True}


def split_options(options: Dict[str, Any]) -> Tuple[TrainingOptions, Dict[str, Any]]:
    """Return the shared options, and those of one program."""
    shared = {field.name: options[field.name] for field in fields(TrainingOptions)}
    return TrainingOptions(**shared), {name: value for name, value in options.items() if name not in shared}


def enable_debugging() -> None:
    """Let `fit` check everything: for `--debug`, before anything runs on a device."""
    os.environ["GLUON_MGPU_DEBUG"] = "1"  # fit reads it
    run_serially()


@contextmanager
def prepared_devices(options: TrainingOptions) -> Iterator[List[mx.Context]]:
    """Yield the devices that the options select, and seed all random generators."""
    if options.deterministic and options.weights == "auto":
        raise click.BadParameter("got auto with --deterministic; expected numbers: speeds differ.", param_hint="--weights")
    one_thread = options.virtual_shards is not None
    # before anything runs on a device: it sets their threads
    with use_devices(options.devices, **options.choice, one_thread=one_thread) as ctx:
        check_stages(options, len(ctx))
        _check_weights(options.weights, num_replicas(options, ctx), "replica" if is_divided(options) else "device")
        seed_everything(options.seed, deterministic=options.deterministic)
        yield ctx


def prepare_network(
    net: gluon.Block, ctx: Sequence[mx.Context], options: TrainingOptions, train_iter: Iterable[Any], batch_axis: Any = 0
) -> gluon.Block:
    """Initialise a network on the devices, and compile it as `--hybridize` says. Return it, or its pipeline."""
    net.initialize(init.Xavier(), ctx=ctx[0] if is_divided(options) else list(ctx))
    flags = HYBRIDIZE[options.hybridize]
    if flags is not None:
        net.hybridize(**flags)
    return divided(net, ctx, options, train_iter, batch_axis) if is_divided(options) else net


def create_trainer(net: gluon.Block, schedule: Any, options: TrainingOptions) -> Trainer:
    """Return the trainer: `LocalSGD` with `--average-every`."""
    params = {"learning_rate": options.lr, "lr_scheduler": schedule}
    more: Dict[str, Any] = {
        "clip_norm": options.clip_norm,
        "clip_value": options.clip_value,
        "precision": options.precision,
        "shard_optimizer": options.shard_optimizer,
        "virtual_shards": options.virtual_shards,
        "check_replicas_every": options.check_replicas_every,
    }
    if options.average_every is None:
        return Trainer(net, options.optimizer, params, **more)
    return LocalSGD(net, options.optimizer, params, every=options.average_every, **more)


def run_fit(
    net: gluon.Block,
    loss: Any,
    trainer: Trainer,
    train_iter: Iterable[Any],
    test_iter: Iterable[Any],
    *,
    callbacks: Sequence[Callback],
    options: TrainingOptions,
    **more: Any,
) -> History:
    """Call `fit` with these callbacks and those of `--watchdog`, `--leak-check` and `--trace`, and return the history."""
    extras = click.get_current_context().find_object(FitExtras)
    if extras is not None and extras.instead is not None:
        extras.instead(net, loss, trainer, train_iter, compiled=options.compiled, **more)
    callbacks = [*callbacks, *([SaveCommand(options.output)] if extras is None else [])]
    if options.tensorboard:
        callbacks.append(TensorBoard(options.output / "tensorboard"))
    leak_check = LeakCheck() if options.leak_check else None
    if leak_check is not None:
        callbacks.append(leak_check)
    if options.watchdog is not None:
        watchdog = Watchdog(options.watchdog)
        callbacks.append(watchdog)
        test_iter = watchdog.watch(test_iter)
    if extras is not None:
        callbacks, more = extras.callbacks(callbacks), {**more, **extras.options}
    shared = ("epochs", "micro_steps", "compiled", "resume", "resume_schedule")
    trace = None if options.trace is None else Trace(options.trace)
    common: Dict[str, Any] = {"trace": trace, **{name: getattr(options, name) for name in shared}}
    try:
        history = fit(net, loss, trainer, train_iter, test_iter, callbacks=callbacks, **common, **more)
    except (KeyboardInterrupt, Terminated) as interrupt:
        raise type(interrupt)(f"{interrupt}; checkpoints are in {options.output}; resume with --resume auto") from None
    if history.stopped:
        print_once(f"stopped: {history.stopped}")
    if leak_check is not None:
        print_once(leak_check.report())
    if trace is not None and trace.summary is not None:
        picture = trace.summary.path.with_suffix(".png")
        save(plot_trace(trace.summary.path), picture)
        drawn = str(picture)
        if is_divided(options):
            schedule = picture.with_name(f"{picture.stem}-schedule.png")
            save(plot_schedule(trace.summary.path), schedule)
            drawn += f", and the schedule in {schedule}"
        print_once(f"trace: {trace.summary}\ndrawn in {drawn}; https://ui.perfetto.dev shows the file")
    return history


def _check_weights(weights: Union[None, str, List[float]], num_parts: int, part: str) -> None:
    """Raise unless the numbers of `--weights` are valid, one for each part of a batch."""
    if isinstance(weights, list):
        if len(weights) != num_parts:
            found = f"{number_of(len(weights), 'number')} for {number_of(num_parts, part)}; expected one for each."
        elif not all(0 <= weight < math.inf for weight in weights) or not sum(weights):
            found = f"{', '.join(f'{weight:g}' for weight in weights)}; expected finite numbers of 0 or more, not all 0."
        else:
            return
        raise click.BadParameter(f"got {found}", param_hint="--weights")

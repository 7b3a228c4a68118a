"""The parts that the training programs share: devices, network or pipeline, trainer, and the call of `fit`."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Iterable, Iterator, List, Sequence

import click

from ..checkpoint.random_state import random_state, set_random_state
from ..data_parallel.sharding import split_data
from ..devices import select
from ..distributed.process import this_process
from ..loop.fit import fit
from ..loop.history import History
from ..loop.stop_signals import Terminated
from ..mxnet_internals.parameters import has_values, is_open
from ..mxnet_internals.versions import move_params
from ..nested import num_bytes
from ..pipeline.pipeline import Pipeline
from ..pipeline.split import split_stages
from ..runtime import environment
from ..runtime.determinism import seed_everything
from ..runtime.loaded import mxnet as mx
from ..runtime.units import format_bytes
from ..trainer.precision import set_precision
from ..trainer.trainer import Trainer
from ._output import print_once


@contextmanager
def prepared_devices(options: SimpleNamespace) -> Iterator[List[mx.Context]]:
    """Yield the devices that the options select, and seed all random generators."""
    # before anything runs on a device: it sets their threads
    one_thread = options.virtual_shards is not None
    with select.use_devices(options.spec, min_free_memory=options.min_free_memory, one_thread=one_thread) as ctx:
        check_stages(options, len(ctx))
        if len(ctx) == 1:
            environment.set_one_context()
        seed_everything(options.seed)
        yield ctx


def prepare_network(
    net: mx.gluon.HybridBlock, ctx: Sequence[mx.Context], options: SimpleNamespace, train_iter: Iterable[Any]
) -> mx.gluon.Block:
    """Initialise a network on the devices, or move it there. Return it, or its pipeline."""
    where = ctx[0] if is_divided(options) else list(ctx)
    params = net.collect_params()
    if any(has_values(param) or is_open(param) for param in params.values()):
        move_params(params, where)
    else:
        net.initialize(mx.init.Xavier(), ctx=where)
    return divided(net, ctx, options, train_iter) if is_divided(options) else net


def create_trainer(
    net: mx.gluon.Block, optimizer: str, options: SimpleNamespace, *, steps: int, warmup_steps: int, **more: Any
) -> Trainer:
    """Return the trainer. Its learning rate warms up, then falls along a cosine; it is constant if steps is 0: unknown."""
    begin = {"base_lr": options.lr, "warmup_steps": warmup_steps, "warmup_begin_lr": options.lr / 10}
    schedule = mx.lr_scheduler.CosineScheduler(max_update=max(2, steps), final_lr=0.0, **begin) if steps else None
    params = {"learning_rate": options.lr, "lr_scheduler": schedule}
    return Trainer(net, optimizer, params, precision=options.precision, virtual_shards=options.virtual_shards, **more)


def run_fit(*arguments: Any, options: SimpleNamespace, **more: Any) -> History:
    """Call `fit` and return the history; an interruption names the folder of the checkpoints."""
    try:
        more.update(limit_batches=options.limit_batches, limit_eval_batches=options.limit_batches)
        history = fit(*arguments, epochs=options.epochs, resume=options.resume, **more)
    except (KeyboardInterrupt, Terminated) as interrupt:
        if not str(interrupt):  # at once, after a second signal: nothing was saved
            raise
        raise type(interrupt)(f"{interrupt}; checkpoints are in {options.output}; resume with --resume auto") from None
    if history.stopped:
        print_once(f"stopped: {history.stopped}")
    return history


def in_processes() -> str:
    """Return the number of processes that train together, for a line that names their devices; nothing for a single one."""
    number = this_process().num_processes
    return f" in each of {number} processes" if number > 1 else ""


def is_divided(options: Any) -> bool:
    """Return whether the options divide the network over devices."""
    return options.stages is not None or options.parallel not in (None, "data")


def check_stages(options: Any, num_devices: int) -> None:
    """Raise `click.UsageError` unless the options fit each other and the devices."""
    if options.parallel == "data" and options.stages is not None:
        raise click.UsageError("got --stages with --parallel data; expected one of them. Use --parallel model.")
    if not is_divided(options):
        if options.micro_batches:
            raise click.UsageError("got --micro-batches without --stages; expected both. Add --stages 2, or leave it out.")
    elif options.stages is not None and num_devices % options.stages and (num_devices == 1 or options.stages % num_devices):
        multiple = -(-num_devices // options.stages) * options.stages
        raise click.BadParameter(
            f"got {options.stages} stages for --devices of {num_devices}; expected a multiple of {options.stages} "
            "devices, one for each stage of each replica, or stages that are a multiple of the devices. Choose "
            f"{multiple} with --devices, or other stages.",
            param_hint="--stages",
        )


def num_replicas(options: Any, ctx: Sequence[mx.Context]) -> int:
    """Return the number of copies of the network: each takes its part of a batch."""
    return max(1, len(ctx) // (options.stages or len(ctx))) if is_divided(options) else len(ctx)


def divided(net: mx.gluon.Block, ctx: Sequence[mx.Context], options: Any, train_iter: Iterable[Any]) -> Pipeline:
    """Return the pipeline of a network that is initialised on the first device, and print where its stages are."""
    stages, replicas, processes = options.stages or len(ctx), num_replicas(options, ctx), this_process().num_processes
    micro_batches = options.micro_batches or 4 * stages
    generators = random_state()  # and the iterator, which is copied, stay as they are
    sample = split_data(next(iter(copy.copy(train_iter)))[0], replicas * processes * micro_batches, even_split=False)[0]
    set_random_state(generators)
    set_precision(net, options.precision)
    shared = net.data_parallel_layers() if options.parallel == "hybrid" else ()
    parts = split_stages(net, stages, sample, data_parallel=shared)
    placed = [[ctx[(begin + stage) % len(ctx)] for stage in range(stages)] for begin in range(0, replicas * stages, stages)]
    pipeline = Pipeline(parts, placed, micro_batches)
    print_once(_description(pipeline))
    return pipeline


def _description(pipeline: Pipeline) -> str:
    """Return a line that says where each stage is, and how large."""
    found: List[str] = []
    costs = pipeline.stages.costs
    for number, cost in enumerate(costs):
        end = None if number + 1 == len(costs) else number + 1  # a shared last part is on all devices from there on
        names = " and ".join(str(device) for devices in pipeline.devices for device in devices[number:end])
        params = pipeline.stages[number].params()
        size = format_bytes(sum(map(num_bytes, params)))
        found.append(f"{names} {len(params)} parameters of {size}, {cost / (sum(costs) or 1):.0%} of the time")
    hybrid = ", of which all devices share the last" if pipeline.num_parts > 1 else ""
    how = f"{len(costs)} stages{hybrid}, {pipeline.micro_batches} micro-batches, {pipeline.schedule}"
    return f"pipeline of {how}: {'; '.join(found)}"

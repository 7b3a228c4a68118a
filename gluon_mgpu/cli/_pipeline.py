"""Options of the training programs that divide the network over devices, and the pipeline that they ask for."""

from __future__ import annotations

import copy
from typing import Any, Callable, Iterable, List, Sequence

import click
import mxnet as mx
from mxnet import gluon

from ..data_parallel.sharding import split_data
from ..distributed.process import this_process
from ..nested import num_bytes
from ..pipeline.network import Pipeline
from ..pipeline.schedule import SCHEDULES
from ..pipeline.split import split_stages
from ..runtime.units import format_bytes
from ..trainer.precision import set_precision
from ._options import all_of
from ._output import print_once

_MICRO_BATCHES = 4  # for each stage, by default


def pipeline_options(*parallel: str) -> Callable[[Any], Any]:
    """Return `--parallel`, with these values besides data and model, `--stages`, and the options that belong to it."""
    hybrid = "; hybrid: divide all but attention and output layer, of which each device takes its part of the batch"
    return all_of(
        click.option(
            "--parallel",
            type=click.Choice(["data", "model", *parallel]),
            help="data, the default: each device holds the network and takes a part of the batch; model: divide the network over "
            f"the devices{hybrid if parallel else ''}.",
        ),
        click.option(
            "--stages",
            type=click.IntRange(1),
            help="Divide the network into this many stages of about equal time, by default one for each device with --parallel "
            "model. 4 devices with 2 stages hold the network twice; 2 devices with 4 stages hold two stages each, in turn.",
        ),
        click.option(
            "--micro-batches",
            type=click.IntRange(1),
            help=f"Parts of a batch that follow one another through the stages; {_MICRO_BATCHES} for each stage by default.",
        ),
        click.option(
            "--pipeline-schedule",
            type=click.Choice(SCHEDULES),
            help="Order of the stages' passes: 1f1b, the default, holds the activations of fewer micro-batches than gpipe.",
        ),
        click.option(
            "--recompute",
            is_flag=True,
            help="With --stages: compute activations again for the backward pass instead of holding them. Slower.",
        ),
    )


def is_divided(options: Any) -> bool:
    """Return whether the options divide the network over devices."""
    return options.stages is not None or options.parallel not in (None, "data")


def check_stages(options: Any, num_devices: int) -> None:
    """Raise `click.UsageError` unless the options fit each other and the devices."""
    if options.parallel == "data" and options.stages is not None:
        raise click.UsageError("got --stages with --parallel data; expected one of them. Use --parallel model.")
    if not is_divided(options):
        given = {
            "--micro-batches": options.micro_batches,
            "--pipeline-schedule": options.pipeline_schedule,
            "--recompute": options.recompute,
        }
        for name, value in given.items():
            if value:
                raise click.UsageError(f"got {name} without --stages; expected both. Add --stages 2, or leave {name} out.")
    elif options.stages is not None and num_devices % options.stages and (num_devices == 1 or options.stages % num_devices):
        multiple = -(-num_devices // options.stages) * options.stages
        raise click.BadParameter(
            f"got {options.stages} stages for {number_of(num_devices, 'device')}; expected a multiple of {options.stages} "
            "devices, one for each stage of each replica, or stages that are a multiple of the devices. Choose "
            f"{multiple} with --devices, or other stages.",
            param_hint="--stages",
        )


def number_of(count: int, noun: str) -> str:
    """Return a number with its noun.

    Examples
    --------
    >>> number_of(1, "device"), number_of(2, "device")
    ('1 device', '2 devices')
    """
    return f"{count} {noun}{'s' * (count != 1)}"


def num_replicas(options: Any, ctx: Sequence[mx.Context]) -> int:
    """Return the number of copies of the network: each takes its part of a batch."""
    return max(1, len(ctx) // _num_stages(options, ctx)) if is_divided(options) else len(ctx)


def _num_stages(options: Any, ctx: Sequence[mx.Context]) -> int:
    return options.stages or len(ctx)


def divided(net: gluon.Block, ctx: Sequence[mx.Context], options: Any, train_iter: Iterable[Any], batch_axis: Any) -> Pipeline:
    """Return the pipeline of a network that is initialised on the first device, and print where its stages are.

    Parameters
    ----------
    net : gluon.Block
    ctx : list of mxnet.Context
        Replica by replica.
    options : TrainingOptions
    train_iter : iterable of (X, y)
        Its first batch is read from a copy, so that it stays as it is.
    batch_axis : int or nested ints
        That of its features.
    """
    stages, replicas, processes = _num_stages(options, ctx), num_replicas(options, ctx), this_process().num_processes
    micro_batches = options.micro_batches or _MICRO_BATCHES * stages
    X = next(iter(copy.copy(train_iter)))[0]
    sample = split_data(X, replicas * processes * micro_batches, batch_axis, even_split=False)[0]
    set_precision(net, options.precision)
    shared = net.data_parallel_layers() if options.parallel == "hybrid" else ()
    parts = split_stages(net, stages, sample, data_parallel=shared)
    placed = [[ctx[(begin + stage) % len(ctx)] for stage in range(stages)] for begin in range(0, replicas * stages, stages)]
    pipeline = Pipeline(parts, placed, micro_batches, options.pipeline_schedule or SCHEDULES[0], options.recompute)
    print_once(_description(pipeline))
    return pipeline


def _description(pipeline: Pipeline) -> str:
    """Return a line that says where each stage is, and how large."""
    found: List[str] = []
    costs = pipeline.stages.costs
    for number, cost in enumerate(costs):
        params = pipeline.stages[number].params()
        own = [
            device
            for devices in pipeline.devices
            for device in devices[number : None if number + 1 == len(costs) else number + 1]
        ]
        size = format_bytes(sum(map(num_bytes, params)))
        found.append(
            f"{' and '.join(map(str, own))} {len(params)} parameters of {size}, {cost / (sum(costs) or 1):.0%} of the time"
        )
    hybrid = ", of which all devices share the last" if pipeline.num_parts > 1 else ""
    how = f"{len(costs)} stages{hybrid}, {pipeline.micro_batches} micro-batches, {pipeline.schedule}"
    return f"pipeline of {how}{', recompute' * pipeline.recompute}: {'; '.join(found)}"

"""Options of the programs that choose GPUs."""

from __future__ import annotations

import functools
from typing import Any, Callable, Optional

import click


def choosing_gpus(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a program the options that say which GPUs will do; it gets them as `choice`, which `use_devices` takes.

    What is waited for and what was taken is printed to standard error.
    """

    @functools.wraps(command)
    def run(*args: Any, min_free_memory: Optional[str], wait_for_gpu: Optional[float], **given: Any) -> Any:
        choice = {"min_free_memory": min_free_memory, "wait_s": wait_for_gpu, "tell": _tell}
        return command(*args, choice=choice, **given)

    memory = click.option(
        "--min-free-memory",
        metavar="SIZE",
        help="8GiB, for one: memory that must be free on each GPU. auto and a count choose among those that have it.",
    )
    wait = click.option(
        "--wait-for-gpu",
        type=click.FloatRange(0, 1e9),
        metavar="SECONDS",
        help="Wait until the GPUs are free, so long at most; auto waits for one.",
    )
    return memory(wait(run))


def _tell(line: str) -> None:
    click.echo(line, err=True)

"""Options that choose GPUs."""

from __future__ import annotations

import functools
from typing import Any, Callable, Optional

import click


def choosing_gpus(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that choose GPUs to a program, which receives them as `choice`, the arguments of `use_devices`.

    Progress lines about waiting and about the chosen GPUs go to standard error.
    """

    @functools.wraps(command)
    def run(*args: Any, min_free_memory: Optional[str], wait_for_gpu: Optional[float], **options: Any) -> Any:
        choice = {"min_free_memory": min_free_memory, "wait_s": wait_for_gpu, "tell": _print_line}
        return command(*args, choice=choice, **options)

    memory = click.option(
        "--min-free-memory",
        metavar="SIZE",
        help="Memory that must be free on each GPU, such as 8GiB. auto and a count choose among GPUs that have it.",
    )
    wait = click.option(
        "--wait-for-gpu",
        type=click.FloatRange(0, 1e9),
        metavar="SECONDS",
        help="Wait at most this long until the GPUs are free; auto waits for one.",
    )
    return memory(wait(run))


def _print_line(line: str) -> None:
    click.echo(line, err=True)

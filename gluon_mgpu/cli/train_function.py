"""The program of gluon-mgpu train FILE.py:FUNCTION."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any, List, Sequence

from ..errors import TrainerError
from ..runtime.loaded import mxnet as mx
from ..tuning.workload import load_workload, reference_of
from .train_resnet18 import train_network


def train(reference: str, options: SimpleNamespace) -> None:
    """Train what a function returns."""
    build = load_workload("train", reference_of("train", reference))
    try:
        inspect.signature(build).bind(options.batch_size, None)
    except TypeError as error:
        raise TrainerError(
            f"train: got {reference}: {error}; expected a function of (batch_size, ctx). Let it take both."
        ) from None

    def make(ctx: List[mx.Context]) -> Sequence[Any]:
        made = build(options.batch_size, ctx)
        if not isinstance(made, tuple) or len(made) not in (3, 4) or not isinstance(made[0], mx.gluon.Block):
            raise TrainerError(
                f"train: got {type(made).__name__} from {reference}; expected a network, a loss, and data to train on and to "
                "test on. Return (net, loss, train_iter), or (net, loss, train_iter, test_iter)."
            )
        return (*made, None)[:4]

    train_network(make, options, title=reference, unit="examples")

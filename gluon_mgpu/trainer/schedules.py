"""Learning rates for larger batches: scaled with the batch, after a warm-up."""

from __future__ import annotations

import math
import sys
from typing import Any, Callable, Dict, Optional

from mxnet import lr_scheduler

from ..checks import is_number, one_of, real_number, short
from ..errors import TrainerError

_RULES: Dict[str, Callable[[float], float]] = {"linear": float, "sqrt": math.sqrt}


def scaled_learning_rate(learning_rate: float, *, base_batch_size: int, batch_size: int, rule: str = "linear") -> float:
    """Return the learning rate for another batch size.

    Parameters
    ----------
    learning_rate : float
        The learning rate for `base_batch_size`.
    base_batch_size, batch_size : int
        Examples of a batch, over all devices.
    rule : "linear" or "sqrt"
        `linear`: k times the batch, k times the learning rate, for SGD with and without momentum. `sqrt`: √k times, for
        optimizers that divide by the gradient's size, such as Adam.

    Raises
    ------
    TrainerError
        A number is not positive, or the rule is unknown.

    Examples
    --------
    >>> scaled_learning_rate(0.1, base_batch_size=64, batch_size=256)
    0.4
    >>> scaled_learning_rate(0.001, base_batch_size=64, batch_size=256, rule="sqrt")
    0.002

    Source: linear: Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017, section 2.1. Square root:
    Malladi et al., "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms", 2022, which also scales Adam's betas.
    """
    _check_positive(learning_rate=learning_rate, base_batch_size=base_batch_size, batch_size=batch_size)
    one_of("scaled_learning_rate", "rule", rule, list(_RULES), advice="Use linear for sgd, sqrt for adam and similar optimizers.")
    return learning_rate * _RULES[rule](batch_size / base_batch_size)


def scaled_params(
    learning_rate: float,
    *,
    base_batch_size: int,
    batch_size: int,
    steps_per_epoch: int,
    warmup_epochs: float = 5,
    epochs: Optional[float] = None,
    rule: str = "linear",
) -> Dict[str, Any]:
    """Return optimizer parameters for another batch size: the scaled learning rate and its schedule.

    ```
    scaled rate          ╭───────────  or, with `epochs`, along a cosine to 0
                     ╭───╯
    learning_rate ───╯
                  │warmup_epochs│
    ```

    The warm-up is linear and starts at the rate of the base batch: weights change fast in the beginning, and the rule holds only
    if they change slowly. A batch smaller than the base needs no warm-up.

    Pass both to the Trainer. In MXNet, a `learning_rate` that differs from the schedule's replaces it.

    Parameters
    ----------
    learning_rate : float
        The learning rate for `base_batch_size`.
    base_batch_size, batch_size : int
        Examples of a batch, over all devices.
    steps_per_epoch : int
        `len(train_iter)`, with batches of `batch_size`.
    warmup_epochs : float
        May be 0.
    epochs : float, optional
        The rate falls to 0 over this number of epochs, including the warm-up. None: it stays constant.
    rule : "linear" or "sqrt"
        See `scaled_learning_rate`.

    Returns
    -------
    dict
        `learning_rate` and `lr_scheduler`, an `mxnet.lr_scheduler.LRScheduler`.

    Raises
    ------
    TrainerError
        A number is out of range, or the rule is unknown.

    Examples
    --------
    >>> params = scaled_params(0.1, base_batch_size=64, batch_size=256, steps_per_epoch=6, warmup_epochs=2)
    >>> params["learning_rate"], [round(params["lr_scheduler"](step), 3) for step in (0, 6, 12, 100)]
    (0.4, [0.1, 0.25, 0.4, 0.4])

    Source: Goyal et al., 2017, section 2.2, "gradual warmup"; five epochs are theirs.
    """
    rate = scaled_learning_rate(learning_rate, base_batch_size=base_batch_size, batch_size=batch_size, rule=rule)
    _check_positive(steps_per_epoch=steps_per_epoch)
    last = math.inf if epochs is None else epochs
    finite = _is_finite(warmup_epochs) and (epochs is None or _is_finite(epochs))
    if not finite or not 0 <= warmup_epochs < last:
        raise TrainerError(
            f"scaled_params: got warmup_epochs={short(warmup_epochs)} of epochs={short(epochs)}; expected finite numbers, 0 "
            "or more for the warm-up, and fewer than epochs. 5 are usual in a run of 30 or more."
        )
    warm_up: Dict[str, Any] = {
        "base_lr": rate,
        "warmup_begin_lr": min(learning_rate, rate),
        "warmup_steps": round(warmup_epochs * steps_per_epoch) if rate > learning_rate else 0,
    }
    if epochs is None:
        schedule = lr_scheduler.FactorScheduler(step=sys.maxsize, factor=1.0, **warm_up)  # MXNet's constant
    else:
        num_steps = max(warm_up["warmup_steps"] + 1, round(epochs * steps_per_epoch))
        schedule = lr_scheduler.CosineScheduler(num_steps, final_lr=0.0, **warm_up)
    return {"learning_rate": rate, "lr_scheduler": schedule}


def _check_positive(**numbers: float) -> None:
    for name, number in numbers.items():
        real_number(
            "scaled_learning_rate", name, number, above=True, advice="Pass a learning rate that trains well, and both sizes."
        )


def _is_finite(number: Any) -> bool:
    return is_number(number) and bool(abs(number) <= sys.float_info.max)

"""The private parts of `gluon.Trainer` that a subclass with a step of its own must answer for.

Source: MXNet 1.9.1, python/mxnet/gluon/trainer.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, List, Optional, Sequence

from mxnet import Context, gluon
from mxnet import optimizer as opt

from ..errors import TrainerError
from ..nested import Array


class GluonTrainer(gluon.Trainer):
    """A `gluon.Trainer` without Gluon's store and step.

    Parameters
    ----------
    params : list of gluon.Parameter
    optimizer : mxnet.optimizer.Optimizer
    contexts : list of mxnet.Context
        The devices of the replicas: those of the parameters may be different ones.
    updaters : list of mxnet.optimizer.Updater
        One for each device. Other libraries read them here.
    """

    def __init__(
        self, params: List[gluon.Parameter], optimizer: opt.Optimizer, contexts: List[Context], updaters: List[Any]
    ) -> None:
        self._of_replicas, self._is_made = contexts, False
        super().__init__(params, optimizer, kvstore=None)
        self._updaters, self._is_made = updaters, True

    @property
    def scale(self) -> float:
        """The factor of all gradients: the optimizer's `rescale_grad` when the trainer was made."""
        return self._scale  # type: ignore[no-any-return]

    @scale.setter
    def scale(self, scale: float) -> None:
        self._scale = scale

    @property
    def amp_scaler(self) -> Optional[Any]:
        """The loss scaler that `mx.contrib.amp.init_trainer` has given to this trainer."""
        return getattr(self, "_amp_loss_scaler", None)

    def _check_contexts(self) -> List[Context]:
        return self._of_replicas

    def _init_optimizer(self, optimizer: Any, optimizer_params: Any) -> None:
        if self._is_made:
            raise TrainerError(
                "Trainer._init_optimizer: got an optimizer for a trainer that has one, with states; expected none. Call "
                "set_learning_rate(), or make a new Trainer."
            )
        super()._init_optimizer(optimizer, optimizer_params)

    def _allreduce_grads(self) -> None:
        raise TrainerError(
            "Trainer._allreduce_grads: got a call of Gluon's private part of a step; expected allreduce_grads(). Call that, and "
            "update(batch_size) after it."
        )

    def __reduce__(self) -> Any:
        """Raise for `copy` and `pickle`, also of a network, whose parameters know their trainer."""
        raise TrainerError(
            f"{type(self).__name__}: got a copy or a pickle of a trainer or of its network; expected one that it shares no "
            "memory with. Build the network again, and call its load_parameters() with a file of save_parameters()."
        )


def overflows(amp_scaler: Any, numbers: Sequence[Array]) -> bool:
    """Return whether a number is not finite, and let MXNet's scaler choose its next scale. It looks at gradients of objects."""
    return bool(numbers and amp_scaler.has_overflow([SimpleNamespace(_grad=[one]) for one in numbers]))


def private_override(cls: type, base: type) -> str:
    """Return a private part of `gluon.Trainer` that a class has of its own, not from its base, "" if there is none."""
    private = ("_allreduce_grads", "_init_optimizer", "_update")
    return next((name for name in private if getattr(cls, name) is not getattr(base, name)), "")

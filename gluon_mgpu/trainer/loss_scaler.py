"""LossScaler: multiplies losses so that float16 gradients do not vanish."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence

from mxnet import autograd

from ..checks import real_number, short, whole_number
from ..errors import NonFiniteLossError, TrainerError
from ..nested import Array, is_device_array
from ..runtime.environment import logger
from .clip import finite_on_each

_SMALLEST, _LARGEST = 1.0, 2.0**24  # of a scale


class LossScaler:
    """Multiplies losses so that float16 gradients do not vanish, and skips steps whose gradients overflow.

    ```
    losses ─► scale() ─► backward ─► sum over devices ─► update(): finite? ── yes ─► step with gradient / scale
                                                                 └─ no ──► no update, and a smaller scale
    ```

    The gradients are checked before any update: a sum over devices is finite only if all its parts are. The host waits for one
    number per step.

    Parameters
    ----------
    scale : float
        The initial factor of losses. It is halved when a gradient overflows, down to 1.
    every : int, updates
        It is doubled after so many consecutive good steps, up to 2**24.

    Attributes
    ----------
    scale : float
        The current factor of losses.
    num_good : int
        Consecutive good steps.

    Examples
    --------
    >>> import mxnet as mx
    >>> scaler = LossScaler(scale=8.0)
    >>> losses = scaler.scale_losses([mx.nd.array([0.5])])
    >>> losses[0].asnumpy().item(), scaler.update([mx.nd.array([4.0])])  # the factor of these gradients
    (4.0, 8.0)
    >>> scaler.update([mx.nd.array([float("inf")])])  # None: skip this step
    >>> scaler.state()
    {'scale': 4.0, 'num_good': 0}

    Source: Micikevicius et al., "Mixed precision training", 2018, section 3.2. The defaults are those of torch.amp.GradScaler,
    the bounds MXNet's.
    """

    def __init__(self, scale: float = 2.0**16, *, every: int = 2000) -> None:
        self.scale = real_number("LossScaler", "scale", scale, low=_SMALLEST, high=_LARGEST, advice="65536 is usual.")
        self.num_good, self._every = 0, whole_number("LossScaler", "every", every, advice="2000 steps are usual.")
        self._is_scaled = False  # whether the current gradients are of scaled losses

    def scale_losses(self, losses: Sequence[Array]) -> List[Array]:
        """Return the losses multiplied by the scale, for `backward`. Call it inside `autograd.record` or after it."""
        if not isinstance(losses, (list, tuple)) or not all(map(is_device_array, losses)):
            raise TrainerError(f"LossScaler: got {short(losses)}; expected a list of MXNet arrays. Pass one loss per shard.")
        scale = self.begin()  # also of no losses, in a process without examples
        with autograd.record(train_mode=autograd.is_training()):
            return [loss * scale for loss in losses]

    def begin(self) -> float:
        """Return the scale for a backward pass that multiplies the losses by it itself."""
        self._is_scaled = True
        return self.scale

    def check(self, operation: str) -> None:
        """Raise for gradients of losses that were not scaled: divided by the scale, they would vanish.

        Raises
        ------
        TrainerError
            No losses were scaled since the last step.
        """
        if not self._is_scaled:
            raise TrainerError(
                f"{operation}: got gradients of losses that were not scaled; expected the scale of fp16. "
                "Call trainer.backward(losses)."
            )

    def update(self, gradients: Sequence[Array]) -> Optional[float]:
        """Return the scale of the gradients, or None if they overflowed; and choose the scale of the next step.

        Parameters
        ----------
        gradients : sequence of NDArray, any shapes
            Those of one device if they were summed over all devices, otherwise those of all devices. The host waits for them,
            and reads one number per device.

        Raises
        ------
        NonFiniteLossError
            They are not finite even with the smallest scale, so no step would succeed. Nothing was updated.
        """
        self._is_scaled = False
        scale = self.scale
        if all(finite.asscalar() for finite in finite_on_each(gradients)):
            self.num_good += 1
            if self.num_good == self._every:
                self.scale, self.num_good = min(_LARGEST, 2 * scale), 0
            return scale
        if scale == _SMALLEST:
            raise NonFiniteLossError(
                f"LossScaler: got gradients that are not finite with a scale of {scale:g}; expected finite ones. Lower the "
                "learning rate, check the data, or train in fp32."
            )
        self.scale, self.num_good = max(_SMALLEST, scale / 2), 0
        logger.info("LossScaler: a gradient overflowed; the step is skipped, and the scale becomes %g", self.scale)
        return None

    def state(self) -> Dict[str, float]:
        """Return the scale and the number of good steps, for `restore`."""
        return {"scale": self.scale, "num_good": self.num_good}

    def restore(self, state: Any) -> None:
        """Continue from a result of `state`; anything else raises an error, and changes nothing."""
        scale = real_number("load_states", "scale", state["scale"], low=_SMALLEST, high=_LARGEST, advice="Save it again.")
        num_good = whole_number("load_states", "num_good", state["num_good"], low=0, advice="Save it again.")
        self.scale, self.num_good = scale, min(num_good, self._every - 1)

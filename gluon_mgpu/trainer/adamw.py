"""AdamW: MXNet has its operator but no optimizer."""

from __future__ import annotations

import math
from typing import Any, Tuple

import mxnet as mx
from mxnet import optimizer as opt

from ..nested import Array


@opt.register
class AdamW(opt.Optimizer):  # type: ignore[misc]
    """Adam with decoupled weight decay: the decay is subtracted from the weight, and does not enter the moments.

    ```
    m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g²
    w = w - lr ( m / (1 - beta1^t) / (√(v / (1 - beta2^t)) + epsilon) + wd w )
    ```

    `Trainer` knows it as `"adamw"`, and so does `gluon.Trainer` after `import gluon_mgpu`.

    Parameters
    ----------
    learning_rate : float
    beta1, beta2 : float
        Decay rates of the averages of gradients and of their squares.
    epsilon : float
        Avoids division by zero.
    wd : float
        The decay, multiplied by the learning rate and by each parameter's `wd_mult`.
    **kwargs
        Arguments of `mxnet.optimizer.Optimizer`.

    Examples
    --------
    >>> w, g = mx.nd.ones((1,)), mx.nd.zeros((1,))
    >>> optimizer = AdamW(learning_rate=0.1, wd=0.5)
    >>> optimizer.update(0, w, g, optimizer.create_state(0, w))
    >>> round(float(w.asscalar()), 4)
    0.95

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019, algorithm 2; defaults and the place of epsilon
    are those of PyTorch's AdamW.
    """

    def __init__(
        self,
        learning_rate: float = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        wd: float = 0.01,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate=learning_rate, wd=wd, **kwargs)
        self.beta1 = beta1
        self.beta2 = beta2
        self.epsilon = epsilon

    def create_state(self, index: int, weight: Array) -> Tuple[Array, Array]:
        """Return the averages of the gradient and of its square, zeros of the weight's shape."""
        return mx.nd.zeros_like(weight), mx.nd.zeros_like(weight)

    def update(self, index: int, weight: Array, grad: Array, state: Tuple[Array, Array]) -> None:
        """Apply one step to a weight in place; MXNet 2 passes lists."""
        if isinstance(index, (list, tuple)):
            for one in zip(index, weight, grad, state):
                self.update(*one)
            return
        self._update_count(index)
        count, rate = self._index_update_count[index], self._get_lr(index)
        # MXNet's operator has no bias correction: both corrections go into its rate, and the second into its epsilon.
        root = math.sqrt(1 - self.beta2**count)
        mx.nd.contrib.adamw_update(
            weight,
            grad,
            *state,
            rescale_grad=self.rescale_grad,
            lr=rate * root / (1 - self.beta1**count),
            eta=1.0,
            wd=rate * self._get_wd(index),
            beta1=self.beta1,
            beta2=self.beta2,
            epsilon=self.epsilon * root,
            clip_gradient=self.clip_gradient or -1,
            out=weight,
        )

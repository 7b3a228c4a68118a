"""The loss of a network that scores every token of a sequence."""

from __future__ import annotations

from typing import Any, Tuple

import numpy as np
from mxnet import gluon

from ...checks import real_number
from ...errors import TrainerError
from ...nested import Array, is_device_array
from ..hybrid_block import HybridBlock, named
from .array_modes import on_legacy_arrays


class SequenceLoss(gluon.Block):  # type: ignore[misc]
    """Cross-entropy of the true tokens of each sentence, summed over its length, without padding.

    The gradient is divided by tokens, not sentences: `train_batch` calls `num_units` for their number in the whole batch. So the
    gradient is the same on one device and on several, however the sentences are split.

    Parameters
    ----------
    label_smoothing : float, 0 up to 1
        This share of each target is spread evenly over the vocabulary, in training. `fit` and `evaluate` report `evaluation`.

    Raises
    ------
    TrainerError
        An option is invalid.

    Examples
    --------
    >>> import mxnet as mx
    >>> loss = SequenceLoss()
    >>> scores = mx.nd.zeros((2, 3, 4))  # two sentences of three tokens; all four tokens are equally likely
    >>> tokens, lengths = mx.nd.ones((2, 3)), mx.nd.array([3, 1])
    >>> loss(scores, (tokens, lengths)).round().asnumpy().tolist()  # 3 log 4 and log 4
    [4.0, 1.0]
    >>> loss.num_units((np.ones((2, 3)), np.array([3, 1])))
    4

    Source: label smoothing as Szegedy et al., "Rethinking the Inception architecture", 2016, section 7.
    """

    def __init__(self, label_smoothing: float = 0.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        real_number("SequenceLoss", "label_smoothing", label_smoothing, high=1.0, below=True, advice="0.1 is usual.")
        with named(self):
            self.sums = _SmoothedSums(float(label_smoothing))
            self.plain = SequenceLoss() if label_smoothing else None

    @property
    def evaluation(self) -> SequenceLoss:
        """The same loss without smoothing: cross-entropy, which compares runs of any smoothing, and with `unigram_entropy`."""
        return self.plain or self

    @on_legacy_arrays
    def forward(self, scores: Array, label: Tuple[Array, Array]) -> Array:
        """Return each sentence's sum, shape (N,).

        Parameters
        ----------
        scores : NDArray, shape (N, T, vocabulary)
        label : (tokens, lengths), shapes (N, T) and (N,)
        """
        tokens, lengths = _pair(label)
        return self.sums(scores, tokens, lengths)

    def graph(self, scores: Any, label: Tuple[Any, Any]) -> Any:
        """Return what `forward` does, of symbols."""
        return self.sums(scores, *_pair(label))

    def num_units(self, label: Any) -> int:
        """Return the number of true tokens of a batch. NumPy lengths need no waiting; MXNet lengths are read.

        Parameters
        ----------
        label : (tokens, lengths)
        """
        _, lengths = _pair(label)
        return int(np.sum(lengths.asnumpy() if is_device_array(lengths) else lengths))

    def class_labels(self, label: Any) -> np.ndarray:
        """Return the tokens, with 0 in the place of padding, whose values do not matter. Arguments are NumPy's.

        Parameters
        ----------
        label : (tokens, lengths)
        """
        tokens, lengths = _pair(label)
        return np.where(np.arange(tokens.shape[1]) < np.reshape(lengths, (-1, 1)), tokens, 0)


class _SmoothedSums(HybridBlock):
    def __init__(self, smoothing: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._smoothing = smoothing

    def compute(self, F: Any, scores: Any, tokens: Any, lengths: Any) -> Any:
        log_p = F.log_softmax(scores, axis=-1)
        losses = -F.pick(log_p, tokens, axis=-1)
        if self._smoothing:
            losses = (1 - self._smoothing) * losses - self._smoothing * F.mean(log_p, axis=-1)
        losses = F.SequenceMask(losses, lengths, use_sequence_length=True, axis=1)
        return F.sum(losses, axis=1)


def _pair(label: Any) -> Tuple[Any, Any]:
    if not isinstance(label, (list, tuple)) or len(label) != 2:
        found = f"{len(label)} arrays" if isinstance(label, (list, tuple)) else type(label).__name__
        raise TrainerError(f"SequenceLoss: got {found} as the label; expected two. Pass (target tokens, target lengths).")
    return label[0], label[1]

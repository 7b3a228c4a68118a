"""Attention of a decoder over an encoder's outputs, for all steps at once."""

from __future__ import annotations

from typing import Any, Tuple

from ...checks import one_of
from ..hybrid_block import HybridBlock, named
from .array_modes import Dense

ATTENTIONS = ("dot", "additive")
_NEVER = -1e30  # as a score: its softmax is exactly 0


class Attention(HybridBlock):
    """Computes, for each query, a weighted sum of the values by their keys, and joins it with the query.

    ```
    query ──┬─► score of each key ─► softmax over the true length ─► weighted sum of the values ─┐
            └────────────────────────────────────────────────────────────────────────────────────┴─► tanh(W [found, query])
    ```

    Parameters
    ----------
    kind : str
        `"dot"`: query times key. `"additive"`: v times tanh(W query + key), which keeps N x S x T x size numbers.
    size : int
        Size of queries, keys and results.
    value_size : int

    Source: Luong, Pham, Manning, "Effective approaches to attention-based neural machine translation", 2015 (its "general" score,
    with the matrix on the side of the keys, and its attentional vector); Bahdanau, Cho, Bengio, "Neural machine translation by
    jointly learning to align and translate", 2015 (additive).
    """

    def __init__(self, kind: str, size: int, value_size: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        one_of("Attention", "attention", kind, ATTENTIONS, advice="Pass one of these.")
        self._kind = kind
        with named(self):
            self.join = Dense(size, activation="tanh", use_bias=False, flatten=False, in_units=value_size + size)
            if kind == "additive":
                self.query = Dense(size, use_bias=False, flatten=False, in_units=size)
                self.score = Dense(1, use_bias=False, flatten=False, in_units=size)

    def compute(self, F: Any, queries: Any, keys: Any, values: Any, lengths: Any) -> Tuple[Any, Any]:
        """Return the joined vectors, shape (N, T, size), and the weights, shape (N, S, T).

        Parameters
        ----------
        queries : NDArray, shape (N, T, size)
        keys, values : NDArray, shapes (N, S, size) and (N, S, value_size)
        lengths : NDArray, shape (N,)
            The number of true positions among the S, 1 or more.
        """
        if self._kind == "dot":
            scores = F.batch_dot(keys, queries, transpose_b=True)
        else:
            sums = F.broadcast_add(F.expand_dims(keys, axis=2), F.expand_dims(self.query(queries), axis=1))
            scores = F.squeeze(self.score(F.tanh(sums)), axis=3)
        masked = F.SequenceMask(scores, lengths, use_sequence_length=True, axis=1, value=_NEVER)
        weights = F.softmax(masked, axis=1)
        found = F.batch_dot(weights, values, transpose_a=True)
        return self.join(join_last(F, found, queries)), weights


def join_last(F: Any, *arrays: Any) -> Any:
    """Return arrays of shapes (A, B, ...) side by side along their last axis.

    It uses four axes, for which MXNet calls oneDNN; its own operator for three axes takes ten times as long.
    """
    return F.reshape(F.concat(*(F.expand_dims(array, axis=0) for array in arrays), dim=3), shape=(-3, 0, 0))

"""The frequencies of tokens: where an output layer should begin, and the loss that a network must beat."""

from __future__ import annotations

from typing import Sequence

import numpy as np

from ...errors import DataError
from .vocabulary import EOS, checked


def unigram_log_p(sentences: Sequence[Sequence[int]], size: int) -> np.ndarray:
    """Return the log-probability of each token of a vocabulary by its frequency, each counted once more; shape (size,).

    Parameters
    ----------
    sentences : sequence of sequences of int
        Token numbers without `BOS` and `EOS`: see `encode_pairs`. Each sentence counts one `EOS`.
    size : int
        Number of tokens in the vocabulary.

    Raises
    ------
    DataError
        There is no sentence, or a token is not in the vocabulary.

    Examples
    --------
    >>> np.exp(unigram_log_p([[4, 4], [4]], 6)).round(2).tolist()  # 1, 1, 3, 1, 4 and 1 of 11
    [0.09, 0.09, 0.27, 0.09, 0.36, 0.09]
    """
    counts = 1 + np.bincount(_tokens("unigram_log_p", sentences, size), minlength=size)
    found: np.ndarray = np.log(counts / counts.sum())
    return found


def unigram_entropy(log_p: np.ndarray, sentences: Sequence[Sequence[int]]) -> float:
    """Return the mean of -`log_p` over the tokens of some sentences and their ends, in nats per token.

    It is the validation loss of a network that knows only how frequent each token is.

    Examples
    --------
    >>> round(unigram_entropy(np.log([0.25, 0.25, 0.25, 0.25]), [[3, 3], []]), 4)  # log 4
    1.3863
    """
    return -float(np.mean(log_p[_tokens("unigram_entropy", sentences, len(log_p))]))


def _tokens(operation: str, sentences: Sequence[Sequence[int]], size: int) -> np.ndarray:
    if not len(sentences):
        raise DataError(f"{operation}: got no sentences; expected one or more. Pass those of encode_pairs.")
    return np.array([token for sentence in sentences for token in (*checked(operation, sentence, size), EOS)])

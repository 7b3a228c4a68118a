"""The frequencies of tokens: where an output layer should begin."""

from __future__ import annotations

from typing import Sequence

import numpy as np

from ...data.text.vocabulary import EOS, checked
from ...errors import DataError


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
    sentences = list(sentences)
    if not sentences:
        raise DataError("unigram_log_p: got no sentences; expected one or more. Pass those of encode_pairs.")
    tokens = [token for sentence in sentences for token in (*checked("unigram_log_p", sentence, size), EOS)]
    counts = 1 + np.bincount(tokens, minlength=size)
    return np.log(counts / counts.sum())

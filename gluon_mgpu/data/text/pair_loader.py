"""Batches of sentence pairs: sized by tokens, padded to similar lengths, balanced over the devices."""

from __future__ import annotations

import zlib
from typing import Iterator, List, Sequence, Tuple

import numpy as np

from ...checks import MOST_SEED, flag, instance, is_whole, short, whole_number
from ...errors import DataError
from .length_buckets import balance_shards, plan_buckets
from .pairs import SentencePairs
from .vocabulary import BOS, EOS, PAD, UNK, Vocabulary

Arrays = Tuple[np.ndarray, ...]


class PairLoader:
    """Iterates over batches ((source, source length, target input), (target output, target length)) of host arrays.

    ```
    source "세 시"          source         세    시   <eos>            source length 3
    target "three o'clock"  target input  <bos>  three  o'clock        target length 3
                            target output three  o'clock  <eos>
    ```

    Each pass is an epoch, which yields every pair once. The pairs of a batch depend only on the seed and the epoch's number, not
    on the number of devices. The number of batches and their shapes are the same in each epoch. Inside a batch, pairs are ordered
    so that the slices of `split_batch` for `num_shards` devices hold about equal tokens.

    Parameters
    ----------
    source, target : sequence of sequences of int, length N
        Numbers of tokens, without `BOS` and `EOS`: see `encode_pairs`.
    batch_tokens : int
        Source and target tokens of a batch, including padding, over all devices.
    shuffle : bool
    seed : int
    num_shards : int
        Number of devices to balance.
    num_buckets : int
        The most padded shapes. More buckets pad less and mix less: pairs share a batch only with others of their bucket.

    Attributes
    ----------
    epoch : int
        The number of passes begun. Set it to resume another run.
    fingerprint : str
        Of the sentences and the seed: `fit` resumes only with the same.
    lengths : numpy.ndarray of int32, shape (N, 2)
        Of each pair's source and target, including the one end added to each.
    buckets : list of LengthBucket
    padding_share : float, 0 to 1
        The share of padding in the arrays of tokens.

    Raises
    ------
    DataError
        The numbers of source and target sentences differ, a pair does not fit into a batch, or an option is invalid.

    Examples
    --------
    >>> loader = PairLoader([[5, 6], [7]], [[8], [9, 5]], batch_tokens=12)
    >>> (source, source_length, target_input), (target_output, target_length) = next(iter(loader))
    >>> source.tolist(), source_length.tolist()
    ([[5, 6, 2], [7, 2, 0]], [3, 2])
    >>> target_input.tolist(), target_output.tolist(), target_length.tolist()
    ([[1, 8, 0], [1, 9, 5]], [[8, 2, 0], [9, 5, 2]], [2, 3])
    """

    def __init__(
        self,
        source: Sequence[Sequence[int]],
        target: Sequence[Sequence[int]],
        batch_tokens: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        num_shards: int = 1,
        num_buckets: int = 16,
    ) -> None:
        for name, side in (("source", source), ("target", target)):
            if not isinstance(side, (list, tuple, np.ndarray)) or not getattr(side, "shape", (1,)):
                raise DataError(
                    f"PairLoader: got {name}={short(side)}; expected a list of lists of tokens. Encode the sentences."
                )
        flag("PairLoader", "shuffle", shuffle, error=DataError)
        if len(source) != len(target) or not len(source):
            raise DataError(
                f"PairLoader: got {len(source)} source and {len(target)} target sentences; expected the same number, 1 or more. "
                "Pass one target sentence per source sentence."
            )
        whole_number("PairLoader", "seed", seed, low=0, high=MOST_SEED, advice="Pass for example 0.", error=DataError)
        whole_number("PairLoader", "num_shards", num_shards, advice="Pass the number of devices.", error=DataError)
        # One array per sentence, with both ends: source and target output omit the first one, target input the last.
        self._source, self._target = _with_ends("source", source), _with_ends("target", target)
        self.lengths = np.array([[len(s) - 1, len(t) - 1] for s, t in zip(self._source, self._target)], np.int32)
        self.buckets = plan_buckets(self.lengths, batch_tokens, num_buckets)
        self.shuffle, self.seed, self.num_shards = shuffle, seed, num_shards
        self.epoch = 0
        tokens = zlib.crc32(b"".join(one.tobytes() for one in self._source + self._target))
        self.fingerprint = f"{tokens:x}-{len(source)}-{seed if shuffle else None}"
        self._padded = np.zeros_like(self.lengths)
        for bucket in self.buckets:
            self._padded[bucket.examples] = bucket.padded
        self.padding_share = 1 - float(self.lengths.sum() / self._padded.sum())

    def __len__(self) -> int:
        """Return the number of batches of one pass."""
        return sum(len(bucket.batch_sizes) for bucket in self.buckets)

    def order(self, epoch: int) -> Iterator[np.ndarray]:
        """Yield the indices of the pairs of each batch of an epoch, which map outputs to the input text."""
        rng = np.random.default_rng([self.seed, epoch])
        batches: List[np.ndarray] = []
        for bucket in self.buckets:
            examples = rng.permutation(bucket.examples) if self.shuffle else bucket.examples
            batches += np.split(examples, np.cumsum(bucket.batch_sizes)[:-1])
        for i in rng.permutation(len(batches)) if self.shuffle else range(len(batches)):
            yield batches[i][balance_shards(self.lengths[batches[i]].sum(axis=1), self.num_shards)]

    def __iter__(self) -> Iterator[Tuple[Arrays, Arrays]]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        for examples in self.order(epoch):
            yield self._batch(examples)

    def _batch(self, examples: np.ndarray) -> Tuple[Arrays, Arrays]:
        source_padded, target_padded = self._padded[examples[0]]
        source_length, target_length = np.ascontiguousarray(self.lengths[examples].T)
        target = [self._target[i] for i in examples]
        source = padded([self._source[i][1:] for i in examples], source_padded)
        target_input = padded([sentence[:-1] for sentence in target], target_padded)
        target_output = padded([sentence[1:] for sentence in target], target_padded)
        return (source, source_length, target_input), (target_output, target_length)


def encode_pairs(
    pairs: SentencePairs, source_vocabulary: Vocabulary, target_vocabulary: Vocabulary
) -> Tuple[List[List[int]], List[List[int]]]:
    """Return the numbers of the tokens of each source and each target sentence.

    Examples
    --------
    >>> from gluon_mgpu.data import SentencePairs, build_vocabulary
    >>> pairs = SentencePairs(["가", "나가"], ["a", "b a"])
    >>> encode_pairs(pairs, build_vocabulary(pairs.source, "characters"), build_vocabulary(pairs.target, "words"))
    ([[4], [5, 4]], [[4], [5, 4]])
    """
    instance(
        "encode_pairs", "pairs", pairs, SentencePairs, "SentencePairs", advice="Pass the result of read_pairs.", error=DataError
    )
    for name, one in (("source_vocabulary", source_vocabulary), ("target_vocabulary", target_vocabulary)):
        instance("encode_pairs", name, one, Vocabulary, "a Vocabulary", advice="Pass one of build_vocabulary.", error=DataError)
    return [source_vocabulary.encode(text) for text in pairs.source], [target_vocabulary.encode(text) for text in pairs.target]


def _with_ends(name: str, sentences: Sequence[Sequence[int]]) -> List[np.ndarray]:
    for i, sentence in enumerate(sentences):
        if not isinstance(sentence, (list, tuple, np.ndarray)) or not all(is_whole(token) and token >= UNK for token in sentence):
            raise DataError(
                f"PairLoader: got {name} sentence {i} {short(sentence)}; expected a list of token numbers of {UNK} or more, as "
                f"{PAD}, {BOS} and {EOS} are added by the loader. Pass the result of Vocabulary.encode."
            )
    return [np.array([BOS, *sentence, EOS], np.int32) for sentence in sentences]


def padded(sentences: Sequence[Sequence[int]], length: int) -> np.ndarray:
    """Return sentences as rows of one length, with `PAD` after them."""
    array = np.full((len(sentences), length), PAD, np.int32)
    for row, sentence in zip(array, sentences):
        row[: len(sentence)] = sentence
    return array

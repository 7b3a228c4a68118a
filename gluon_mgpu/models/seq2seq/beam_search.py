"""Translate: the sentences that a seq2seq network finds likeliest, on all its devices, in the order of its inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import Context, autograd
from mxnet.util import np_array

from ...checks import real_number, short, whole_number
from ...data import BOS, EOS, UNK
from ...data.text.pair_loader import padded
from ...data_parallel.sharding import plan_shards
from ...errors import TrainerError
from ...nested import Array
from ...plots import figure
from ...runtime.environment import logger, require
from ...trainer.parameters import devices_of
from .. import Seq2Seq

Sentence = Sequence[int]

LENGTH_FACTOR, EXTRA_TOKENS = 2, 10  # a translation is at most twice as long as its source, and these
MAX_REPEATS = 2  # of the same tokens in a row
# Matplotlib reads one name from the collection of fonts-noto-cjk, that of the Japanese font, which has Hangul too.
_KOREAN_FONTS = ("NanumGothic", "Noto Sans CJK KR", "Noto Sans KR", "Malgun Gothic", "AppleGothic", "UnDotum", "Baekmuk Gulim")
_FONTS = (*_KOREAN_FONTS, "Noto Sans CJK JP")


@dataclass(frozen=True)
class Translation:
    """One translation of a sentence.

    Attributes
    ----------
    tokens : list of int
        Without the end of the sentence.
    score : float
        What translations are ranked by: the log-probability divided by the length penalty, less the distance from the expected
        length if there is a `length_ratio`.
    log_probability : float
        Of all tokens and the end of the sentence.
    finished : bool
        Whether it ended by itself. What reached its greatest length is ranked as it stands.
    attention : numpy.ndarray, shape (tokens, and the end; source tokens, with their end), or None
        Each row adds up to 1.
    """

    tokens: List[int]
    score: float
    log_probability: float
    finished: bool
    attention: Optional[np.ndarray] = None


def translate(
    net: Seq2Seq,
    sentences: Sequence[Sentence],
    *,
    bos: int = BOS,
    eos: int = EOS,
    unk: Optional[int] = UNK,
    source_eos: Optional[int] = EOS,
    beam_size: int = 1,
    num_best: int = 1,
    alpha: float = 1.0,
    length_ratio: Optional[float] = None,
    max_length: Optional[int] = None,
    max_repeats: Optional[int] = MAX_REPEATS,
    batch_size: int = 64,
    attention: bool = False,
) -> List[List[Translation]]:
    """Return the best translations of each sentence, by greedy or beam search on all devices of the network.

    ```
    sentences ─► by length, in batches ─► split ─► encode once ─┐       on each device
                 its K hypotheses ◄── K best of K x V ◄── one step for all hypotheses ◄──┐
                        └── those that end are finished; the others continue ─────────────┘
    ```

    The other sentences of a batch do not change a translation, except for rounding. The search of a sentence ends when no
    hypothesis continues, or when none that continues can be among the `num_best`. A beam of 1 is greedy search.

    Parameters
    ----------
    net : Seq2Seq
        Initialised on one or more devices.
    sentences : sequence of sequences of int
        Source tokens, 1 or more per sentence, from `Vocabulary.encode`.
    bos, eos : int
        The target vocabulary's tokens before the first and after the last.
    unk : int, optional
        The target vocabulary's token of unknown text, which no translation contains; None if it has none.
    source_eos : int, optional
        Appended to each source, as `PairLoader` does; None for a network that was trained without it.
    beam_size : int
        Hypotheses per sentence; 1 is greedy.
    num_best : int
        Translations per sentence, at most `beam_size`.
    alpha : float, 0 or more
        How strongly to compensate for length: the log-probability is divided by length ** alpha, where the end counts. 0 ranks by
        probability alone, which favours short translations.
    length_ratio : float, optional
        Target tokens per source token in the training data, ends included. The score of a translation is lower by
        `abs(log(length / (length_ratio * source length)))`. A network that has learned little then finds translations of the
        usual length, where a beam alone prefers short ones (scripts/benchmarks/RESULTS.md).
    max_length : int, optional
        Tokens per translation, including its end; twice the source's length and 10 by default.
    max_repeats : int, optional
        How often the same token, or the same group of tokens, may occur in a row; None for no limit. A token that would exceed
        it gets no probability, so a network that is stuck does not repeat a phrase until `max_length`. 2 excludes hardly any
        correct translation, in contrast to a limit on all n-grams (scripts/benchmarks/RESULTS.md).
    batch_size : int
        Sentences at once, over all devices.
    attention : bool
        Return where each token looked.

    Returns
    -------
    list of lists of Translation
        One list a sentence, best first.

    Raises
    ------
    TrainerError
        A wrong argument, an empty sentence, a token that the network does not know, or a network on no device.

    Examples
    --------
    >>> net = Seq2Seq(10, 12, embed_size=4, hidden_size=8)
    >>> net.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
    >>> found = translate(net, [[3, 4, 5], [6]], beam_size=3, num_best=2)
    >>> [len(best) for best in found], found[0][0].score >= found[0][1].score
    ([2, 2], True)

    Source: Yang, Huang, Ma, "Breaking the beam search curse", 2018 (an expected length).
    """
    counts = {"beam_size": beam_size, "num_best": num_best, "batch_size": batch_size}
    _check_search(net, {**counts, "max_length": max_length, "max_repeats": max_repeats}, alpha, length_ratio)
    sides = {"bos": (bos, net.target_vocab_size), "eos": (eos, net.target_vocab_size), "unk": (unk, net.target_vocab_size)}
    for name, (token, size) in {**sides, "source_eos": (source_eos, net.source_vocab_size)}.items():
        if token is not None or name in ("bos", "eos"):
            _check_token(name, token, size)
    _check_sentences(net, sentences)
    options = _Options(bos, eos, unk, beam_size, num_best, alpha, length_ratio, max_length, max_repeats, attention)
    devices = devices_of(net)
    end = [] if source_eos is None else [source_eos]
    sentences = [[*sentence, *end] for sentence in sentences]
    order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]), reverse=True)  # the largest first: memory is made once
    found: List[List[Translation]] = [[] for _ in sentences]
    with np_array(False), autograd.pause(train_mode=False):
        for begin in range(0, len(order), batch_size):
            batch = order[begin : begin + batch_size]
            for i, best in zip(batch, _translate_batch(net, [sentences[i] for i in batch], devices, options)):
                found[i] = best
    return found


@dataclass(frozen=True)
class _Options:
    bos: int
    eos: int
    unk: Optional[int]
    beam_size: int
    num_best: int
    alpha: float
    length_ratio: Optional[float]
    max_length: Optional[int]
    max_repeats: Optional[int]
    attention: bool

    def score(self, log_p: float, length: int, source_length: int) -> float:
        """Return what a translation of this log-probability and length is ranked by."""
        return log_p / length**self.alpha - self._distance(length, source_length)

    def highest_score(self, log_p: float, length: int, source_length: int) -> float:
        """Return the score of a hypothesis that continues after this length, if all tokens that follow were certain."""
        longest = self.limit(source_length)
        nearest = 0.0 if self.length_ratio is None else min(max(length + 1, self.length_ratio * source_length), longest)
        return log_p / longest**self.alpha - self._distance(nearest, source_length)

    def _distance(self, length: float, source_length: int) -> float:
        """Return how far a length is from the expected one."""
        return 0.0 if self.length_ratio is None else abs(math.log(length / (self.length_ratio * source_length)))

    def limit(self, length: int) -> int:
        """Return how long the translation of a sentence of this length may be: its own matter, not that of the batch."""
        return LENGTH_FACTOR * length + EXTRA_TOKENS if self.max_length is None else self.max_length


class _Hypothesis(NamedTuple):
    """Tokens so far, the last first: hypotheses of one beginning share it."""

    log_p: float
    token: int
    before: Optional[_Hypothesis] = None
    weights: Optional[np.ndarray] = None  # where the step that chose the token looked


def _translate_batch(
    net: Seq2Seq, sentences: List[Sentence], devices: List[Context], options: _Options
) -> List[List[Translation]]:
    """Search on all devices: each is given a step before any is waited for."""
    shards = []
    begin = 0
    for size, context in zip(plan_shards(len(sentences), len(devices)), devices):
        if size:
            shards.append(_Search(net, sentences[begin : begin + size], context, options))
        begin += size
    while any(shard.is_open for shard in shards):
        queued = [shard for shard in shards if shard.is_open]
        for shard in queued:
            shard.queue()
        for shard in queued:
            shard.read()
    return [best for shard in shards for best in shard.best()]


class _Search:
    """The search for some sentences on one device. Its arrays keep their shapes: a row for each hypothesis of each sentence."""

    def __init__(self, net: Seq2Seq, sentences: List[Sentence], context: Context, options: _Options) -> None:
        self._net, self._sentences, self._context, self._options = net, sentences, context, options
        lengths = [len(sentence) for sentence in sentences]
        state, memory = net.encode(self._array(padded(sentences, max(lengths))), self._array(np.array(lengths, "int32")))
        self._state = tuple(mx.nd.repeat(one, options.beam_size, axis=0) for one in state)
        self._memory = tuple(mx.nd.repeat(one, options.beam_size, axis=0) for one in memory)
        # One hypothesis to begin with; the other rows are ballast.
        first = _Hypothesis(0.0, options.bos)
        self._ballast = [_Hypothesis(-math.inf, options.bos)] * options.beam_size
        self._alive = [[first, *self._ballast[1:]] for _ in sentences]
        self._rows = np.arange(len(sentences) * options.beam_size, dtype="int32")  # whose state each row goes on with
        self._tokens = np.zeros((len(self._rows), 0), dtype="int32")  # of each row's hypothesis so far
        self._finished: List[List[Tuple[float, _Hypothesis, bool]]] = [[] for _ in sentences]
        self._open = set(range(len(sentences)))
        self._num_steps = 0

    @property
    def is_open(self) -> bool:
        return bool(self._open)

    def queue(self) -> None:
        """Let the device make one step of all hypotheses, and choose the K best of each sentence."""
        options, num = self._options, len(self._sentences)
        flat = [one for beam in self._alive for one in beam]
        tokens = np.array([one.token for one in flat], dtype="int32")
        log_p = np.array([one.log_p for one in flat], dtype="float32")
        if self._num_steps:
            self._tokens = np.column_stack([self._tokens[self._rows], tokens])
        rows = self._array(self._rows)
        state = tuple(mx.nd.take(one, rows, axis=0) for one in self._state)
        scores, self._state, self._weights = self._net.decode(self._array(tokens.reshape(-1, 1)), state, self._memory)
        totals = mx.nd.log_softmax(scores.reshape((num * options.beam_size, -1))) + self._array(log_p).reshape((-1, 1))
        if options.unk is not None:
            totals[:, options.unk] = -np.inf
        if options.max_repeats is not None:
            excluded = repeating(self._tokens, options.max_repeats)
            if len(excluded[0]):
                totals[tuple(map(self._array, excluded))] = -np.inf
        totals = totals.reshape((num, -1))
        self._best = mx.nd.topk(totals, k=options.beam_size, ret_typ="both", dtype="int32")

    def read(self) -> None:
        """Wait for the step, and see which hypotheses end and which go on."""
        log_p, places = (array.asnumpy() for array in self._best)
        weights = self._weights.asnumpy()[:, :, 0] if self._options.attention else None
        self._num_steps += 1
        self._rows = np.arange(len(self._rows), dtype="int32")
        for i in sorted(self._open):
            self._extend(i, log_p[i], places[i], weights)

    def _extend(self, i: int, log_p: np.ndarray, places: np.ndarray, weights: Optional[np.ndarray]) -> None:
        first_row, length = i * self._options.beam_size, len(self._sentences[i])
        alive: List[_Hypothesis] = []
        for total, place in zip(log_p.tolist(), places.tolist()):
            if total == -np.inf:  # made from ballast: there are fewer than K
                break
            parent, token = divmod(place, self._net.target_vocab_size)
            looked = None if weights is None else weights[first_row + parent, :length]
            hypothesis = _Hypothesis(total, token, self._alive[i][parent], looked)
            if token == self._options.eos:
                self._finish(i, hypothesis, True)
            else:
                self._rows[first_row + len(alive)] = first_row + parent
                alive.append(hypothesis)
        if self._num_steps == self._options.limit(length):
            for one in alive:
                self._finish(i, one, False)
        elif alive and self._can_win(i, alive[0]):
            self._alive[i] = [*alive, *self._ballast[len(alive) :]]
            return
        self._open.remove(i)

    def _finish(self, i: int, hypothesis: _Hypothesis, ended: bool) -> None:
        score = self._options.score(hypothesis.log_p, self._num_steps, len(self._sentences[i]))
        self._finished[i] = sorted([*self._finished[i], (score, hypothesis, ended)], key=lambda one: -one[0])
        del self._finished[i][self._options.num_best :]

    def _can_win(self, i: int, hypothesis: _Hypothesis) -> bool:
        """Return whether the best of those that continue may yet be among the best."""
        at_most = self._options.highest_score(hypothesis.log_p, self._num_steps, len(self._sentences[i]))
        return len(self._finished[i]) < self._options.num_best or at_most > self._finished[i][-1][0]

    def best(self) -> List[List[Translation]]:
        """Return each sentence's translations, best first."""
        return [[_traced(*one) for one in finished] for finished in self._finished]

    def _array(self, values: np.ndarray) -> Array:
        return mx.nd.array(values, ctx=self._context, dtype=values.dtype)


def repeating(tokens: np.ndarray, most: int) -> Tuple[np.ndarray, np.ndarray]:
    """Return rows and the next tokens with which the last tokens of the row would stand more than `most` times in a row.

    Parameters
    ----------
    tokens : numpy.ndarray of int32, shape (rows, steps)
    most : int, 1 or more

    Examples
    --------
    >>> rows, following = repeating(np.array([[5, 7, 7], [7, 5, 7]], "int32"), 1)
    >>> list(zip(rows.tolist(), following.tolist()))  # 7 7 and 7 5 7 5 are excluded
    [(0, 7), (1, 7), (1, 5)]
    """
    rows, following = [np.zeros(0, "int32")], [np.zeros(0, "int32")]
    num_steps = tokens.shape[1]
    stood_before = (tokens[:, -2::-1] == tokens[:, -1:]).any(axis=0)  # the last token, a period earlier
    for period in range(1, (num_steps + 1) // (most + 1) + 1):
        if period * most > 1 and not stood_before[period - 1]:
            continue
        recent = tokens[:, num_steps + 1 - period * (most + 1) :]  # of the groups that the next token would complete
        found = np.flatnonzero((recent[:, period:] == recent[:, : recent.shape[1] - period]).all(axis=1)).astype("int32")
        rows.append(found)
        following.append(tokens[found, num_steps - period])
    return np.concatenate(rows), np.concatenate(following)


def _traced(score: float, hypothesis: _Hypothesis, ended: bool) -> Translation:
    """Return the translation that this is the last token of."""
    tokens: List[int] = []
    looked: List[Any] = []
    one = hypothesis
    while one.before is not None:
        tokens.append(one.token)
        looked.append(one.weights)
        one = one.before
    attention = None if looked[0] is None else np.stack(looked[::-1])
    return Translation(tokens[: 0 if ended else None : -1], score, hypothesis.log_p, ended, attention)


def plot_attention(weights: np.ndarray, source: Sequence[str], target: Sequence[str]) -> Any:
    """Return a figure of where each target token looked: dark is much. Save it with `plots.save`.

    Parameters
    ----------
    weights : numpy.ndarray, shape (T, S)
        `Translation.attention`.
    source, target : sequences of str
        S and T pieces of text, with the ends of the sentences where the weights have them. For Korean, install a font such as
        fonts-nanum or fonts-noto-cjk.

    Raises
    ------
    TrainerError
        More or fewer pieces than weights.
    MissingExtraError
        matplotlib is not installed.
    """
    if np.shape(weights) != (len(target), len(source)):
        raise TrainerError(
            f"plot_attention: got weights of shape {np.shape(weights)} for {len(target)} target and {len(source)} source tokens; "
            "expected one for each pair. Count the end of the sentence in."
        )
    made = figure(max(4.0, 2.5 + 0.4 * len(source)), max(2.5, 1.2 + 0.3 * len(target)))
    axes = made.subplots()
    installed = {entry.name for entry in require("matplotlib.font_manager", "train", "plot").fontManager.ttflist}
    family = ["sans-serif", *(name for name in _FONTS if name in installed)]
    if len(family) == 1 and any("\uac00" <= letter <= "\ud7a3" for token in (*source, *target) for letter in token):
        logger.warning("plot_attention: got Hangul and no font that has it; expected one. Install fonts-nanum or fonts-noto-cjk.")
    made.colorbar(axes.imshow(weights, cmap="Blues", vmin=0, vmax=1, aspect="auto"), ax=axes, label="weight")
    axes.set_xticks(range(len(source)))
    axes.set_xticklabels(list(source), family=family)
    for label in axes.get_xticklabels():
        if len(label.get_text()) > 2:  # longer than characters, which stand upright
            label.set(rotation=60, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(target)))
    axes.set_yticklabels(list(target), family=family)
    axes.set(xlabel="source", ylabel="target")
    made.tight_layout()
    return made


def _check_search(net: Any, counts: Dict[str, Any], alpha: float, length_ratio: Optional[float]) -> None:
    if not isinstance(net, Seq2Seq):
        raise TrainerError(f"translate: got {type(net).__name__} as the network; expected a Seq2Seq. Pass mgpu.models.Seq2Seq.")
    for name, count in counts.items():
        if count is not None or name not in ("max_length", "max_repeats"):
            whole_number("translate", name, count, advice="Leave it out for the usual.")
    if counts["num_best"] > counts["beam_size"]:
        raise TrainerError(
            f"translate: got num_best={counts['num_best']} of beam_size={counts['beam_size']}; expected at most beam_size. Widen "
            "the beam."
        )
    real_number("translate", "alpha", alpha, advice="1.0 is usual.")
    if length_ratio is not None:
        real_number("translate", "length_ratio", length_ratio, above=True, advice="Pass target tokens / source tokens.")


def _check_sentences(net: Seq2Seq, sentences: Any) -> None:
    if isinstance(sentences, str) or not isinstance(sentences, Sequence):
        raise TrainerError(
            f"translate: got {type(sentences).__name__} as sentences; expected a list of lists of tokens. Encode them."
        )
    for i, sentence in enumerate(sentences):
        if isinstance(sentence, str) or not isinstance(sentence, (Sequence, np.ndarray)) or not len(sentence):
            raise TrainerError(
                f"translate: got {short(sentence)} as sentence {i}; expected one or more tokens. Leave out empty ones."
            )
        for token in sentence:
            _check_token(f"a token of sentence {i}:", token, net.source_vocab_size)


def _check_token(name: str, token: Any, vocab_size: int) -> None:
    whole_number("translate", name, token, low=0, high=vocab_size - 1, advice="Use its vocabulary.")

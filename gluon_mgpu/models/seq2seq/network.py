"""Attention seq2seq: an encoder reads a sentence in both directions, and a decoder with attention writes another."""

from __future__ import annotations

from functools import partial
from typing import Any, List, Optional, Tuple

import mxnet as mx
import numpy as np
from mxnet.gluon import nn

from ...checks import flag, real_number, whole_number
from ...errors import TrainerError
from ...mxnet_internals.versions import is_mxnet2
from ...nested import Array, is_device_array, map_leaves
from ..hybrid_block import HybridBlock, named, stacked
from .array_modes import Dense, Dropout, Embedding, on_legacy_arrays
from .attention import Attention
from .recurrent_layer import NUM_STATES, Recurrence, can_compile

_EMBEDDING_SCALE = 0.3  # Xavier's would fall with the size of the vocabulary: 0.04 for 3,000 tokens of size 128
_BULK = {"forward_bulk_size": 4, "backward_bulk_size": 4}  # operations

Memory = Tuple[Array, Array, Array]  # keys (N, S, hidden), values (N, S, 2 hidden), lengths (N,)
State = Tuple[Array, ...]  # of the decoder: arrays of shape (N, hidden)


class Seq2Seq(HybridBlock):
    """An encoder-decoder with attention, which scores each next token of the target.

    ```
    source ─► embed ─► both directions, layer by layer ─► values ─► keys              once for all steps
                                  └─ last states ─► first states of the decoder
    target ─► embed ─► recurrent layers ─► attention ─► output layer                  all steps at once
    ```

    With teacher forcing, all inputs of the decoder are known in advance: its recurrent layers run like the encoder's, and
    attention and output layer compute all steps together.

    `initialize` gives embeddings a scale that does not depend on the vocabulary, and each gate an orthogonal matrix; its own
    initializer is for the other weights. For text, call `begin_at` first.

    Padding has no effect: a sentence has the same scores alone and in a batch. `net.hybridize()` compiles the whole network if
    all steps run at once, else its parts. Inputs are legacy or np arrays, by the current mode.

    Parameters
    ----------
    source_vocab_size, target_vocab_size : int
    embed_size, hidden_size, num_layers : int
        The encoder has `hidden_size` in each direction.
    cell : str
        `"gru"` or `"lstm"`.
    attention : str
        `"dot"` or `"additive"`; see `Attention`.
    tied : bool
        The output layer shares the target embedding's weights, which requires `embed_size == hidden_size`.
    dropout : float, 0 up to 1
        Of embeddings, of outputs between layers, and of the output layer's input.
    recurrence : str
        `"auto"`, `"fused"` or `"steps"`; see `Recurrence`.

    Raises
    ------
    TrainerError
        An option is invalid.

    Examples
    --------
    >>> net = Seq2Seq(10, 12, embed_size=4, hidden_size=8)
    >>> net.initialize()
    >>> source, lengths, target = mx.nd.ones((2, 5)), mx.nd.array([5, 3]), mx.nd.ones((2, 7))
    >>> net((source, lengths, target)).shape
    (2, 7, 12)

    Source: Luong, Pham, Manning, 2015 (attentional vector); Bahdanau, Cho, Bengio, 2015 (the encoder).
    """

    def __init__(
        self,
        source_vocab_size: int,
        target_vocab_size: int,
        *,
        embed_size: int = 256,
        hidden_size: int = 256,
        num_layers: int = 1,
        cell: str = "gru",
        attention: str = "dot",
        tied: bool = False,
        dropout: float = 0.0,
        recurrence: str = "auto",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        sizes = {"source_vocab_size": source_vocab_size, "target_vocab_size": target_vocab_size, "num_layers": num_layers}
        for name, size in {**sizes, "embed_size": embed_size, "hidden_size": hidden_size}.items():
            whole_number("Seq2Seq", name, size, advice="256 is usual for the sizes.")
        real_number("Seq2Seq", "dropout", dropout, high=1.0, below=True, advice="0.2 is usual.")
        if flag("Seq2Seq", "tied", tied) and embed_size != hidden_size:
            raise TrainerError(
                f"Seq2Seq: got tied=True with embed_size={embed_size} and hidden_size={hidden_size}; expected both equal, as "
                "one array is embedding and output layer. Pass one number for both."
            )
        self.target_vocab_size, self.source_vocab_size = target_vocab_size, source_vocab_size
        with named(self):
            self.encoder = Encoder(source_vocab_size, embed_size, hidden_size, num_layers, cell, dropout, recurrence)
            scale = hidden_size**-0.5 if tied else _EMBEDDING_SCALE
            self.target_embedding = Embedding(target_vocab_size, embed_size, weight_initializer=mx.init.Normal(scale))
            self.decoder = Decoder(embed_size, hidden_size, num_layers, cell, attention, dropout, recurrence)
            self.dropout = Dropout(dropout)
            shared = {"params": self.target_embedding.params} if tied and not is_mxnet2() else {}
            self.output = Dense(target_vocab_size, flatten=False, in_units=hidden_size, **shared)
        if tied and is_mxnet2():
            self.output.weight = self.target_embedding.weight

    def hybridize(self, active: bool = True, **options: Any) -> None:
        """Compile the network, or stop compiling it; see `gluon.HybridBlock.hybridize`.

        MXNet makes one operation of up to 15 that follow one another in a graph, and a CPU context would keep the recurrent
        operator from the others for as long (scripts/benchmarks/RESULTS.md): here it is 4, unless the options say otherwise.
        """
        super().hybridize(active, **{**_BULK, **options})

    @on_legacy_arrays
    def forward(self, X: Any, *more: Array) -> Array:
        """Return the scores of every target token, shape (N, T, vocabulary).

        A subclass may have its own `encode` or `decode`: they are called here as they are to translate, with legacy arrays in
        both modes, and `hybridize` then compiles the parts within them.

        Parameters
        ----------
        X : (source, lengths, target), as one argument or three
            Tokens of shapes (N, S) and (N, T); true source lengths, shape (N,).

        Raises
        ------
        TrainerError
            Other arrays than these.
        """
        source, lengths, target = _check_inputs((X, *more) if more else X)
        if self._is_overridden() or is_mxnet2():  # where a graph has the inputs of `forward`
            return self.decode(target, *self.encode(source, lengths))[0]
        inputs = (source, lengths, target, *self.encoder.start(source, lengths))
        return super().forward(*inputs) if can_compile(self.decoder.layers, source) else self.compute(mx.nd, *inputs)

    def graph_inputs(self, X: Any) -> Optional[Tuple[Array, ...]]:
        """Return the arguments of `compute` for `forward(X)`, as legacy arrays; None if not all steps run at once."""
        X = map_leaves(lambda _, leaf: leaf.as_nd_ndarray() if is_device_array(leaf) else leaf, X)
        with mx.util.np_array(False):
            source, lengths, target = _check_inputs(X)
            if self._is_overridden() or not can_compile(self.decoder.layers, source):
                return None
            return (source, lengths, target, *self.encoder.start(source, lengths))

    def begin_at(self, log_p: np.ndarray) -> None:
        """Let the output layer's bias begin at these log-probabilities: those of `unigram_log_p`. Call `initialize` next.

        With a bias of zeros, Adam needs a thousand steps until the bias alone gives rare words their probability. Meanwhile the
        vectors before the output layer saturate to do the same, and the network remains at the entropy of the unigrams.

        Parameters
        ----------
        log_p : numpy.ndarray, shape (target_vocab_size,)
        """
        if np.shape(log_p) != (self.target_vocab_size,):
            raise TrainerError(
                f"Seq2Seq.begin_at: got log_p of shape {np.shape(log_p)}; expected ({self.target_vocab_size},), one for each "
                "target token. Pass unigram_log_p(sentences, len(vocabulary))."
            )
        self.output.bias.init = mx.init.Constant(np.asarray(log_p, "float32"))

    def data_parallel_layers(self) -> List[nn.HybridBlock]:
        """Return the layers of `split_stages(..., data_parallel=)`: those of the attention, and the output layer.

        Most of the arithmetic is in them and their loss, and few of the parameters. Encoder and decoder are the stages before.

        Source: Ono, Utiyama, Sumita, "Hybrid data-model parallel training for sequence-to-sequence recurrent neural network
        machine translation", 2019.
        """
        return [self.encoder.keys, self.decoder.attention, self.output]

    def _is_overridden(self) -> bool:
        """Return whether a subclass or this object overrides `encode` or `decode`."""
        ways = ((self.encode, Seq2Seq.encode), (self.decode, Seq2Seq.decode))
        return any(getattr(way, "__func__", way) is not ours for way, ours in ways)

    def compute(self, F: Any, source: Array, lengths: Array, target: Array, backwards: Array, zeros: Array) -> Array:
        """Return the scores; `backwards` and `zeros` are the encoder's."""
        state, memory = self._encode(F, source, lengths, backwards, zeros)
        return self._decode(F, target, state, memory)[0]

    @on_legacy_arrays
    def encode(self, source: Array, lengths: Array) -> Tuple[State, Memory]:
        """Return the decoder's first state, and the memory for its attention.

        Parameters
        ----------
        source : NDArray, shape (N, S)
        lengths : NDArray, shape (N,)
        """
        return self._encode(mx.nd, source, lengths, *self.encoder.start(source, lengths))

    @on_legacy_arrays
    def decode(self, target: Array, state: State, memory: Memory) -> Tuple[Array, State, Array]:
        """Return the scores of the tokens after these, the state after the last, and the attention weights.

        Called for all steps of a known target, or for one step after the other with the state of the last.

        Parameters
        ----------
        target : NDArray, shape (N, T)
        state, memory
            Of `encode`, or of the step before.

        Returns
        -------
        scores : NDArray, shape (N, T, vocabulary)
        state
        weights : NDArray, shape (N, S, T)
        """
        return self._decode(mx.nd, target, state, memory)

    def _encode(self, F: Any, source: Array, lengths: Array, backwards: Array, zeros: Array) -> Tuple[State, Memory]:
        values, keys, first = self.encoder(F.transpose(source), lengths, backwards, zeros)
        return self.decoder.begin(F, first), (keys, values, lengths)

    def _decode(self, F: Any, target: Array, state: State, memory: Memory) -> Tuple[Array, State, Array]:
        embedded = self.dropout(self.target_embedding(F.transpose(target)))
        vectors, weights, *after = self.decoder(embedded, *memory, *state)
        return self.output(self.dropout(vectors)), tuple(after), weights


class Encoder(HybridBlock):
    """Recurrent layers in both directions, between the first and the last true token.

    The backward direction reads each sentence reversed within its length. MXNet's bidirectional operator begins at the padding,
    and on a CPU it ignores `use_sequence_length`.
    """

    def __init__(
        self, vocab_size: int, embed_size: int, hidden_size: int, num_layers: int, cell: str, dropout: float, recurrence: str
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        with named(self):
            self.embedding = Embedding(vocab_size, embed_size, weight_initializer=mx.init.Normal(_EMBEDDING_SCALE))
            self.dropout = Dropout(dropout)
            sizes = [embed_size, *[2 * hidden_size] * (num_layers - 1)]
            ways = ("forwards", "backwards")
            self.forwards, self.backwards = (
                stacked(way, (Recurrence(cell, hidden_size, size, recurrence) for size in sizes)) for way in ways
            )
            self.keys = Dense(hidden_size, use_bias=False, flatten=False, in_units=2 * hidden_size)
            width = num_layers * NUM_STATES[cell] * hidden_size
            self.bridge = Dense(width, activation="tanh", in_units=2 * hidden_size)

    def start(self, source: Array, lengths: Array) -> Tuple[Array, Array]:
        """Return the two inputs of `forward` that are not data: each token's position backwards, and a first state.

        MXNet takes rows by numbers up to ten times as fast as it reverses all that they hold (scripts/benchmarks/RESULTS.md).

        Parameters
        ----------
        source : NDArray, shape (N, S)
        lengths : NDArray, shape (N,)

        Returns
        -------
        backwards : NDArray, shape (S, N)
            Rows of (S * N,). Padding stays in its place.
        zeros : NDArray, shape (N, hidden)
        """
        num_sentences, num_steps = source.shape
        places = mx.nd.arange(source.size, ctx=source.context, dtype="int32").reshape((num_steps, num_sentences))
        backwards = mx.nd.SequenceReverse(places, lengths, use_sequence_length=True)
        return backwards, mx.nd.zeros((num_sentences, self.hidden_size), ctx=source.context)

    def forward(self, source: Array, lengths: Array, backwards: Array, zeros: Array) -> Tuple[Array, Array, Array]:
        """Return values (N, S, 2 hidden), keys (N, S, hidden), and first states, (N, all states of all layers).

        Parameters
        ----------
        source : NDArray, shape (S, N)
        lengths : NDArray, shape (N,)
        backwards, zeros
            Of `start`.
        """
        forward = super().forward if can_compile(self.forwards, source) else partial(self.compute, mx.nd)
        return tuple(forward(source, lengths, backwards, zeros))

    def compute(self, F: Any, source: Array, lengths: Array, backwards: Array, zeros: Array) -> Tuple[Array, Array, Array]:
        outputs = self.embedding(source)
        for ahead, back in zip(self.forwards, self.backwards):
            outputs = self.dropout(outputs)
            states = [zeros] * ahead.num_states
            left = ahead(outputs, *states)[0]
            right = back(_rows(F, outputs, backwards), *states)[0]
            pair = F.stack(left, _rows(F, right, backwards), axis=2)
            outputs = F.reshape(pair, shape=(0, 0, -3))  # side by side, faster than concat
        # Each direction's last state is at the last true token that it has read.
        last = [F.SequenceLast(one, lengths, use_sequence_length=True) for one in (left, right)]
        values = F.swapaxes(self.dropout(outputs), dim1=0, dim2=1)
        return values, self.keys(values), self.bridge(F.concat(*last, dim=1))


class Decoder(HybridBlock):
    """Recurrent layers, and attention over the encoder's values."""

    def __init__(
        self, embed_size: int, hidden_size: int, num_layers: int, cell: str, attention: str, dropout: float, recurrence: str
    ) -> None:
        super().__init__()
        self._num_arrays = num_layers * NUM_STATES[cell]
        with named(self):
            self.dropout = Dropout(dropout)
            sizes = [embed_size, *[hidden_size] * (num_layers - 1)]
            self.layers = stacked("layers", (Recurrence(cell, hidden_size, size, recurrence) for size in sizes))
            self.attention = Attention(attention, hidden_size, 2 * hidden_size)

    def begin(self, F: Any, first: Array) -> State:
        """Return the state before the first step, from the encoder's, shape (N, all states of all layers)."""
        return (first,) if self._num_arrays == 1 else tuple(F.split(first, num_outputs=self._num_arrays, axis=1))

    def forward(self, embedded: Array, keys: Array, values: Array, lengths: Array, *state: Array) -> Tuple[Array, ...]:
        """Return vectors (N, T, hidden), weights (N, S, T), and the state after the last step.

        Parameters
        ----------
        embedded : NDArray, shape (T, N, embed_size)
        """
        forward = super().forward if can_compile(self.layers, embedded) else partial(self.compute, mx.nd)
        return tuple(forward(embedded, keys, values, lengths, *state))

    def compute(self, F: Any, embedded: Array, keys: Array, values: Array, lengths: Array, *state: Array) -> Tuple[Array, ...]:
        after: List[Array] = []
        outputs = embedded
        for i, layer in enumerate(self.layers):
            before = state[i * layer.num_states : (i + 1) * layer.num_states]
            outputs, *states = layer(self.dropout(outputs) if i else outputs, *before)
            after += states
        return (*self.attention(F.swapaxes(outputs, dim1=0, dim2=1), keys, values, lengths), *after)


def _rows(F: Any, outputs: Array, places: Array) -> Array:
    return F.take(F.reshape(outputs, shape=(-3, 0)), places)


def _check_inputs(X: Any) -> Tuple[Array, Array, Array]:
    wanted = "expected (source, lengths, target), MXNet arrays of shapes (N, S), (N,), (N, T). PairLoader makes them"
    if isinstance(X, (list, tuple)) and any(isinstance(array, mx.sym.Symbol) for array in X):
        raise TrainerError(
            "Seq2Seq: got symbols, of a block around it that is compiled; expected MXNet arrays. Hybridize the Seq2Seq alone."
        )
    if not isinstance(X, (list, tuple)) or len(X) != 3 or not all(is_device_array(array) for array in X):
        found = [type(array).__name__ for array in X] if isinstance(X, (list, tuple)) else type(X).__name__
        raise TrainerError(f"Seq2Seq: got {found}; {wanted}.")
    source, lengths, target = X
    ranks = (source.ndim, lengths.ndim, target.ndim)
    if ranks != (2, 1, 2) or not source.shape[0] == lengths.shape[0] == target.shape[0]:
        raise TrainerError(f"Seq2Seq: got arrays of shapes {source.shape}, {lengths.shape}, {target.shape}; {wanted}.")
    return source, lengths, target

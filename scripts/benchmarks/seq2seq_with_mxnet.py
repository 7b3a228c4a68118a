"""The contenders of the seq2seq benchmark on MXNet: ours, and loops around cells unrolled by hand."""

from __future__ import annotations

import importlib
from typing import Any, Dict, List, Tuple

import mxnet as mx
import numpy as np
from case import Case
from mxnet import autograd, gluon, init
from mxnet.gluon import nn, rnn
from sentences import Sentences, read_batches

_OPTIMIZER = ("adam", {"learning_rate": 0.001})
_DROPOUT = 0.3


class Ours:
    """Seq2Seq and SequenceLoss with their defaults, compiled, trained by fit()."""

    way = "bucketed"

    def __init__(self, case: Case) -> None:
        self.mgpu: Any = importlib.import_module("gluon_mgpu")
        models: Any = importlib.import_module("gluon_mgpu.models")
        contexts = [mx.Context(case.device, i) for i in range(case.num_devices)]
        ctx = list(self.mgpu.resolve_devices(contexts))
        mx.random.seed(0)
        sizes = {"embed_size": case.embed_size, "hidden_size": case.units}
        self.net = models.Seq2Seq(case.source_vocabulary, case.target_vocabulary, **sizes)
        self.net.initialize(init.Xavier(), ctx=ctx)
        self.loss = models.SequenceLoss()
        if case.hybridize:
            self.net.hybridize()
            self.loss.hybridize()
        self.trainer = self.mgpu.Trainer(self.net, *_OPTIMIZER)
        self.batches = [
            ((batch.source, batch.source_length, batch.target_input), (batch.target_output, batch.target_length))
            for batch in read_batches(case.corpus, self.way)
        ]
        for _ in range(2):
            self.train()
            self.wait()

    @classmethod
    def versions(cls) -> Dict[str, str]:
        """Return the versions of the libraries of this contender."""
        return {"gluon_mgpu": importlib.import_module("gluon_mgpu").__version__, "mxnet": mx.__version__}

    def train(self) -> None:
        """Train on every batch once."""
        self.mgpu.fit(self.net, self.loss, self.trainer, self.batches, epochs=1, metrics=(), callbacks=())

    def wait(self) -> None:
        """Wait for the devices."""
        mx.nd.waitall()


class OursPadded(Ours):
    """The same with every sentence padded to the longest one of the text."""

    way = "padded"


class Cells:
    """Gluon's own loop, with GRU cells unrolled to a fixed length. It waits for each batch and reads its losses.

    Attention is over positions: a Dense layer computes their weights from the decoder's input and state.
    """

    def __init__(self, case: Case) -> None:
        self.ctx = [mx.Context(case.device, i) for i in range(case.num_devices)]
        mx.random.seed(0)
        self.net = self.make_net(case)
        self.net.initialize(init.Xavier(), ctx=self.ctx)
        self.loss = LengthMean()
        if case.hybridize:
            self.net.hybridize()
            self.loss.hybridize()
        self.trainer = gluon.Trainer(self.net.collect_params(), *_OPTIMIZER)
        self.batches = read_batches(case.corpus, "fixed")
        self.train()

    @classmethod
    def versions(cls) -> Dict[str, str]:
        """Return the versions of the libraries of this contender."""
        return {"mxnet": mx.__version__, "numpy": np.__version__}

    def make_net(self, case: Case) -> gluon.Block:
        """Return the network."""
        return PositionSeq2Seq(case)

    def train(self) -> List[float]:
        """Train on every batch once, and return the mean losses."""
        return [self.step(batch) for batch in self.batches]

    def step(self, batch: Sentences) -> float:
        """Train on one batch, and return its mean loss."""
        arrays = [mx.nd.array(array, dtype="int32") for array in batch]
        shards = zip(*(gluon.utils.split_and_load(array, self.ctx, even_split=False) for array in arrays))
        with autograd.record():
            losses = [
                self.loss(self.net(source, source_length, target_input), target_output, target_length)
                for source, source_length, target_input, target_output, target_length in shards
            ]
        for loss in losses:
            loss.backward()
        self.trainer.step(len(batch.source))
        mean = np.mean([loss.mean().asscalar() for loss in losses])
        mx.nd.waitall()
        return float(mean)

    def wait(self) -> None:
        """Wait for the devices."""
        mx.nd.waitall()


class Post(Cells):
    """The same loop around the network of the Korean post, which is larger for the same numbers of units and tokens."""

    def make_net(self, case: Case) -> gluon.Block:
        return PostSeq2Seq(case)


class PositionSeq2Seq(nn.HybridBlock):  # type: ignore[misc]
    """Cells of a fixed length; attention is the mean of the encoder's outputs, weighted by a Dense layer."""

    def __init__(self, case: Case, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_tokens, units, embed = case.num_tokens, case.units, case.embed_size
        with self.name_scope():
            self.source_embedding = nn.Embedding(case.source_vocabulary, embed)
            self.target_embedding = nn.Embedding(case.target_vocabulary, embed)
            self.encoder = rnn.GRUCell(units, input_size=embed)
            self.positions = nn.Dense(case.num_tokens, in_units=embed + units)
            self.decoder = rnn.GRUCell(units, input_size=embed + units)
            self.output = nn.Dense(case.target_vocabulary, in_units=units)

    def hybrid_forward(self, F: Any, source: Any, source_length: Any, target_input: Any) -> Any:
        """Return scores, shape (B, T, vocabulary)."""
        values, state = encode(F, self.encoder, self.source_embedding(source), self.num_tokens, source_length)
        scores = []
        for one in steps_of(F, self.target_embedding(target_input), self.num_tokens):
            weights = F.softmax(self.positions(F.concat(one, state[0], dim=1)))
            seen = F.batch_dot(F.expand_dims(weights, axis=1), values).reshape((0, -1))
            vector, state = self.decoder(F.concat(one, seen, dim=1), state)
            scores.append(self.output(vector))
        return F.stack(*scores, axis=1)


class PostSeq2Seq(nn.HybridBlock):  # type: ignore[misc]
    """The architecture of the Korean post.

    The encoder's outputs are weighted by position and not summed. Flattened, they pass through a Dense layer as wide as the
    vocabulary, whose output is the decoder's input at that step. Both languages share one embedding.

    Source: github.com/haven-jeon/ko_en_neural_machine_translation, model.py. Two differences: the outputs of the steps are
    joined once, not at each step, and embeddings are float32.
    """

    def __init__(self, case: Case, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_tokens, units, embed = case.num_tokens, case.units, case.embed_size
        vocabulary = max(case.source_vocabulary, case.target_vocabulary)
        with self.name_scope():
            self.embedding = nn.Embedding(vocabulary, embed)
            self.encoder = rnn.GRUCell(units, input_size=embed)
            self.positions = nn.Dense(case.num_tokens, in_units=embed + units)
            self.dropout = nn.Dropout(_DROPOUT)
            self.combine = nn.Dense(vocabulary, in_units=embed + case.num_tokens * units)
            self.decoder = rnn.GRUCell(units, input_size=vocabulary)
            self.norm = nn.BatchNorm(axis=2, in_channels=units)
            self.output = nn.Dense(vocabulary, flatten=False, in_units=units)

    def hybrid_forward(self, F: Any, source: Any, source_length: Any, target_input: Any) -> Any:
        """Return scores, shape (B, T, vocabulary)."""
        values, state = encode(F, self.encoder, self.embedding(source), self.num_tokens, source_length)
        vectors = []
        for one in steps_of(F, self.embedding(target_input), self.num_tokens):
            weights = F.softmax(self.positions(F.concat(one, state[0], dim=1)))
            seen = F.broadcast_mul(values, F.expand_dims(weights, axis=2))
            combined = self.combine(self.dropout(F.concat(one, F.flatten(seen), dim=1)))
            vector, state = self.decoder(combined, state)
            vectors.append(vector)
        return self.output(self.norm(F.stack(*vectors, axis=1)))


class LengthMean(nn.HybridBlock):  # type: ignore[misc]
    """Cross-entropy: the mean over each sentence's tokens without padding."""

    def hybrid_forward(self, F: Any, scores: Any, tokens: Any, lengths: Any) -> Any:
        """Return the losses, shape (B,)."""
        losses = -F.pick(F.log_softmax(scores), tokens)
        masked = F.SequenceMask(losses, lengths, use_sequence_length=True, axis=1)
        return F.sum(masked, axis=1) / F.cast(lengths, "float32")


def encode(F: Any, cell: rnn.GRUCell, embedded: Any, num_tokens: int, lengths: Any) -> Tuple[Any, List[Any]]:
    """Return a cell's outputs, shape (B, T, units), zero at padding, and its state after the last token of each sentence."""
    outputs, _ = cell.unroll(num_tokens, embedded, layout="NTC", merge_outputs=True)
    values = F.SequenceMask(outputs, lengths, use_sequence_length=True, axis=1)
    return values, [F.SequenceLast(outputs, lengths, use_sequence_length=True, axis=1)]


def steps_of(F: Any, array: Any, num_tokens: int) -> List[Any]:
    """Return the steps of an array of shape (B, T, ...)."""
    return list(F.split(array, num_tokens, axis=1, squeeze_axis=True))

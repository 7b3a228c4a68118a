"""A translator as two graphs, an encoder and one step of its decoder, with its vocabularies in one folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Dict, List, Tuple

import mxnet as mx
import numpy as np

from ..errors import TrainerError
from ..models import Seq2Seq
from ..models.seq2seq.beam_search import EXTRA_TOKENS, LENGTH_FACTOR, MAX_REPEATS
from ..models.seq2seq.translator import Translator
from ..trainer.parameters import average_replicas, devices_of
from ..trainer.replica_check import ReplicaComparison
from . import onnx_translator
from .sampled_graph import ExportGraph, Inputs, Outputs, array_on, complete, legacy_mode
from .write_onnx import Group

CONFIG_FILE, PROGRAM = "translator.json", "translate.py"
FILES = ("encoder.onnx", "decoder.onnx", "source.vocab", "target.vocab", CONFIG_FILE, PROGRAM)
_BATCH, _STEPS = 3, 7  # of the sample


@legacy_mode()
def graphs_of(net: Seq2Seq) -> Dict[str, Tuple[ExportGraph, List[Group]]]:
    """Return the encoder, and one step of the decoder, with the axes that may vary: the batch, and the source's steps.

    ```
    source (N, S), lengths (N,)                             ─► encoder ─► states (N, H) ..., keys (N, S, H), values (N, S, 2 H)
    token (N, 1), keys, values, lengths, states             ─► decoder ─► scores (N, V), states, weights (N, S, 1)
    ```

    Raises
    ------
    TrainerError
        A subclass computes with its own `encode` or `decode`.
    """
    if net._is_overridden():
        raise TrainerError(
            f"export: got a {type(net).__name__} with its own encode or decode; expected those of models.Seq2Seq, which "
            "can be traced. Export its parts as HybridBlocks."
        )
    average_replicas(net)
    ReplicaComparison("export", net).check()
    context = devices_of(net)[0]
    rng = np.random.RandomState(0)
    source = rng.randint(0, net.source_vocab_size, (_BATCH, _STEPS)).astype("int32")
    lengths = rng.randint(1, _STEPS + 1, _BATCH).astype("int32")
    token = rng.randint(0, net.target_vocab_size, (_BATCH, 1)).astype("int32")

    @legacy_mode()
    def encode(inputs: Inputs) -> Outputs:
        state, (keys, values, _) = net.encode(array_on(context, inputs["source"]), array_on(context, inputs["lengths"]))
        return [one.asnumpy() for one in (*state, keys, values)]

    @legacy_mode()
    def decode(inputs: Inputs) -> Outputs:
        given = {name: array_on(context, value) for name, value in inputs.items()}
        state = tuple(given[f"state{i}"] for i in range(len(given) - 4))
        scores, after, weights = net.decode(given["token"], state, (given["keys"], given["values"], given["lengths"]))
        return [one.asnumpy() for one in (scores.reshape((len(inputs["token"]), -1)), *after, weights)]

    read = {"source": source, "lengths": lengths}
    *state, keys, values = encode(read)
    states = {f"state{i}": one for i, one in enumerate(state)}
    written = {"token": token, "keys": keys, "values": values, "lengths": lengths, **states}
    encoder = complete(_encoder(net), net, read, encode)
    decoder = complete(_decoder(net, len(state)), net, written, decode)
    return {
        "encoder": (encoder, [[("source", 0), ("lengths", 0)], [("source", 1)]]),
        "decoder": (decoder, [[(name, 0) for name in written], [("keys", 1), ("values", 1)]]),
    }


def _encoder(net: Seq2Seq) -> Any:
    """Return the symbol of `net.encode`, with the inputs that it computes in Python as part of the graph."""
    F = mx.sym
    source, lengths = F.var("source"), F.var("lengths")
    by_step = F.transpose(source)
    places = F.cast(F.contrib.arange_like(F.cast(by_step, dtype="float32")), dtype="int32")
    backwards = F.SequenceReverse(places, lengths, use_sequence_length=True)
    column = F.expand_dims(F.zeros_like(F.cast(lengths, dtype="float32")), axis=1)
    zeros = F.broadcast_axis(column, axis=1, size=net.encoder.hidden_size)
    state, (keys, values, _) = net._encode(F, source, lengths, backwards, zeros)
    return F.Group([*state, keys, values])


def _decoder(net: Seq2Seq, num_states: int) -> Any:
    """Return the symbol of `net.decode` for one token."""
    F = mx.sym
    token, memory = F.var("token"), tuple(F.var(name) for name in ("keys", "values", "lengths"))
    states = tuple(F.var(f"state{i}") for i in range(num_states))
    scores, after, weights = net._decode(F, token, states, memory)
    return F.Group([F.reshape(scores, shape=(-3, 0)), *after, weights])


def write_rest(translator: Translator, folder: Path) -> None:
    """Write what belongs to the two graphs: the vocabularies, and a program that translates."""
    translator.source_vocabulary.save(folder / "source.vocab")
    translator.target_vocabulary.save(folder / "target.vocab")
    limits = {"length_factor": LENGTH_FACTOR, "extra_tokens": EXTRA_TOKENS, "max_repeats": MAX_REPEATS}
    (folder / CONFIG_FILE).write_text(json.dumps({**limits, **translator.config()}, indent=1), encoding="utf-8")
    shutil.copyfile(onnx_translator.__file__, folder / PROGRAM)

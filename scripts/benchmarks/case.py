"""Case: a workload with its sizes, the same for every contender."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A workload with its sizes. It is sent to the contender's process as JSON.

    Attributes
    ----------
    workload : str
        `step`, `train`, `evaluate` or `seq2seq`: selects what a round runs (`measure.run_round`).
    network : str
        `mlp`: `num_layers` Dense layers of `units`. `resnet18`: images of `image_size`.
    num_devices : int
        Contexts, or processes of torch-ddp.
    device : str
        `cpu` or `gpu`.
    hybridize : bool
        Compile the network with static memory, where it can be compiled.
    batch_size : int
        Over all devices.
    num_batches : int
        Batches per pass over the data.
    repeats, num_steps : int
        In each round: calls of each part of a step, and steps queued before each wait.
    corpus : str
        Folder with the batches of `seq2seq`; see `sentences`.
    num_sentences, num_tokens : int
        Sentences in the corpus, and the most tokens in one.
    source_vocabulary, target_vocabulary, embed_size : int
        Sizes of the network of `seq2seq`.
    """

    workload: str
    network: str = "mlp"
    num_devices: int = 1
    device: str = "cpu"
    hybridize: bool = True
    batch_size: int = 64
    num_batches: int = 1
    num_layers: int = 31
    units: int = 32
    image_size: int = 28
    repeats: int = 10
    num_steps: int = 20
    corpus: str = ""
    num_sentences: int = 0
    num_tokens: int = 30
    source_vocabulary: int = 0
    target_vocabulary: int = 0
    embed_size: int = 0

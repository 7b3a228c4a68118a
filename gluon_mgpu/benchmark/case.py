"""Case: what one contender is asked to build, then to run in every round."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A workload with its sizes. It travels to the contender's process as JSON.

    Attributes
    ----------
    workload : str
        `step`, `memory`, `train`, `evaluate`, `size` or `seq2seq`: what `measure.run_round` does in a round.
    network : str
        `mlp`: `num_layers` Dense layers of `units`. `resnet18`: images of `image_size`. `many`: `num_params` vectors that
        hold `total_size` numbers together.
    num_devices : int
        Contexts, or processes of torch-ddp.
    device : str
        `cpu` or `gpu`.
    hybridize : bool
        Compile the network with its memory kept, where it can be compiled.
    batch_size : int
        Over all devices.
    num_batches : int
        Of a pass over the data.
    repeats, num_steps : int
        In each round: calls of each part of a step, and steps that are queued before one wait.
    first_steps, last_steps : int
        When memory is read.
    corpus : str
        Folder with the batches of `seq2seq`; see `sentences`.
    num_sentences, num_tokens : int
        Of the corpus, and of a sentence at most.
    source_vocabulary, target_vocabulary, embed_size : int
        Of the network of `seq2seq`.
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
    num_params: int = 62
    total_size: int = 2**18
    repeats: int = 10
    num_steps: int = 20
    first_steps: int = 100
    last_steps: int = 2000
    corpus: str = ""
    num_sentences: int = 0
    num_tokens: int = 30
    source_vocabulary: int = 0
    target_vocabulary: int = 0
    embed_size: int = 0

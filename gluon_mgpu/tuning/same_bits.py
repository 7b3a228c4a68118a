"""Does a training have the same bits on other devices and in other processes? Hashes of its weights and gradients say so."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple, Union

import mxnet as mx
import numpy as np
from mxnet import Context, gluon

from ..data import load_digits
from ..data_parallel.step import train_batch
from ..devices.select import use_devices
from ..distributed.process import this_process
from ..errors import StepError, TrainerError
from ..mxnet_internals.parameters import structural_params
from ..runtime.determinism import seed_everything
from ..trainer.trainer import Trainer
from .agreement import NETWORKS, Recipe
from .workload import load_workload

Hashes = List[Dict[str, str]]  # for each step, by the names of the tensors; "a / b" where devices differ


@dataclass(frozen=True)
class Training:
    """A training that is repeated with the same batches.

    Attributes
    ----------
    workload : str
        `mlp` or `resnet18`, on the digits; or a function as of `find_batch_size`, which returns (net, loss, trainer, X, y).
    num_steps, num_shards, batch_size : int
    optimizer : str
    learning_rate : float
        Of the networks of this module.
    """

    workload: str
    num_steps: int = 50
    num_shards: int = 8
    batch_size: int = 32
    optimizer: str = "sgd"
    learning_rate: float = 0.05

    def make(self, contexts: Sequence[Context]) -> Tuple[gluon.Block, Any, Trainer, Iterator[Tuple[Any, Any]]]:
        """Return network, loss, trainer and batches, the same ones each time."""
        seed_everything(0)
        if self.workload in NETWORKS:
            build, lr = NETWORKS[self.workload], self.learning_rate
            recipe = Recipe(build, load_digits(), self.batch_size, self.num_steps, lr, self.optimizer)
            net = recipe.network(contexts)
            return net, gluon.loss.SoftmaxCrossEntropyLoss(), Trainer(net, self.optimizer, recipe.params()), recipe.batches()
        made = load_workload("agree", self.workload)(self.batch_size, list(contexts))
        if not isinstance(made, tuple) or len(made) != 5 or not isinstance(made[2], Trainer):
            raise TrainerError(
                f"agree: got {type(made).__name__} from {self.workload}; expected the arguments of train_batch. Return "
                "(net, loss, trainer, X, y), with a gluon_mgpu.Trainer."
            )
        net, loss, trainer, X, y = made
        return net, loss, trainer, iter([(X, y)] * self.num_steps)


def train_bits(training: Training, devices: Union[str, Sequence[Context]]) -> Hashes:
    """Train on devices of this process, with one thread for each CPU context, and return the hashes of each step."""
    found = []
    with use_devices(devices, one_thread=True) as ctx:
        net, loss, trainer, batches = training.make(ctx)
        trainer.steps.use_virtual_shards(training.num_shards)
        for X, y in batches:
            train_batch(net, loss, trainer, X, y)
            mx.nd.waitall()  # running statistics are written without the engine's knowledge
            arrays = {}
            for name, param in structural_params(net).items():
                arrays[f"weight {name}"] = param.list_data()
                if param.grad_req != "null":
                    arrays[f"gradient {name}"] = param.list_grad()
            found.append({name: _joined(map(_hash, replicas)) for name, replicas in arrays.items()})
    return found


def train_in_processes(training: Training, num_processes: int, kind: str) -> Hashes:
    """Train in several processes of this machine, each with one device of a kind."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "training.json").write_text(json.dumps([asdict(training), kind]), encoding="utf-8")
        launch = ["launch", "-n", str(num_processes), "--log-dir", str(Path(folder) / "logs"), "-m", __name__, folder]
        command = [sys.executable, "-m", "gluon_mgpu", *launch]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            lines = done.stdout.strip().splitlines() or ["no output"]
            last = ([line for line in lines if "Error" in line] or lines)[-1]  # after it, the launcher names logs that go
            raise StepError(
                f"agree: got {num_processes} processes that ended with exit status {done.returncode} ({last}); expected a step "
                "that trains. Check that the network trains with gluon-mgpu launch, or pass --processes 1."
            )
        parts = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(num_processes)]
    return [{name: _joined(step[name] for step in same) for name in same[0]} for same in zip(*parts)]


def compare(reference: Hashes, other: Hashes) -> Optional[Tuple[int, List[str]]]:
    """Return the first step, from 1, after which two trainings differ, and the tensors that do; None if there is none."""
    for number, (one, two) in enumerate(zip(reference, other), 1):
        tensors = [name for name in one if one[name] != two.get(name)]
        if tensors:
            return number, tensors
    return None


def _joined(hashes: Any) -> str:
    return " / ".join(dict.fromkeys(hashes))


def _hash(array: Any) -> str:
    """Return the SHA-256 hash of an array's dtype, shape and bytes."""
    values = np.ascontiguousarray(array.asnumpy())
    return hashlib.sha256(f"{values.dtype} {values.shape} ".encode() + values.tobytes()).hexdigest()


if __name__ == "__main__":  # a process of a job
    training_, kind_ = json.loads((Path(sys.argv[1]) / "training.json").read_text(encoding="utf-8"))
    hashes = train_bits(Training(**training_), f"{kind_}:0")
    (Path(sys.argv[1]) / f"{this_process().rank}.json").write_text(json.dumps(hashes), encoding="utf-8")

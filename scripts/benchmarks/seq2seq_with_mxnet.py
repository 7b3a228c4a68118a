"""The contenders of the seq2seq benchmark on MXNet: `models.Seq2Seq`, trained by ours and by Gluon's own loop."""

from __future__ import annotations

import importlib
from typing import Any, Dict

import mxnet as mx
from case import Case
from mxnet import autograd, gluon, init
from sentences import read_batches

_OPTIMIZER = ("adam", {"learning_rate": 0.001})


class Ours:
    """Seq2Seq and SequenceLoss with their defaults, trained by fit()."""

    compiled = "auto"  # the default of fit

    def __init__(self, case: Case) -> None:
        self.mgpu: Any = importlib.import_module("gluon_mgpu")
        models: Any = importlib.import_module("gluon_mgpu.models")
        self.ctx = list(self.mgpu.devices.resolve_devices([mx.Context(case.device, i) for i in range(case.num_devices)]))
        mx.random.seed(0)
        sizes = {"embed_size": case.embed_size, "hidden_size": case.units}
        self.net = models.Seq2Seq(case.source_vocabulary, case.target_vocabulary, **sizes)
        self.net.initialize(init.Xavier(), ctx=self.ctx)
        self.loss = models.SequenceLoss()
        if case.hybridize:
            self.net.hybridize()
            self.loss.hybridize()
        self.trainer = self.make_trainer()
        self.batches = [
            ((batch.source, batch.source_length, batch.target_input), (batch.target_output, batch.target_length))
            for batch in read_batches(case.corpus)
        ]
        for _ in range(2):
            self.train()
            self.wait()

    @classmethod
    def versions(cls) -> Dict[str, str]:
        """Return the versions of the libraries of this contender."""
        return {"gluon_mgpu": importlib.import_module("gluon_mgpu").__version__, "mxnet": mx.__version__}

    def make_trainer(self) -> gluon.Trainer:
        """Return the trainer."""
        return self.mgpu.Trainer(self.net, *_OPTIMIZER)

    def train(self) -> None:
        """Train on every batch once."""
        options = {"metrics": (), "callbacks": (), "compiled": self.compiled}
        self.mgpu.fit(self.net, self.loss, self.trainer, self.batches, epochs=1, **options)

    def wait(self) -> None:
        """Wait for the devices."""
        mx.nd.waitall()


class OursCompiled(Ours):
    """The same with compiled passes."""

    compiled = "on"


class Gluon(Ours):
    """The same network and batches with Gluon's loop: split_and_load, one backward pass per shard, gluon.Trainer.

    It has the settings of ours, so that only the loops differ.
    """

    def make_trainer(self) -> gluon.Trainer:
        """Return Gluon's trainer."""
        return gluon.Trainer(self.net.collect_params(), *_OPTIMIZER)

    def train(self) -> None:
        """Train on every batch once."""
        for data, label in self.batches:
            shards = zip(*(self.split(array) for array in (*data, *label)))
            with autograd.record():
                losses = [self.loss(self.net(*arrays[:3]), arrays[3:]) for arrays in shards]
            for loss in losses:
                loss.backward()
            self.trainer.step(int(label[1].sum()))

    def split(self, array: Any) -> Any:
        """Return the shards of an array."""
        return gluon.utils.split_and_load(mx.nd.array(array, dtype=array.dtype), self.ctx, even_split=False)

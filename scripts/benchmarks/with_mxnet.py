"""The contenders on MXNet: ours, Gluon's own loop, d2l's functions, GluonCV's DataParallelModel."""

from __future__ import annotations

import importlib
from typing import Any, Dict, List, Tuple

import mxnet as mx
import numpy as np
from case import Case
from measure import NUM_CLASSES, inputs
from mxnet import autograd, gluon, init
from mxnet.gluon import nn

_OPTIMIZER = ("sgd", {"learning_rate": 0.01, "momentum": 0.9})
_WARM_UP_STEPS = 3


class Gluon:
    """The loop of Gluon's tutorials: split_and_load, one backward pass per shard, gluon.Trainer with its defaults."""

    parts: Tuple[str, ...] = ("split", "forward", "backward", "update")

    def __init__(self, case: Case) -> None:
        self.case = case
        self.ctx = self.make_devices()
        mx.random.seed(0)
        self.net = self.make_net()
        self.net.initialize(init.Xavier(), ctx=self.ctx)
        if case.hybridize:
            self.hybridize()
        self.loss = gluon.loss.SoftmaxCrossEntropyLoss()
        self.batches = [(self.array(X), self.array(y)) for X, y in inputs(case)]
        self.X, self.y = self.batches[0]
        if case.workload == "evaluate":
            self.evaluate()
            return
        self.trainer = self.make_trainer()
        for _ in range(_WARM_UP_STEPS):
            self.step()
        self.wait()

    @classmethod
    def versions(cls) -> Dict[str, str]:
        """Return the versions of the libraries of this contender."""
        return {"mxnet": mx.__version__, "numpy": np.__version__}

    def make_devices(self) -> List[mx.Context]:
        return [mx.Context(self.case.device, i) for i in range(self.case.num_devices)]

    def make_net(self) -> gluon.Block:
        if self.case.network == "resnet18":
            return importlib.import_module("gluon_mgpu.models.resnet").resnet18(NUM_CLASSES)
        return mlp(self.case.num_layers, self.case.units)

    def hybridize(self) -> None:
        self.net.hybridize(static_alloc=True, static_shape=True)

    def make_trainer(self) -> gluon.Trainer:
        return gluon.Trainer(self.net.collect_params(), *_OPTIMIZER)

    def array(self, values: np.ndarray) -> Any:
        return mx.nd.array(values, dtype=values.dtype)

    def split(self) -> None:
        self.Xs = gluon.utils.split_and_load(self.X, self.ctx)
        self.ys = gluon.utils.split_and_load(self.y, self.ctx)

    def forward(self) -> None:
        with autograd.record():
            self.losses = [self.loss(self.net(X), y) for X, y in zip(self.Xs, self.ys)]

    def backward(self) -> None:
        for loss in self.losses:
            loss.backward()

    def update(self) -> None:
        self.trainer.step(self.case.batch_size)

    def step(self) -> None:
        self.split()
        self.forward()
        self.backward()
        self.update()

    def evaluate(self) -> float:
        metric = mx.metric.Accuracy()
        for X, y in self.batches:
            Xs = gluon.utils.split_and_load(X, self.ctx)
            ys = gluon.utils.split_and_load(y, self.ctx)
            metric.update(ys, [self.net(X) for X in Xs])
        return float(metric.get()[1])

    def wait(self) -> None:
        mx.nd.waitall()


class Ours(Gluon):
    """The loop with gluon_mgpu: use_devices, split_batch, backward, Trainer, evaluate_accuracy_gpus."""

    def __init__(self, case: Case) -> None:
        self.mgpu: Any = importlib.import_module("gluon_mgpu")
        super().__init__(case)

    @classmethod
    def versions(cls) -> Dict[str, str]:
        return {"gluon_mgpu": importlib.import_module("gluon_mgpu").__version__, **super().versions()}

    def make_devices(self) -> List[mx.Context]:
        return list(self.mgpu.devices.resolve_devices(super().make_devices()))

    def make_trainer(self) -> gluon.Trainer:
        return self.mgpu.Trainer(self.net, *_OPTIMIZER)

    def split(self) -> None:
        self.Xs, self.ys = self.mgpu.split_batch(self.X, self.y, self.ctx)

    def backward(self) -> None:
        self.trainer.backward(self.losses)

    def evaluate(self) -> float:
        return float(self.mgpu.evaluate_accuracy_gpus(self.net, self.batches))


class OursCompiled(Ours):
    """Ours with compiled passes."""

    parts = ()  # its step is one function

    def make_trainer(self) -> gluon.Trainer:
        trainer = super().make_trainer()
        self.compiled = self.mgpu.compile_step(self.net, self.loss, trainer)
        return trainer

    def step(self) -> None:
        self.compiled(self.X, self.y)


class D2L(Gluon):
    """The functions of the book "Dive into Deep Learning" as published: train_batch_ch13, evaluate_accuracy_gpus."""

    parts = ("split",)  # the rest of its step is one function, which also reads loss and accuracy

    def __init__(self, case: Case) -> None:
        self.d2l: Any = importlib.import_module("d2l.mxnet")
        mx.npx.set_np()
        super().__init__(case)

    @classmethod
    def versions(cls) -> Dict[str, str]:
        return {"d2l": importlib.import_module("d2l").__version__, **super().versions()}

    def make_net(self) -> gluon.Block:
        return self.d2l.resnet18(NUM_CLASSES) if self.case.network == "resnet18" else super().make_net()

    def hybridize(self) -> None:
        if self.case.network != "resnet18":  # the book builds it from Blocks, which cannot be compiled
            super().hybridize()

    def array(self, values: np.ndarray) -> Any:
        return mx.np.array(values, dtype=values.dtype)

    def split(self) -> None:
        self.d2l.split_batch(self.X, self.y, self.ctx)

    def step(self) -> None:
        self.d2l.train_batch_ch13(self.net, self.X, self.y, self.loss, self.trainer, self.ctx)

    def evaluate(self) -> float:
        return float(self.d2l.evaluate_accuracy_gpus(self.net, self.batches))


class GluonCV(Gluon):
    """GluonCV's DataParallelModel and DataParallelCriterion, and gluon.Trainer, all with their defaults."""

    parts = ("forward", "backward", "update")  # forward includes the split

    def __init__(self, case: Case) -> None:
        self.parallel: Any = importlib.import_module("gluoncv.utils.parallel")
        super().__init__(case)

    @classmethod
    def versions(cls) -> Dict[str, str]:
        return {"gluoncv": importlib.import_module("gluoncv").__version__, **super().versions()}

    def make_trainer(self) -> gluon.Trainer:
        self.model = self.parallel.DataParallelModel(self.net, self.ctx)
        self.criterion = self.parallel.DataParallelCriterion(self.loss, self.ctx)
        return super().make_trainer()

    def split(self) -> None:
        pass

    def forward(self) -> None:
        with autograd.record():
            self.losses = self.criterion(self.model(self.X), self.y)

    def backward(self) -> None:
        autograd.backward(list(self.losses))


def mlp(num_layers: int, units: int) -> gluon.Block:
    """Return Dense layers with ReLU between them: two parameters per layer."""
    net = nn.HybridSequential()
    for _ in range(num_layers - 1):
        net.add(nn.Dense(units, activation="relu"))
    net.add(nn.Dense(NUM_CLASSES))
    return net

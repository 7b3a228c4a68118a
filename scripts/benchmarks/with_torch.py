"""The contenders on PyTorch: eager, compiled, and two processes with DistributedDataParallel."""

from __future__ import annotations

import importlib
import multiprocessing
import os
from datetime import timedelta
from typing import Any, Dict, List

from case import Case
from measure import NUM_CLASSES, inputs

_WARM_UP_STEPS = 3
_TIMEOUT_S = 60.0


class Eager:
    """One process, with as many threads as its environment says."""

    # PyTorch's calls return when the CPU has finished, MXNet's when the work is queued: only whole steps are comparable.
    parts = ()

    def __init__(self, case: Case) -> None:
        if case.device != "cpu":
            raise NotImplementedError(f"this contender runs on the CPU only, not on {case.device}")
        self.case = case
        self.torch = torch = importlib.import_module("torch")
        torch.manual_seed(0)
        self.batches = [(torch.from_numpy(X), torch.from_numpy(y).long()) for X, y in inputs(case)]
        net = resnet18(torch) if case.network == "resnet18" else mlp(torch, case)
        self.model = self.wrap(net)
        self.loss = torch.nn.CrossEntropyLoss()
        if case.workload == "evaluate":
            self.model.eval()
            self.evaluate()
            return
        self.X, self.y = self.my_share(*self.batches[0])
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
        for _ in range(_WARM_UP_STEPS):
            self.step()

    @classmethod
    def versions(cls) -> Dict[str, str]:
        """Return the versions of the libraries of this contender."""
        return {"torch": importlib.import_module("torch").__version__}

    def wrap(self, net: Any) -> Any:
        return net

    def my_share(self, X: Any, y: Any) -> Any:
        return X, y

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss(self.model(self.X), self.y).backward()
        self.optimizer.step()

    def evaluate(self) -> float:
        with self.torch.inference_mode():
            right = sum((self.model(X).argmax(1) == y).sum() for X, y in self.batches)
        return float(right) / (self.case.batch_size * self.case.num_batches)

    def wait(self) -> None:
        pass


class Compiled(Eager):
    """The same with torch.compile, which needs a C++ compiler."""

    def wrap(self, net: Any) -> Any:
        return self.torch.compile(net)


class Rank(Eager):
    """One of several processes, with its share of every batch."""

    def __init__(self, case: Case, rank: int, rendezvous: str) -> None:
        self.rank = rank
        importlib.import_module("torch.distributed").init_process_group(
            "gloo", f"file://{rendezvous}", timedelta(seconds=_TIMEOUT_S), case.num_devices, rank
        )
        super().__init__(case)

    def wrap(self, net: Any) -> Any:
        return importlib.import_module("torch.nn.parallel").DistributedDataParallel(net)

    def my_share(self, X: Any, y: Any) -> Any:
        share = slice(self.rank, None, self.case.num_devices)
        return X[share].contiguous(), y[share].contiguous()


class DDP:
    """DistributedDataParallel with gloo over the loopback: this process and those it starts, each with a share of the batch."""

    parts = ()

    def __init__(self, case: Case) -> None:
        rendezvous = os.path.abspath(f"rendezvous-{os.getpid()}")  # `compare` removes the working directory
        context = multiprocessing.get_context("fork")  # nothing has been computed yet, so no state is inherited
        self.others: List[Any] = []
        for rank in range(1, case.num_devices):
            here, there = context.Pipe()
            context.Process(target=_follow, args=(case, rank, rendezvous, there, here), daemon=True).start()
            there.close()
            self.others.append(here)
        self.first = Rank(case, 0, rendezvous)

    versions = Eager.versions

    def step(self) -> None:
        for other in self.others:
            other.send("step")
        self.first.step()

    def wait(self) -> None:
        pass


def _follow(case: Case, rank: int, rendezvous: str, requests: Any, other_end: Any) -> None:
    """Make a step whenever rank 0 does, until rank 0 ends."""
    other_end.close()  # else this process would keep the pipe open
    follower = Rank(case, rank, rendezvous)
    while True:
        try:
            requests.recv()
        except EOFError:
            return
        follower.step()


def mlp(torch: Any, case: Case) -> Any:
    """Return the same network as `with_mxnet.mlp`."""
    layers: List[Any] = []
    for _ in range(case.num_layers - 1):
        layers += [torch.nn.Linear(case.units, case.units), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(case.units, NUM_CLASSES))


def resnet18(torch: Any) -> Any:
    """Return the same network as `gluon_mgpu.models.resnet18`, for images of one channel."""
    nn = torch.nn

    class Residual(nn.Module):  # type: ignore[name-defined]
        def __init__(self, num_inputs: int, num_channels: int, use_1x1conv: bool, strides: int) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(num_inputs, num_channels, 3, stride=strides, padding=1)
            self.conv2 = nn.Conv2d(num_channels, num_channels, 3, padding=1)
            self.conv3 = nn.Conv2d(num_inputs, num_channels, 1, stride=strides) if use_1x1conv else nn.Identity()
            self.bn1, self.bn2 = nn.BatchNorm2d(num_channels), nn.BatchNorm2d(num_channels)

        def forward(self, X: Any) -> Any:
            Y = torch.relu(self.bn1(self.conv1(X)))
            return torch.relu(self.bn2(self.conv2(Y)) + self.conv3(X))

    layers: List[Any] = [nn.Conv2d(1, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()]
    num_inputs = 64
    for stage, num_channels in enumerate((64, 128, 256, 512)):
        layers += [
            Residual(num_inputs, num_channels, stage > 0, 2 if stage else 1),
            Residual(num_channels, num_channels, False, 1),
        ]
        num_inputs = num_channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, NUM_CLASSES))

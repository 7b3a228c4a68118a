"""Modules that moved: their old names work for one release, with a DeprecationWarning."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Optional

_PACKAGE = "gluon_mgpu"
# Old name: new name. `fit` and `prefetch` are not here: a module of that name would hide the function.
MOVED = {
    "accumulation": "trainer.accumulation",
    "agreement": "tuning.agreement",
    "balance": "data_parallel.balancer",
    "batch_size": "tuning.batch_size",
    "batch_size.find": "tuning.batch_size.find",
    "batch_size.probe": "tuning.batch_size.probe",
    "batch_size.process": "tuning.batch_size.process",
    "batch_size.workload": "tuning.batch_size.workload",
    "batchnorm": "data_parallel.batchnorm",
    "buckets": "trainer.buckets",
    "callbacks": "loop.callbacks",
    "calls": "runtime.c_api",
    "cuda": "runtime.cuda_libraries",
    "data.batching": "data.array_loader",
    "data.korean_numbers": "data.text.korean_numbers",
    "data.length_buckets": "data.text.length_buckets",
    "data.numerals": "data.text.numerals",
    "data.pair_batches": "data.text.pair_loader",
    "data.pair_selection": "data.text.pair_selection",
    "data.pairs": "data.text.pairs",
    "data.subwords": "data.text.subwords",
    "data.vocabularies": "data.text.vocabularies",
    "data.vocabulary": "data.text.vocabulary",
    "data.words": "data.text.words",
    "debug": "data_parallel.debug",
    "described": "trainer.optimizer_config",
    "device_list": "devices.describe",
    "distributed.follow": "distributed.launcher.follower",
    "distributed.guard": "distributed.launcher.guard",
    "distributed.hosts": "distributed.launcher.hosts",
    "distributed.interfaces": "distributed.launcher.interfaces",
    "distributed.job": "distributed.launcher.job",
    "distributed.meeting": "distributed.launcher.horovod_rendezvous",
    "distributed.node": "distributed.launcher.node",
    "distributed.output": "distributed.launcher.output",
    "distributed.plan": "distributed.launcher.plan",
    "distributed.rendezvous": "distributed.launcher.rendezvous",
    "distributed.supervise": "distributed.launcher.supervisor",
    "distributed.wire": "distributed.launcher.wire",
    "epoch": "loop.epoch",
    "evaluation": "loop.evaluate",
    "fat_binary": "runtime.fat_binary",
    "folders": "checkpoint.atomic_folder",
    "gpus": "runtime.nvidia",
    "gpus.claims": "runtime.nvidia.locks",
    "gpus.demand": "runtime.nvidia.request",
    "gpus.driver": "runtime.nvidia.driver",
    "gpus.mxnet_gpus": "devices.mxnet_gpus",
    "gpus.nvml": "runtime.nvidia.nvml",
    "gpus.selection": "devices.free_gpus",
    "gpus.visible_gpus": "runtime.nvidia.visible",
    "joint": "trainer.across_processes",
    "leaks": "monitor.leaks",
    "local_sgd": "trainer.local_sgd",
    "loss_scaler": "trainer.loss_scaler",
    "metrics": "loop.metrics",
    "models.attention": "models.seq2seq.attention",
    "models.legacy": "models.seq2seq.legacy",
    "models.recurrence": "models.seq2seq.recurrence",
    "models.sequence_loss": "models.seq2seq.loss",
    "monitor.laps": "monitor.phases",
    "monitor.picture": "monitor.plot",
    "optimizers": "trainer.optimizers",
    "parallel": "data_parallel.gluoncv",
    "parameters": "trainer.parameters",
    "params_file": "checkpoint.params_file",
    "position": "loop.resume",
    "precision": "trainer.precision",
    "prediction": "loop.predict",
    "processes": "distributed",
    "processes.dist_sync": "distributed.dist_sync",
    "processes.horovod": "distributed.horovod",
    "processes.membership": "distributed.membership",
    "profiling": "tuning.profiling",
    "readiness": "runtime.engine",
    "reduction": "trainer.reduction",
    "replicas": "trainer.replicas",
    "rng": "checkpoint.rng",
    "run": "loop.run",
    "schedules": "trainer.schedules",
    "sharding": "data_parallel.sharding",
    "shelf": "checkpoint.rotation",
    "snapshot": "checkpoint.snapshot",
    "states": "trainer.states",
    "step": "data_parallel.step",
    "threads": "runtime.threads",
    "timing": "runtime.timing",
    "transfer": "data_parallel.transfer",
    "translation": "models.seq2seq.search",
    "translation_scores": "models.seq2seq.scores",
    "translator": "models.seq2seq.translator",
    "translator_callbacks": "models.seq2seq.callbacks",
    "turns": "data_parallel.lockstep",
    "update": "trainer.update",
    "watchdog": "monitor.watchdog",
}


def current_module(name: str) -> str:
    """Return where a module of this package is now.

    Examples
    --------
    >>> current_module("gluon_mgpu.optimizers"), current_module("numpy")
    ('gluon_mgpu.trainer.optimizers', 'numpy')
    """
    package, _, rest = name.partition(".")
    return f"{_PACKAGE}.{MOVED[rest]}" if package == _PACKAGE and rest in MOVED else name


def current_class(path: str) -> str:
    """Return where a class of this package is now.

    Examples
    --------
    >>> current_class("gluon_mgpu.optimizers.AdamW")
    'gluon_mgpu.trainer.optimizers.AdamW'
    """
    module, _, name = path.rpartition(".")
    return f"{current_module(module)}.{name}"


def install() -> None:
    """Let `import gluon_mgpu.<old name>` find the module where it is now."""
    if not any(isinstance(finder, _OldNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OldNames())


def __getattr__(name: str) -> Any:
    """Return a module by its old name: `gluon_mgpu.sharding` without importing it. The package takes this function."""
    if name not in MOVED:
        raise AttributeError(f"module {_PACKAGE!r} has no attribute {name!r}")
    old = f"{_PACKAGE}.{name}"
    _warn(old, 2)
    return importlib.import_module(current_module(old))


def _warn(old: str, stacklevel: int) -> None:
    message = f"{old} is now {current_module(old)}. The old name goes with the next release."
    warnings.warn(message, DeprecationWarning, stacklevel=stacklevel + 1)


class _OldNames:
    """An import hook that finds moved modules by their old names."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Optional[ModuleSpec]:
        return ModuleSpec(fullname, self) if current_module(fullname) != fullname else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        _warn(spec.name, 2)
        module = importlib.import_module(current_module(spec.name))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module back its own specification, which the import system has replaced."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state

"""Train Gluon networks on several devices as easily, and as correctly, as on one."""

__version__ = "0.1.0"

from . import runtime

runtime.load_mxnet()  # before anything below asks for mxnet

from . import data, errors, models
from .callbacks import Callback, Checkpoint, EarlyStopping, History, Progress, SaveHistory
from .checkpoint import load_checkpoint, save_checkpoint
from .devices import describe_devices, resolve_devices, try_all_gpus, try_gpu, use_devices
from .evaluation import evaluate, evaluate_accuracy_gpus
from .fit import fit
from .metrics import DeviceSums, accuracy, top_k_accuracy
from .prefetch import prefetch
from .reduction import clip_global_norm
from .replicas import average_running_stats, replica_difference
from .sharding import gather, plan_shards, split_and_load, split_batch, split_batch_multi_inputs, split_data
from .step import Batch, backward, eval_batch, train_batch
from .timing import Timer
from .trainer import Trainer
from .transfer import as_in_context, copyto

__all__ = [
    # devices
    "use_devices",
    "resolve_devices",
    "describe_devices",
    "try_gpu",
    "try_all_gpus",
    # a batch and its shards
    "split_and_load",
    "split_batch",
    "split_batch_multi_inputs",
    "split_data",
    "gather",
    "plan_shards",
    "prefetch",
    "copyto",
    "as_in_context",
    "Timer",
    # a step
    "Trainer",
    "backward",
    "train_batch",
    "eval_batch",
    "Batch",
    "clip_global_norm",
    "average_running_stats",
    "replica_difference",
    # many steps
    "fit",
    "evaluate",
    "evaluate_accuracy_gpus",
    "accuracy",
    "top_k_accuracy",
    "DeviceSums",
    "Callback",
    "Progress",
    "History",
    "SaveHistory",
    "EarlyStopping",
    "Checkpoint",
    "save_checkpoint",
    "load_checkpoint",
    # rooms
    "data",
    "errors",
    "models",
    "runtime",
]

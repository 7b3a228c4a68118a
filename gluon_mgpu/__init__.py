"""Train Gluon networks on several devices as easily, and as correctly, as on one."""

__version__ = "0.1.0"

from . import exits, runtime

exits.wait_at_exit(runtime.load_mxnet())  # before anything below asks for mxnet

from . import data, errors, models
from .balance import Balancer
from .batch_size import find_batch_size
from .batchnorm import SyncBatchNorm, convert_sync_batchnorm, forward_shards, revert_sync_batchnorm, set_batch_norm
from .callbacks import Callback, Checkpoint, EarlyStopping, History, Progress, SaveHistory
from .checkpoint import load_checkpoint, save_checkpoint
from .debug import debugging, run_serially
from .devices import describe_devices, resolve_devices, try_all_gpus, try_gpu, use_devices
from .distributed import this_process
from .evaluation import evaluate, evaluate_accuracy_gpus
from .fit import fit
from .leaks import LeakCheck
from .local_sgd import LocalSGD
from .loss_scaler import LossScaler
from .metrics import DeviceSums, accuracy, top_k_accuracy
from .monitor import Monitor
from .parallel import DataParallelCriterion, DataParallelModel
from .precision import precision_of, set_precision
from .prediction import predict, predict_batches
from .prefetch import prefetch
from .reduction import clip_global_norm
from .replicas import replica_difference
from .running_stats import average_running_stats
from .schedules import scaled_learning_rate, scaled_params
from .sharding import gather, plan_shards, split_and_load, split_batch, split_batch_multi_inputs, split_data
from .step import Batch, backward, eval_batch, train_batch
from .timing import Timer
from .trainer import Trainer
from .transfer import as_in_context, copyto
from .translation import Translation, plot_attention, translate
from .translator import Translator, load_translator
from .watchdog import Watchdog

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
    "Balancer",
    "copyto",
    "as_in_context",
    "Timer",
    # a step
    "Trainer",
    "LocalSGD",
    "backward",
    "train_batch",
    "eval_batch",
    "Batch",
    "DataParallelModel",
    "DataParallelCriterion",
    "set_precision",
    "precision_of",
    "LossScaler",
    "scaled_learning_rate",
    "scaled_params",
    "clip_global_norm",
    "set_batch_norm",
    "convert_sync_batchnorm",
    "revert_sync_batchnorm",
    "SyncBatchNorm",
    "forward_shards",
    "average_running_stats",
    "replica_difference",
    # many steps
    "fit",
    "evaluate",
    "evaluate_accuracy_gpus",
    "predict",
    "predict_batches",
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
    "find_batch_size",
    "this_process",
    "translate",
    "Translation",
    "plot_attention",
    "Translator",
    "load_translator",
    # when something is wrong
    "debugging",
    "run_serially",
    "LeakCheck",
    "Monitor",
    "Watchdog",
    # rooms
    "data",
    "errors",
    "models",
    "runtime",
]

"""Train Gluon networks on several devices as easily, and as correctly, as on one.

The public names, by task; everything else is internal:

devices            use_devices, resolve_devices, describe_devices, try_gpu, try_all_gpus
train by epochs    Trainer, fit; callbacks: Progress, Checkpoint, EarlyStopping, SaveHistory, TensorBoard, LogRows,
                   WeightAverage, Finetune, Callback, FitState; History, seed_everything
train by hand      split_batch, split_and_load, backward, train_batch, compile_step, prefetch, Balancer, LocalSGD
evaluate, predict  evaluate, evaluate_accuracy_gpus, eval_batch, accuracy, top_k_accuracy, predict, predict_batches
save and resume    save_checkpoint, load_checkpoint, average_checkpoints, Checkpoint; export
divide a network   Pipeline, split_stages, recompute
BatchNorm, 16 bits set_batch_norm, convert_sync_batchnorm, revert_sync_batchnorm, update_bn, set_precision, LossScaler
translate          load_translator, Translator, translate, plot_attention
tune               find_batch_size, LearningRateFinder, scaled_params, scaled_learning_rate; the room tune
inspect            Trace, plot_trace, plot_schedule, Monitor, LeakCheck, Watchdog, debugging, run_serially, Timer
rooms              data, devices, distributed, errors, models, plots, runtime, tune

docs/names.md explains names that look alike; docs/index.md lists all guides.
"""

from . import moved
from .runtime import environment, exits

moved.install()
exits.wait_at_exit(environment.load_mxnet())  # before anything below asks for mxnet

from . import data, devices, distributed, errors, models, plots, runtime, tune
from .checkpoint.average import average_checkpoints
from .checkpoint.checkpoint import load_checkpoint, save_checkpoint
from .data_parallel.balancer import Balancer
from .data_parallel.batchnorm import SyncBatchNorm, convert_sync_batchnorm, forward_shards, revert_sync_batchnorm, set_batch_norm
from .data_parallel.compiled import compile_step
from .data_parallel.debug import debugging, run_serially
from .data_parallel.gluoncv import DataParallelCriterion, DataParallelModel
from .data_parallel.passes import backward
from .data_parallel.prefetch import prefetch
from .data_parallel.sharding import gather, plan_shards, split_and_load, split_batch, split_batch_multi_inputs, split_data
from .data_parallel.step import Batch, eval_batch, train_batch
from .data_parallel.transfer import as_in_context, copyto
from .data_parallel.update_bn import update_bn
from .devices.select import describe_devices, resolve_devices, try_all_gpus, try_gpu, use_devices
from .distributed import this_process
from .exporters.export import Exported, export
from .loop.callbacks import Callback, Checkpoint, EarlyStopping, FitState, Progress, SaveHistory
from .loop.evaluate import evaluate, evaluate_accuracy_gpus
from .loop.finetune import Finetune
from .loop.fit import fit
from .loop.history import History
from .loop.metrics import DeviceSums, accuracy, top_k_accuracy
from .loop.predict import predict, predict_batches
from .loop.recording import LogRows, TensorBoard
from .loop.trace import Trace
from .loop.weight_average import WeightAverage
from .models.seq2seq.search import Translation, plot_attention, translate
from .models.seq2seq.translator import Translator, load_translator
from .monitor import Monitor
from .monitor.leaks import LeakCheck
from .monitor.watchdog import Watchdog
from .moved import __getattr__ as __getattr__
from .pipeline.network import Pipeline
from .pipeline.recompute import recompute
from .pipeline.split import split_stages
from .plots import plot_schedule, plot_trace
from .runtime.determinism import seed_everything
from .runtime.timing import Timer
from .trainer.local_sgd import LocalSGD
from .trainer.loss_scaler import LossScaler
from .trainer.parameters import replica_difference
from .trainer.precision import precision_of, set_precision
from .trainer.reduction import clip_global_norm
from .trainer.running_stats import average_running_stats
from .trainer.schedules import scaled_learning_rate, scaled_params
from .trainer.trainer import Trainer
from .tuning.batch_size import find_batch_size
from .tuning.learning_rate import LearningRateFinder
from .version import __version__ as __version__

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
    "seed_everything",
    # a step
    "Trainer",
    "LocalSGD",
    "backward",
    "train_batch",
    "eval_batch",
    "compile_step",
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
    "update_bn",
    "replica_difference",
    # networks that span devices
    "Pipeline",
    "split_stages",
    "recompute",
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
    "FitState",
    "Progress",
    "History",
    "SaveHistory",
    "LogRows",
    "TensorBoard",
    "EarlyStopping",
    "Checkpoint",
    "save_checkpoint",
    "load_checkpoint",
    "export",
    "Exported",
    "average_checkpoints",
    "WeightAverage",
    "Finetune",
    "find_batch_size",
    "LearningRateFinder",
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
    "Trace",
    "plot_trace",
    "plot_schedule",
    "Monitor",
    "Watchdog",
    # rooms
    "data",
    "devices",
    "distributed",
    "errors",
    "models",
    "plots",
    "runtime",
    "tune",
]

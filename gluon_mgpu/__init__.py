"""Train Gluon networks on several devices as easily, and as correctly, as on one.

The public names, by task:

devices            use_devices, try_gpu, try_all_gpus
train by epochs    Trainer, fit, seed_everything, broadcast_parameters; callbacks: Progress, Checkpoint, EarlyStopping,
                   TensorBoard, WeightAverage, Finetune, ReduceLROnPlateau, Callback
your own loop      split_batch, split_and_load, gather, prefetch, copyto, backward, train_batch, eval_batch, compile_step,
                   LocalSGD, replica_difference; as in GluonCV: DataParallelModel, DataParallelCriterion
evaluate, predict  evaluate, evaluate_accuracy_gpus, accuracy, top_k_accuracy, predict
save and resume    save_checkpoint, load_checkpoint, Checkpoint; export
divide a network   Pipeline, split_stages
BatchNorm, 16 bits set_batch_norm, update_bn, set_precision, precision_of
rooms              data            data sets, loaders, sentence pairs
                   data_parallel   parts of a step: weighted shards, BatchNorm over devices
                   devices         what each device is; contexts of a specification; transfers
                   distributed     the processes of a job
                   errors          the exceptions
                   loop            more of fit: metrics, history, loggers, traces, predictions batch by batch
                   models          ResNet-18, the translator, attention pictures
                   monitor         devices and host over time, leaks, hangs, timers
                   plots           figures
                   tuning          batch size, learning rate, trials of Ray Tune

docs/index.md lists all guides.
"""

from . import interrupts

interrupts.begin_imports()  # NumPy takes long

from lazy_loader import attach_stub

from .runtime import environment
from .version import __version__ as __version__

environment.prepare()

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)

interrupts.end_imports(of_command=False)

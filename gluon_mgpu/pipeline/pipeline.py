"""Pipeline: a network whose stages are on different devices."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Union

from mxnet import Context, gluon, initializer

from ..checks import flag, one_of, short, whole_number
from ..data_parallel.batchnorm import SyncBatchNorm
from ..data_parallel.passes import Passes
from ..devices.select import check_contexts
from ..errors import TrainerError
from ..mxnet_internals.blocks import is_hybridized, name_params_as, options_of, set_options
from ..mxnet_internals.parameters import has_values, is_open, structural_params
from ..mxnet_internals.versions import SyncBatchNorm as GluonSyncBatchNorm
from ..mxnet_internals.versions import require_mxnet1
from ..nested import Array
from ..trainer.parameters import blocks_of
from ..trainer.running_stats import is_running_stat
from ..trainer.seeded_dropout import check_seeds
from ..trainer.trainer import Trainer
from .dispatch import PipelinePasses
from .schedule import SCHEDULES
from .stage import NETWORK, Stage, Stages


class Pipeline(gluon.Block):  # type: ignore[misc]
    """A network divided into stages, each on a device of its own, for networks that are too large for one device.

    ```
    gpu(0)   F0 F1    B0 F2 B1 F3 B2    B3        F: forward, B: backward pass of a micro-batch through this device's stage;
    gpu(1)      F0 B0 F1 B1 F2 B2 F3 B3           activations and gradients are copied from device to device
    ```

    `train_batch`, `fit`, `evaluate`, `predict` and checkpoints take it like any network. The weights after training are those of
    the same network on one device. Each stage's parameters are on its device alone. A parameter of two stages, such as a tied
    embedding, is on both devices, and its gradients are summed.

    If the last stage is data-parallel (`split_stages(..., data_parallel=layers)`), all devices of a replica compute it, each for
    its part of a micro-batch, and the gradients of this stage alone are summed: a hybrid of data and model parallelism.

    ```
    gpu(0)   F0 F1 L0 L0' F2 L1 ...   F: this device's stage; L, L': forward and backward pass of the last stage and the loss
    gpu(1)      F0 L0 L0' F1 L1 ...   for one half of the micro-batch
    ```

    BatchNorm normalises each micro-batch separately, like `micro_steps`; its running statistics move once a batch, by the mean of
    the micro-batches' changes, weighted by examples. Dropout draws other numbers than on one device, the same ones for all
    schedules and with `recompute`.

    Parameters
    ----------
    stages : Stages or list of gluon.Block
        The result of `split_stages`, or your own blocks: the first one is called with the network's input, each other one with
        the output of the one before, or with several if that is a tuple. Initialised or not: initialised parameters are moved.
    ctx : list of mxnet.Context, or list of such lists
        A device for each stage, without a data-parallel one. A device may have several stages. A list of lists makes replicas of
        the pipeline: `[[gpu(0), gpu(1)], [gpu(2), gpu(3)]]` splits each batch over two replicas of two stages, and sums their
        gradients.
    micro_batches : int
        The parts of a batch that follow one another through the stages. 1 uses one device at a time: plain model parallelism.
        With p stages, a device computes at most m / (m + p - 1) of the time, so 4 p or more is usual.
    schedule : str
        `"1f1b"`: stage s of p holds the activations of p - s micro-batches. `"gpipe"`: those of all.
    recompute : bool
        Hold only the inputs of each stage, and compute its forward pass again before its backward pass: about a third more
        arithmetic, and the activations of one micro-batch per device.

    Attributes
    ----------
    stages : Stages
        A data-parallel stage is in it once for each device.
    devices : list of lists of mxnet.Context
        For each replica, the devices of `stages`.
    num_stages : int
        A data-parallel stage counts once for each device.
    num_parts : int
        The number of devices that share the last stage of a micro-batch, usually 1.
    replica_contexts : list of mxnet.Context
        The first device of each replica, where its part of the batch goes.
    all_contexts : list of mxnet.Context
        All devices, each once.

    Raises
    ------
    TrainerError
        The stages or options are invalid, or a stage cannot be in a pipeline.
    DeviceError
        The devices are invalid.

    Examples
    --------
    >>> import mxnet as mx
    >>> from gluon_mgpu import fit, Trainer
    >>> stages = [gluon.nn.Dense(8, in_units=4), gluon.nn.Dense(2, in_units=8)]
    >>> model = Pipeline(stages, [mx.cpu(0), mx.cpu(1)], micro_batches=2)
    >>> model.initialize()
    >>> trainer = Trainer(model, "sgd", {"learning_rate": 0.1})
    >>> data = [(mx.nd.ones((6, 4)), mx.nd.zeros(6))]
    >>> history = fit(model, gluon.loss.SoftmaxCrossEntropyLoss(), trainer, data, epochs=1, callbacks=[])
    >>> model(mx.nd.ones((3, 4))).context
    cpu(1)

    Source: Huang et al., "GPipe", 2019; Narayanan et al., "PipeDream", 2019; Kim et al., "torchgpipe", 2020 (BatchNorm); Ono,
    Utiyama, Sumita, "Hybrid data-model parallel training for sequence-to-sequence recurrent neural network machine translation",
    2019.
    """

    def __init__(
        self,
        stages: Union[Stages, Sequence[gluon.Block]],
        ctx: Sequence[Any],
        micro_batches: int = 1,
        *,
        schedule: str = "1f1b",
        recompute: bool = False,
    ) -> None:
        require_mxnet1("Pipeline")
        super().__init__(prefix="")
        self.micro_batches = whole_number("Pipeline", "micro_batches", micro_batches, advice="4 for each stage is usual.")
        one_of("Pipeline", "schedule", schedule, SCHEDULES, advice="'1f1b' holds fewer activations.")
        self.schedule, self.recompute = schedule, flag("Pipeline", "recompute", recompute)
        given = _checked_stages(stages)
        self.devices = _checked_devices(ctx, given)
        self.num_parts = len(self.devices[0]) - len(given) + 1
        self.stages = Stages([*given, *given[-1:] * (self.num_parts - 1)], given.net, given.graph, given.costs)
        self.num_stages = len(self.stages)
        self.replica_contexts = [devices[0] for devices in self.devices]
        self.all_contexts = list(dict.fromkeys(context for devices in self.devices for context in devices))
        self.net = self.stages.net  # registers it: its layers are found
        name_params_as(self, self.net)
        _use_dynamic_memory(self.net, self.stages)
        if self.num_parts > 1 and any(map(is_running_stat, self.stages[-1].params())):
            raise TrainerError(
                "Pipeline: got BatchNorm in the data-parallel stage; expected it in the stages before, as its running statistics "
                "are of whole micro-batches. Begin the stage behind the last BatchNorm."
            )
        if self.recompute:
            check_seeds("Pipeline", "recompute=True", self.net, self.all_contexts)
        self._move_params()

    def initialize(self, init: Any = None, ctx: Any = None, verbose: bool = False, force_reinit: bool = False) -> None:
        """Initialise the parameters on the devices of their stages.

        Raises
        ------
        TrainerError
            `ctx` is given: the stages have their devices.
        """
        if ctx is not None:
            raise TrainerError(f"Pipeline.initialize: got ctx={short(ctx)}; expected none. The pipeline's stages have devices.")
        for param, contexts in self._contexts_of_params().items():
            param.initialize(None, contexts, init or initializer.Uniform(), force_reinit)

    def hybridize(self, active: bool = True, **options: Any) -> None:
        """Hybridize the stages. `static_alloc` and `static_shape` are ignored: several micro-batches are in a stage at a time."""
        options = {name: value for name, value in options.items() if not name.startswith("static_")}
        self.net.hybridize(active, **options)
        for stage in self.stages:
            stage.block.hybridize(active, **options)

    def forward(self, X: Any) -> Any:
        """Return the network's output, on the last device of the replica whose first device holds `X`.

        It may be recorded: gradients then flow through all stages, without micro-batches.
        """
        arrays = self.stages.inputs(X)
        replica = self.replica_of(arrays[0].context)
        outputs: Dict[int, List[Array]] = {NETWORK: arrays}
        for number in [*range(self.num_stages - self.num_parts), self.num_stages - 1]:
            read = [outputs[producer][at] for producer, at in self.stages.sources(number, outputs.__getitem__)]
            outputs[number] = self.stages[number].run([one.as_in_context(self.devices[replica][number]) for one in read])
        return self.stages.output(outputs[self.num_stages - 1])

    def replica_of(self, context: Context) -> int:
        """Return the number of the replica whose data are on a device."""
        if context in self.replica_contexts:
            return self.replica_contexts.index(context)
        raise TrainerError(
            f"Pipeline: got data on {context}; expected one of {self.replica_contexts}, of the first stage. Move the data there."
        )

    def make_passes(self, loss: Any, *, trainer: Optional[Trainer] = None) -> Passes:
        """Return the passes of a batch: scheduled ones for a trainer, forward ones without."""
        return PipelinePasses(self, loss, trainer)

    def __repr__(self) -> str:
        lines = [f"Pipeline({self.micro_batches} micro-batches, {self.schedule}{', recompute' * self.recompute})"]
        for number, stage in enumerate(self.stages):
            contexts = ", ".join(str(devices[number]) for devices in self.devices)
            lines.append(f"  stage {number} on {contexts}: {len(stage.params())} parameters")
        return "\n".join(lines)

    def _contexts_of_params(self) -> Dict[gluon.Parameter, List[Context]]:
        """Return each parameter with the devices of the stages that use it, replica by replica."""
        found: Dict[gluon.Parameter, List[Context]] = {}
        for devices in self.devices:
            for stage, device in zip(self.stages, devices):
                for param in stage.params():
                    found.setdefault(param, []).append(device)
        return {param: list(dict.fromkeys(contexts)) for param, contexts in found.items()}

    def _move_params(self) -> None:
        """Move the initialised parameters to the devices of their stages."""
        placed = self._contexts_of_params()
        unused = [name for name, param in structural_params(self).items() if param not in placed]
        if unused:
            raise TrainerError(
                f"Pipeline: got stages without {', '.join(unused[:3])} of {self.net.name}; expected all of its parameters. Pass "
                "stages that use them all, or leave these layers out."
            )
        for param, contexts in placed.items():
            if (has_values(param) or is_open(param)) and param.list_ctx() != contexts:
                param.reset_ctx(contexts)


def _checked_stages(stages: Any) -> Stages:
    if isinstance(stages, Stages):
        return stages
    if not isinstance(stages, (list, tuple)) or not stages or not all(isinstance(one, gluon.Block) for one in stages):
        raise TrainerError(
            f"Pipeline: got stages={short(stages)}; expected a list of Blocks. Pass split_stages(net, num_stages=2, sample=X)."
        )
    net = gluon.nn.Sequential(prefix="")
    net.add(*stages)
    return Stages(map(Stage, stages), net)


def _checked_devices(ctx: Any, stages: Stages) -> List[List[Context]]:
    """Return the devices of all stages for each replica."""
    shared = stages[-1].is_data_parallel
    num_stages = len(stages) - shared
    replicas = [ctx] if isinstance(ctx, (list, tuple)) and all(isinstance(one, Context) for one in ctx) else ctx
    are_lists = isinstance(replicas, (list, tuple)) and all(isinstance(one, (list, tuple)) for one in replicas)
    if not are_lists or {len(devices) for devices in replicas} != {num_stages}:
        raise TrainerError(
            f"Pipeline: got ctx={short(ctx)} for {num_stages} stages; expected one device per stage, or such a list for "
            "each replica. Pass [mx.gpu(0), mx.gpu(1)]."
        )
    check_contexts([context for devices in replicas for context in dict.fromkeys(devices)], "Pipeline")
    sharing = [list(dict.fromkeys(devices)) if shared else [] for devices in replicas]
    if len(set(map(len, sharing))) > 1:
        raise TrainerError(
            f"Pipeline: got ctx={short(ctx)}; expected the same number of different devices in each "
            "replica, as all of them share its last stage. Change the lists."
        )
    return [[*devices, *more] for devices, more in zip(replicas, sharing)]


def _use_dynamic_memory(net: gluon.Block, stages: Stages) -> None:
    """Check the layers, and let hybridized ones allocate memory for each micro-batch."""
    blocks = {id(block): block for one in (net, *(stage.block for stage in stages)) for block in blocks_of(one)}
    for block in blocks.values():
        if isinstance(block, (SyncBatchNorm, GluonSyncBatchNorm)):
            raise TrainerError(
                f"Pipeline: got {block.name}, a {type(block).__name__}; expected nn.BatchNorm, as a stage sees one micro-batch "
                "at a time. Use nn.BatchNorm, or call revert_sync_batchnorm(net) first."
            )
    for block in blocks.values():
        options = options_of(block) if is_hybridized(block) else {}
        if any(value for name, value in options.items() if name.startswith("static_")):
            set_options(block, {name: False if name.startswith("static_") else value for name, value in options.items()})

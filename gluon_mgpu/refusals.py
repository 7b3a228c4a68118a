"""Modes that exclude each other: the checks raise from this table, and docs/limitations.md lists it.

python scripts/limitations.py    writes the table again
"""

from __future__ import annotations

from typing import NamedTuple, Tuple

from .errors import ModesError


class Refusal(NamedTuple):
    """Two modes, why they exclude each other, and what to do."""

    first: str
    second: str
    because: str
    instead: str


_TREE = "one tree adds up the gradients of virtual shards"
_APART = "each device trains its own copy of the whole network"
_AVERAGED = "Normalise each shard: bn='local', or set_batch_norm(net, 'local')"
JOINING = "an optimizer that joins parameters"
_PLAIN = "Call hybridize(False) on that block; replace a SymbolBlock by layers"
RNN_DROPOUT = "dropout between the layers of a fused RNN on GPUs"
_UNSEEDED = "cuDNN draws its masks, whatever the seed"
_STACKED = "Stack layers with num_layers=1 and nn.Dropout between them"
IN_A_GRAPH, FOREACH = "while_loop, cond, or PReLU between layers", "foreach"

REFUSALS: Tuple[Refusal, ...] = (
    Refusal("virtual_shards", "Pipeline", _TREE, "Leave virtual_shards out"),
    Refusal("virtual_shards", "LocalSGD", _TREE, "Use a Trainer"),
    Refusal("virtual_shards", "sharded_data", _TREE, "Leave one of them out"),
    Refusal("virtual_shards", "precision='fp16'", _TREE, "Use 'bf16' or 'fp32'"),
    Refusal("virtual_shards", "sparse gradients", _TREE, "Leave sparse_grad out of Embedding"),
    Refusal("virtual_shards", "grad_req='add'", _TREE, "Set grad_req='write', and use accumulate()"),
    Refusal("virtual_shards", "accumulated gradients", _TREE, "Call flush() or discard() first"),
    Refusal("virtual_shards", "a loop by hand", "train_batch() cuts batches into virtual shards", "Call train_batch() or fit()"),
    Refusal(
        "virtual_shards",
        "layers that only training reaches",
        "their first gradients would be lost",
        "Call it again: their shapes are known now",
    ),
    Refusal("virtual_shards", "a split of your own", "virtual shards have equal sizes", "Pass split_batch without weights"),
    Refusal("virtual_shards", "synchronised BatchNorm", "each virtual shard is normalised by itself", _AVERAGED),
    Refusal("virtual_shards", RNN_DROPOUT, _UNSEEDED, _STACKED),
    Refusal("recompute=True", RNN_DROPOUT, _UNSEEDED, _STACKED),
    Refusal("LocalSGD", "several processes", "it averages the devices of one process", "Use a Trainer"),
    Refusal("LocalSGD", "Pipeline", _APART, "Use a Trainer"),
    Refusal("LocalSGD", JOINING, _APART, "Use sgd or adam, or a Trainer"),
    Refusal("LocalSGD", "a loss scaler", "a device must not skip a step alone", "Train in float32 or bfloat16"),
    Refusal("LocalSGD", "allreduce_grads()", "it does not sum gradients", "Call step(), or use a Trainer"),
    Refusal("Pipeline", "synchronised BatchNorm", "a stage sees one micro-batch at a time", _AVERAGED),
    Refusal("Pipeline", "compiled='on'", "a graph runs on one device", "Call net.hybridize(), which compiles each stage"),
    Refusal("Pipeline", JOINING, "each device updates its own parameters", "Use sgd or adam"),
    Refusal("Pipeline", "set_precision()", "its stages are graphs already", "Call set_precision() before split_stages()"),
    Refusal("Pipeline", "update_bn()", "it spans devices", "Leave update_bn() out"),
    Refusal("LearningRateFinder", "grad_req='add'", "its steps would be added to your sums", "Set grad_req='write' before"),
    Refusal(
        "several processes",
        "layers that the first batch does not reach",
        "all begin with the weights of process 0",
        "Pass in_units or in_channels to these layers",
    ),
    Refusal("several processes", "sparse gradients", "they exchange dense gradients", "Leave sparse_grad out of Embedding"),
    Refusal("several processes", "sgld", "each draws its own noise", "Pass virtual_shards, or use another optimizer"),
    Refusal(
        "several processes",
        "a split of your own",
        "each process takes its part of a batch",
        "Divide it with mgpu.split_batch, or let each process read its own data: Trainer(sharded_data=True)",
    ),
    Refusal("several processes", "synchronised BatchNorm", "a process sees its own part of the batch", _AVERAGED),
    Refusal(
        "sharded_data",
        "the size of a batch that processes share",
        "step() takes the examples of this process",
        "Split the process's own batch inside mgpu.distributed.own_batches()",
    ),
    Refusal(
        "several processes",
        "a loop by hand whose first batch decides shapes",
        "each process then has its own weights in that batch",
        "Pass one batch through the network before the trainer is made, or call train_batch() or fit()",
    ),
    Refusal(
        "several processes",
        "several passes before a step",
        "a process without examples does not know what the last pass has written in others",
        "Call step() or discard() after each pass",
    ),
    Refusal(
        "static_shape",
        "a loop by hand after a change of grad_req",
        "MXNet's static graphs keep the former arrays of gradients",
        "Call discard() and run the pass again, or call hybridize() without static_shape",
    ),
    Refusal("hybridize()", IN_A_GRAPH, "MXNet computes wrong gradients of it in a graph", _PLAIN),
    Refusal("static_shape", FOREACH, "MXNet computes wrong outputs of it", "Call hybridize() without static_shape"),
    Refusal(
        "compile_step() or trainer.backward()",
        "loss.backward()",
        "a step uses the gradients of one pass, and MXNet's flags may be older",
        "Call trainer.backward(losses) once, and discard() after a pass that no step uses, or after the last compiled step",
    ),
    Refusal(
        "precision='fp16'",
        "a pass for several trainers",
        "each trainer has a loss scale of its own",
        "Call backward() of each trainer with losses of its own, or train in bfloat16",
    ),
    Refusal("compiled='on'", "synchronised BatchNorm", "the shards wait for each other", "Pass compiled='auto'"),
    Refusal("accumulate()", "allreduce_grads()", "more gradients follow inside of it", "Call it after accumulate()"),
    Refusal(
        "allreduce_grads()",
        "another pass with grad_req='add'",
        "gradients hold the sum over all devices until an update",
        "Call update() after it, or discard() where there is no update",
    ),
)
_BY_MODES = {(refusal.first, refusal.second): refusal for refusal in REFUSALS}


def refusal(operation: str, first: str, second: str, shown: str = "") -> ModesError:
    """Return the error for two modes of the table; `shown` is the value found, in the place of the second one."""
    found = _BY_MODES[first, second]
    message = f"{operation}: got {first} and {shown or second}; expected one of them, as {found.because}. {found.instead}."
    return ModesError(message, (first, second))

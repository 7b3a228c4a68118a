"""Metrics of one evaluation: sums of functions, and copies of MXNet's metric objects, which need whole batches."""

from __future__ import annotations

import copy
import io
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Optional

import mxnet as mx
import numpy as np

from ..checks import reason_of
from ..data_parallel.sharding import Split, leaves_and_axes
from ..data_parallel.step import Batch
from ..distributed import group
from ..errors import TrainerError
from ..mxnet_internals.versions import is_mxnet2
from ..nested import host_array, is_device_array
from .metric_sums import MetricSums
from .metrics import Metrics, functions_of, objects_of

_PIECE_BYTES = 2**22  # of a message between processes

Part = Dict[str, np.ndarray]  # the labels and outputs of some examples, by kind/batch axis/number


class EvaluationSums(MetricSums):
    """Adds up functions, and updates copies of `EvalMetric` objects once per batch, as a loop on one device does.

    ```
    shards of the oldest batch ─► NumPy ─► of all processes, in rank order ─► update([labels], [outputs]) in each process
    ```

    Parameters
    ----------
    metrics : sequence, or dict name -> metric
        Functions and objects.
    split : Split
        Its batch axis is that of labels and outputs.
    num_shards : int, optional
        As for `MetricSums`.
    """

    def __init__(self, metrics: Metrics, split: Split, *, num_shards: Optional[int] = None) -> None:
        super().__init__(functions_of(metrics), num_shards=num_shards)
        self._label_axis = split.label_axis
        self._output_axis = split.batch_axis if isinstance(split.batch_axis, int) else 0
        self._objects: Dict[str, Any] = {}
        for name, metric in objects_of(metrics).items():
            with _naming(name):
                self._objects[name] = copy.deepcopy(metric)
                self._objects[name].reset()

    def add_batch(self, batch: Batch) -> None:
        """Add every function of a batch, and update the objects, which waits for its outputs and for all processes."""
        super().add_batch(batch)
        if self._objects:
            self._update(_joined([self._part(*pair) for pair in zip(batch.outputs, batch.labels)]))

    def read_all(self) -> Dict[str, float]:
        """Return each function's mean and each object's values over all processes, the same in each."""
        while self._objects and group() is not None and self._update(None):  # other processes may have more batches
            pass
        found = super().read_all()
        for name, metric in self._objects.items():
            with _naming(name):
                pairs = metric.get_name_value()
                found.update((name if len(pairs) == 1 else f"{name}_{one}", float(value)) for one, value in pairs)
        return found

    def _part(self, output: Any, label: Any) -> Part:
        found: Part = {}
        for kind, data, axes in (("label", label, self._label_axis), ("output", output, self._output_axis)):
            for i, (_, leaf, axis) in enumerate(leaves_and_axes(data, axes)):
                found[f"{kind}/{axis}/{i}"] = leaf.asnumpy() if is_device_array(leaf) else host_array(leaf)
        return found

    def _update(self, own: Optional[Part]) -> bool:
        """Update the objects with a batch; return whether any process had one.

        `own` is this process's part of it: empty without examples, None after the last batch.
        """
        parts = _of_all_processes(own)
        together = _joined([part for part in parts if part])
        make = mx.np.array if is_mxnet2() else mx.nd.array  # MXNet 1.9's metrics take no np arrays
        arrays = {key: make(values, ctx=mx.cpu(), dtype=values.dtype) for key, values in together.items()}
        labels, outputs = ([array for key, array in arrays.items() if key.startswith(kind)] for kind in ("label", "output"))
        for name, metric in self._objects.items() if arrays else ():
            with _naming(name):
                metric.update(labels, outputs)
        return any(part is not None for part in parts)


def _joined(parts: List[Part]) -> Part:
    """Return the labels and outputs of several parts, in their order."""
    keys = parts[0] if parts else ()
    return {key: np.concatenate([part[key] for part in parts], axis=int(key.split("/")[1])) for key in keys}


def _of_all_processes(own: Optional[Part]) -> List[Optional[Part]]:
    processes = group()
    if processes is None:
        return [own]
    buffer = io.BytesIO()
    if own is not None:
        np.savez(buffer, **own)
    message = buffer.getvalue()
    num_pieces = int(processes.all_gather(np.array([-(-len(message) // _PIECE_BYTES)], np.float32)).max())
    starts = range(0, num_pieces * _PIECE_BYTES, _PIECE_BYTES)
    pieces = [processes.all_gather_bytes(message[start : start + _PIECE_BYTES]) for start in starts]
    messages = map(b"".join, zip(*pieces))
    return [dict(np.load(io.BytesIO(one), allow_pickle=False)) if one else None for one in messages]


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Name the metric in an error of its own code."""
    try:
        yield
    except Exception as error:
        raise TrainerError(
            f"evaluate: got {type(error).__name__} of the metric {name}: {reason_of(error)}; expected labels and outputs that it "
            "takes. Try its reset, update and get on one batch."
        ) from error

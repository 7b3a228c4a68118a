"""Metrics: functions of a shard's output and label, and which of them a loss suggests."""

from __future__ import annotations

import re
from functools import partial
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import mxnet as mx
import numpy as np
from mxnet import gluon

from ..checks import check_function, instance, whole_number
from ..errors import TrainerError
from ..mxnet_internals.blocks import class_axis
from ..mxnet_internals.versions import metric as mxnet_metric
from ..nested import Array, is_device_array

# (output, label) of one shard -> (sum over the shard, an array of one element on its device; how many it sums over)
Metric = Callable[[Any, Any], Tuple[Array, int]]
Metrics = Union[Sequence[Any], Mapping[str, Any]]  # of such functions, and of EvalMetric objects for evaluations

# Words of the names of metrics; * stands for any letters before the rest.
_SMALLER = """
    neg(ative)?_log_?likelihood *loss *error *errors cross_?entropy *divergence *distance perplexity ppl err nll bce ce mae
    mse rmse msle rmsle mape smape wmape medae wer cer ter eer epe ece fid kid lpips kl kld mpd fpr fnr false_positive_rate
    false_negative_rate false_discovery_rate bpc bpb bits_per_byte bits_per_char cost regret brier hausdorff levenshtein
"""
_LARGER = """
    accuracy acc f1(score)? fbeta auc roc_?auc auroc auprc ap map m?[gdc]?iou precision recall sensitivity specificity
    (sacre)?bleu chrf rouge_?[12l]? meteor cider spice exact_match em r2 r_squared explained_variance pearsonr? spearmanr? kendall
    correlation corr pcc mcc kappa dice jaccard psnr ssim mrr ndcg dcg hits? tpr tnr true_positive_rate true_negative_rate
    likelihood elbo reward cos_sim similarity correct
"""
# With one of these words, a name such as accuracy_drop leaves open whether a smaller value is better.
_OPEN = "drop gap diff difference delta change reduction improvement gain ratio std time"


class MetricSum(NamedTuple):
    """The sum of a metric over a shard, an array of one element on its device, and the number of summed values.

    `float()` divides them and waits for the device.
    """

    total: Array
    num: int

    def __float__(self) -> float:
        return float(self.total.asnumpy().item()) / self.num


def accuracy(output: Array, label: Array, axis: Optional[int] = None) -> MetricSum:
    """Return the number of correct predictions and the number of predictions; `float()` of the pair is the accuracy.

    It is a pair, because `fit`, `evaluate` and `MetricSums`, which take the function itself, add up shards of different sizes.

    Parameters
    ----------
    output : NDArray, shape (B, classes, ...) or (B,) or (B, 1)
        Scores, of which the largest is the prediction; or predictions.
    label : NDArray, shape (B, ...)
    axis : int, optional
        Of the classes, by default 1. Say it with `functools.partial(accuracy, axis=-1)`.

    Returns
    -------
    MetricSum (NDArray of shape (1,), int)

    Examples
    --------
    >>> scores, labels = mx.nd.array([[0.1, 0.9], [0.8, 0.2]]), mx.nd.array([1, 1])
    >>> float(accuracy(scores, labels))
    0.5
    >>> right, count = accuracy(scores, labels)
    >>> float(right.asscalar()), count
    (1.0, 2)

    Raises
    ------
    TrainerError
        The output is not one array, or does not hold one row of scores for each label; or both axis 1 and the last one may hold
        the classes, and `axis` does not say which.

    Source: d2l's `accuracy`.
    """
    axis = _axis_of_classes("accuracy", output, label, axis, ndim=1)
    if len(output.shape) > 1 and output.shape[axis] > 1:
        scores = output.astype("float32") if output.dtype == np.float16 else output  # argmax has the scores' dtype
        output = scores.argmax(axis=axis)
    if output.dtype != label.dtype:  # neither is cast to the other: 259 as a byte is 3
        output, label = output.astype("float64"), label.astype("float64")
    return MetricSum(total_of(output.reshape(label.shape) == label), label.size)


accuracy.joins_shards = True  # type: ignore[attr-defined]  # for joined shards it returns the sum over them


def top_k_accuracy(k: int, axis: Optional[int] = None) -> Metric:
    """Return a metric that counts the labels among the k largest scores, with the classes along this axis, by default 1.

    Examples
    --------
    >>> right, count = top_k_accuracy(2)(mx.nd.array([[0.1, 0.7, 0.2], [0.1, 0.7, 0.2]]), mx.nd.array([2, 0]))
    >>> float(right.asscalar()), count
    (1.0, 2)
    """

    k = whole_number("top_k_accuracy", "k", k, advice="5 is usual.")

    def top_k(output: Array, label: Array) -> MetricSum:
        classes = _axis_of_classes(f"top_{k}_accuracy", output, label, axis, ndim=2)
        scores, shape = output.as_nd_ndarray(), output.shape
        labels = label.as_nd_ndarray().astype("float64").reshape(shape[:classes] + (1,) + shape[classes + 1 :])
        best = mx.nd.topk(scores, axis=classes, k=min(k, shape[classes]), dtype="float64")
        return MetricSum(total_of(mx.nd.broadcast_equal(best, labels)), label.size)

    top_k.__name__ = f"top_{k}_accuracy"
    top_k.joins_shards = True  # type: ignore[attr-defined]
    return top_k


def _axis_of_classes(name: str, output: Any, label: Any, axis: Optional[int], *, ndim: int) -> int:
    """Return the axis of the classes, counted from the first one.

    Raise `TrainerError` unless this output holds one row of scores along it, or one prediction, for each label.
    """
    if not is_device_array(output) or not is_device_array(label):
        kinds = [type(one).__name__ + (f" of {len(one)}" if isinstance(one, (list, tuple)) else "") for one in (output, label)]
        raise TrainerError(
            f"{name}: got {kinds[0]} as the output and {kinds[1]} as the label; expected one MXNet array each. Pass metrics=(), "
            f"or a function that picks one: metrics={{'{name}': lambda output, label: accuracy(output[0], label)}}."
        )
    shape = output.shape
    is_known = len(shape) > 2 and axis in range(-len(shape), len(shape))
    found = (axis or 0) % len(shape) if is_known else 1
    rest = shape[:found] + shape[found + 1 :] if len(shape) > 1 and (shape[found] > 1 or ndim > 1) else shape
    is_open = not is_known and len(shape) > 2 and (axis is not None or rest == shape[:-1])  # the last axis fits as well
    if len(shape) < ndim or int(np.prod(rest)) != label.size or is_open:
        raise TrainerError(
            f"{name}: got an output of shape {shape} and a label of shape {label.shape}; expected a row of scores for each "
            f"label, with the classes along axis {found}{', or to know the axis' if is_open else ''}. Pass axis=1 or axis=-1: "
            "metrics=[functools.partial(accuracy, axis=-1)] or [top_k_accuracy(5, axis=-1)]; or metrics=() without classes."
        )
    return found


def metrics_for(metrics: Union[str, Metrics], loss: Any) -> Metrics:
    """Return the metrics of `fit` and `evaluate`; for "auto", accuracy, unless the loss is a regression loss of Gluon.

    Examples
    --------
    >>> [list(named_metrics(metrics_for("auto", loss))) for loss in (gluon.loss.L2Loss(), gluon.loss.SoftmaxCELoss())]
    [[], ['accuracy']]
    """
    if not isinstance(metrics, str) or metrics != "auto":
        return metrics  # type: ignore[return-value]  # named_metrics rejects other strings
    kind = next((kind for kind in type(loss).__mro__ if kind.__module__ == gluon.loss.__name__), gluon.loss.Loss)
    if not issubclass(kind, gluon.loss.SoftmaxCELoss):
        return [accuracy] if kind is gluon.loss.Loss else []
    axis = class_axis(loss)
    return [] if axis is None else [partial(accuracy, axis=axis)]


def direction_of(column: str) -> str:
    """Return whether a smaller or a larger value of a column is better, "min" or "max"; "" if its name does not say so.

    Examples
    --------
    >>> [direction_of(name) for name in ("test_mae", "test_top_5_accuracy", "valid_bleu", "mIoU", "f1_loss", "test_score")]
    ['min', 'max', 'max', 'max', 'min', '']
    """
    name = re.sub(r"\W", "_", column)
    forms = name.lower(), re.sub("(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()  # mIoU, TopKAccuracy
    found = {kind for form in forms for match in _WORDS.finditer(form) for kind, word in match.groupdict().items() if word}
    is_opposite = any(map(_OPPOSITE.search, forms))
    if any(form.endswith("loss") for form in forms):
        found = {"min" if not is_opposite or "log_loss" in name.lower() else "open"}  # neg_loss may be that of one class
    if is_opposite:  # scikit-learn's names of errors
        found = {{"min": "max"}.get(kind, "open") for kind in found}
    return found.pop() if len(found) == 1 and found != {"open"} else ""


def _pattern(words: str) -> str:
    return "|".join(words.split()).replace("*", "[a-z]*")


_OPPOSITE = re.compile(
    "(^|_)(neg(?!_log_?likelihood)|(?<!false_)(?<!true_)negative(?!_log_?likelihood)|minus|inverse)_|^((test|valid|val|train)_)?1_"
)
# Digits and _ separate words, and so do the prefixes of columns.
_WORDS = re.compile(
    rf"(?<![a-z])(?:test|valid|val|train|eval|dev)?"
    rf"(?:(?P<min>{_pattern(_SMALLER)})|(?P<max>{_pattern(_LARGER)})|(?P<open>{_pattern(_OPEN)}))(?![a-z])"
)


def joins_shards(metric: Metric) -> bool:
    """Return whether a metric returns the sum over joined shards."""
    return getattr(getattr(metric, "func", metric), "joins_shards", False)


def check_metrics(metrics: Metrics, outputs: Sequence[Any], labels: Sequence[Any]) -> None:
    """Raise `TrainerError` if this package's metrics reject the first shard. Others, which may count calls, are not called."""
    for metric in filter(joins_shards, named_metrics(metrics).values() if outputs else ()):
        metric(outputs[0], labels[0])


def functions_of(metrics: Optional[Metrics]) -> Dict[str, Metric]:
    """Return the functions among metrics, by name."""
    return {name: metric for name, metric in named_metrics(metrics).items() if not isinstance(metric, mxnet_metric.EvalMetric)}


def objects_of(metrics: Optional[Metrics]) -> Dict[str, Any]:
    """Return MXNet's objects among metrics, by name."""
    return {name: metric for name, metric in named_metrics(metrics).items() if isinstance(metric, mxnet_metric.EvalMetric)}


def named_metrics(metrics: Optional[Metrics]) -> Dict[str, Any]:
    """Return functions and MXNet's objects by name; one without a name gets its own. A composite's metrics keep their names.

    Raises
    ------
    TrainerError
        Something is neither, or two metrics have the same name.
    """
    given: List[Tuple[Optional[str], Any]]
    if isinstance(metrics, Mapping):
        given = list(metrics.items())
    else:
        is_one = callable(metrics) or isinstance(metrics, mxnet_metric.EvalMetric)
        listed: Any = [metrics] if is_one else [] if metrics is None else metrics
        what = "a list of metrics, or a dict name -> metric"
        instance("metrics", "metrics", listed, (list, tuple), what, advice="Pass [accuracy].")
        given = [(None, metric) for metric in listed]
    pairs = [pair for name, metric in given for pair in _pairs_of(metric, name)]
    named = dict(pairs)
    if len(named) < len(pairs):
        raise TrainerError(
            f"metrics: got {len(pairs)} of which some share a name; expected different names. Pass a dict name -> metric."
        )
    taken = {"loss", "grad_norm"}.intersection(named)
    if taken:
        raise TrainerError(f"metrics: got {taken.pop()!r}; expected another name, as fit() reports its own. Rename it.")
    for name, metric in named.items():
        if not isinstance(metric, mxnet_metric.EvalMetric):
            advice = "Pass gluon_mgpu.accuracy, or an object such as mx.metric.F1()."
            check_function("metrics", str(name)[:60], metric, advice=advice)
    return named


def _pairs_of(metric: Any, name: Optional[str] = None) -> List[Tuple[str, Any]]:
    """Return a metric with this name or its own, or the metrics of a composite with theirs."""
    if type(metric) is mxnet_metric.CompositeEvalMetric:  # a subclass may compute values of its own
        return [pair for one in metric.metrics for pair in _pairs_of(one)]
    if name is None and isinstance(metric, mxnet_metric.EvalMetric):
        name = metric.name
    return [(getattr(getattr(metric, "func", metric), "__name__", str(metric)) if name is None else name, metric)]


def total_of(array: Array) -> Array:
    """Return the sum of an array as a legacy array of shape (1,), on its device, counted in float32 or better."""
    classic = array.as_nd_ndarray().reshape((-1,))
    is_small = classic.dtype in (np.float16, np.bool_, np.int8, np.uint8)
    return mx.nd.sum(classic.astype("float32") if is_small else classic).reshape((1,))

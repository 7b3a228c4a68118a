"""Figures of measurements, drawn without a display; a notebook shows them after `%matplotlib inline`."""

from __future__ import annotations

import json
from numbers import Real
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple, Union

from .checks import whole_number
from .errors import TrainerError
from .runtime.environment import require
from .runtime.new_files import new_file
from .runtime.profiler import Operation, batches_of
from .runtime.units import column_title, in_percent


def figure(width: float = 10, height: float = 4) -> Any:
    """Return an empty matplotlib figure, sizes in inches, that requires no display and no backend.

    Raises
    ------
    MissingExtraError
        matplotlib is not installed.
    """
    made = require("matplotlib.figure", "train", "plot").Figure(figsize=(width, height))
    require("matplotlib.backends.backend_agg", "train", "plot").FigureCanvasAgg(made)
    return made


def save(made: Any, path: Union[str, Path]) -> None:
    """Write a figure as a PNG with 120 dots per inch, which replaces the file once it is complete."""
    path = Path(path)
    with new_file(path if path.suffix else path.with_suffix(".png"), follow=False) as new:
        made.savefig(str(new), dpi=120)


def plot_history(rows: Sequence[Dict[str, float]]) -> Any:
    """Return a figure of a training run against epochs: the loss, shares and scores in percent, and other metrics.

    Parameters
    ----------
    rows : sequence of dict
        One per epoch, with `epoch`, and `train_...`, `test_...` and `valid_...` columns; those that hold numbers are drawn.
    """
    charts: Dict[str, List[Tuple[str, Sequence[float], Sequence[float]]]] = {"loss": []}
    for name in dict.fromkeys(name for row in rows for name in row):  # some columns begin later
        if name.startswith(("train_", "test_", "valid_")) and all(isinstance(row.get(name, 0), Real) for row in rows):
            epochs = [row["epoch"] for row in rows if name in row]
            label, values = _labelled(name, [row[name] for row in rows if name in row])
            charts.setdefault(label, []).append((name, epochs, values))
    made = figure(5 * len(charts), 4)
    for axes, (label, columns) in zip(made.subplots(1, len(charts), squeeze=False)[0], charts.items()):
        for name, places, heights in columns:
            axes.plot(places, heights, "--" if name.startswith("train_") else "-", marker=".", label=column_title(name))
        axes.set(xlabel="epoch", ylabel=label)
        axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.set_xlim(rows[0]["epoch"] - 0.5, rows[-1]["epoch"] + 0.5)
            axes.legend()
    made.tight_layout()
    return made


def _labelled(name: str, values: Sequence[float]) -> Tuple[str, Sequence[float]]:
    """Return the label of a column's axis, with its unit, and the values in that unit."""
    percents = [in_percent(name, value) for value in values]
    if name.endswith("_loss"):
        return "loss", values
    if name.endswith(("_bleu", "_chrf")):
        return "score, 0 to 100", values
    return ("other metrics", values) if None in percents else ("%", percents)  # type: ignore[return-value]


def plot_trace(path: Union[str, Path], *, steps: int = 3) -> Any:
    """Return a figure of a trace that `fit(trace=...)` has written: what the host and each device did, against time.

    Parameters
    ----------
    path : str or pathlib.Path
    steps : int
        How many of its steps to show, from the first.

    Raises
    ------
    OSError
        The file cannot be read.
    """
    events = json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = [event for event in events if event["ph"] == "X"]
    marked = [event for event in spans if event["name"].startswith("step ")]
    borders = [event["ts"] / 1e3 for event in marked] + [(event["ts"] + event["dur"]) / 1e3 for event in marked[-1:]]
    end = borders[min(steps, len(marked))] if borders else 0.0
    made = figure(12, 1.2 + 0.45 * len(lanes))
    axes = made.subplots()
    bars: Dict[str, Dict[int, List[Tuple[float, float]]]] = {}
    for event in spans:
        if event["ts"] / 1e3 < end and not event["name"].startswith("step "):
            kind = _kind_of(event)
            bars.setdefault(kind, {}).setdefault(event["tid"], []).append((event["ts"] / 1e3, event["dur"] / 1e3))
    tids = list(lanes)
    for kind in (kind for kind in _TRACE_COLORS if kind in bars):
        for number, (tid, pieces) in enumerate(bars[kind].items()):
            label = kind if not number else None
            axes.broken_barh(pieces, (tids.index(tid) - 0.4, 0.8), color=_TRACE_COLORS[kind], linewidth=0, label=label)
    for border in borders[: steps + 1]:
        axes.axvline(border, color="black", linewidth=0.5, linestyle=":")
    groups = {event["tid"]: event["cat"] for event in spans}
    axes.set_yticks(range(len(tids)))
    axes.set_yticklabels([_lane_label(groups.get(tid, ""), lanes[tid]) for tid in tids], fontsize=8)
    axes.set(xlabel="ms", xlim=(0, end), ylim=(len(tids) - 0.5, -0.5))
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    made.tight_layout()
    return made


_TRACE_COLORS = {
    "data": "tab:olive",
    "split": "tab:cyan",
    "dispatch": "tab:purple",
    "wait": "lightgray",
    "callbacks": "tab:pink",
    "between epochs": "gray",
    "operations": "tab:blue",
    "backward operations": "tab:green",
    "sums and updates": "tab:orange",
    "forward tasks": "tab:blue",
    "backward tasks": "tab:green",
    "idle": "tab:red",
}


def plot_schedule(path: Union[str, Path], *, step: int = 0) -> Any:
    """Return a figure of a pipeline's tasks in one batch, as they ran: one lane per device, one box per task, idle time between.

    A box holds the number of its micro-batch, `stage:micro-batch` if its device has several stages. The share of idle time is
    that of the time from the first task of the batch to the last.

    Parameters
    ----------
    path : str or pathlib.Path
        A trace that `fit(trace=...)` has written.
    step : int
        Which of its batches: 0 is the first. With `micro_steps`, each part of a batch counts.

    Raises
    ------
    TrainerError
        The trace has no tasks, or fewer batches.
    OSError
        The file cannot be read.
    """
    step = whole_number("plot_schedule", "step", step, low=0, advice="0 is the first batch of the trace.")
    lanes, batches = _read_tasks(path)
    if step >= len(batches):
        raise TrainerError(
            f"plot_schedule: got step={step} of {path}, which has tasks of {len(batches)} batches; expected one of a Pipeline "
            "with more steps. Call fit(pipeline, ..., trace=Trace(path, steps=20)), or plot_trace for other networks."
        )
    tasks = batches[step]
    begin, end = tasks[0].begin, max(task.end for task in tasks)
    made = figure(12, 1.3 + 0.5 * len(lanes))
    axes = made.subplots()
    labels = []
    for at, device in enumerate(lanes):
        own = [task for task in tasks if task.device == device]
        has_stages = len({task.name.split(".")[0][1:] for task in own}) > 1
        axes.broken_barh([(0, end - begin)], (at - 0.4, 0.8), **_IDLE_STYLE, label="idle" if not at else None)
        for task in own:
            _draw_task(axes, task, at, begin, end - begin, has_stages=has_stages)
        idle = 1 - sum(task.end - task.begin for task in own) / (end - begin)
        labels.append(f"{device}\n{idle:.0%} idle")
    for kind, color in _TASK_COLORS.items():
        axes.broken_barh([], (0, 0), color=color, label=_TASK_NAMES[kind])
    axes.set_yticks(range(len(lanes)))
    axes.set_yticklabels(labels, fontsize=9)
    axes.set(xlabel="ms", xlim=(0, end - begin), ylim=(len(lanes) - 0.5, -0.5))
    handles, names = axes.get_legend_handles_labels()
    axes.legend(handles[1:] + handles[:1], names[1:] + names[:1], fontsize=9, loc="upper left", bbox_to_anchor=(1, 1))
    made.tight_layout()
    return made


_TASK_COLORS = {"F": _TRACE_COLORS["forward tasks"], "B": _TRACE_COLORS["backward tasks"]}
_TASK_NAMES = {"F": "forward", "B": "backward"}
_IDLE_STYLE = {"facecolor": "white", "edgecolor": "lightgray", "hatch": "////", "linewidth": 0}
_LETTER = 1 / 115  # the width of a digit of size 10, as a share of the figure's


def _draw_task(axes: Any, task: Operation, at: int, begin: float, total: float, *, has_stages: bool) -> None:
    """Draw a task's box, and its label if there is room for it."""
    width = task.end - task.begin
    axes.broken_barh(
        [(task.begin - begin, width)], (at - 0.4, 0.8), facecolor=_TASK_COLORS[task.name[0]], edgecolor="white", linewidth=0.8
    )
    stage, micro_batch = task.name[1:].split(".")
    label = f"{stage}:{micro_batch}" if has_stages else micro_batch
    size = min(10.0, 10 * width / total / _LETTER / len(label))
    if size >= 6:
        axes.text(task.begin - begin + width / 2, at, label, ha="center", va="center", color="white", fontsize=size)


def _read_tasks(path: Union[str, Path]) -> Tuple[List[str], List[List[Operation]]]:
    """Return the lanes of the tasks of a trace, and the tasks of each batch in ms."""
    events = json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"]
    groups = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    of_tasks = [event for event in events if groups.get(event["pid"]) == "tasks"]
    lanes = {event["tid"]: event["args"]["name"] for event in of_tasks if event["name"] == "thread_name"}
    spans = [event for event in of_tasks if event["ph"] == "X"]
    tasks = [Operation(lanes[one["tid"]], one["name"], one["ts"] / 1e3, (one["ts"] + one["dur"]) / 1e3) for one in spans]
    return list(lanes.values()), batches_of(tasks)


def _kind_of(event: Dict[str, Any]) -> str:
    """Return the name in the legend of a span of a trace."""
    if event["cat"] == "tasks":
        return "forward tasks" if event["name"].startswith("F") else "backward tasks"
    if event["cat"] == "devices" and not event["name"].startswith("idle"):
        return "backward operations" if "backward" in event["name"] else "operations"
    return event["cat"] if event["cat"] == "sums and updates" else str(event["name"].split(":")[0])


def _lane_label(group: str, lane: str) -> str:
    return {"host": "host", "sums and updates": f"{lane}: sums, updates", "tasks": f"{lane}: tasks"}.get(group, lane)

"""Runs the trials of a search in Ray Tune: starts Ray, passes on what is reported, stops, and resumes."""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
import tempfile
import time
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List

from rich.console import Console
from rich.live import Live
from rich.table import Table

from ..errors import DeviceError
from ..loop.stopping import Terminated
from ..runtime.environment import require
from ..runtime.threads import num_cores
from .report import require_tune
from .results import Request, Results, Trial, read_request
from .space import Options, Values, read_space

Trainable = Callable[[Options, str], None]

MUTABLE = ("lr", "clip-norm", "clip-value", "dropout", "label-smoothing")  # no other layers, and no other number of batches
_RAY = "ray"  # Ray Tune's folder in that of the search
_TEMPORARY = "ray-temporary.txt"  # names Ray's temporary folder, to remove it after a kill
_PREFIX = "gluon_mgpu-ray-"
_RETRIES = 3  # of a trial whose process was killed
_STATUS = {"PENDING": "waiting", "RUNNING": "running", "PAUSED": "paused", "TERMINATED": "stopped", "ERROR": "failed"}
_OBJECT_STORE_BYTES = 100 * 2**20
# Ray reads them at its import, and its processes inherit them: no reports to its makers, one table (ours), relative paths that
# stay valid, its state saved at once, and no other address than 127.0.0.1, which Ray otherwise replaces by one of a network.
_SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "1",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
}


def set_defaults() -> None:
    """Set what Ray reads from the environment, unless it is set already: before Ray is imported."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)


def run_trials(trainable: Trainable, folder: Path) -> Results:
    """Run the trials of the search in a folder, or those that are left, and return the results.

    Parameters
    ----------
    trainable : callable (dict, str)
        Trains one trial, in a process of its own. It receives its hyper-parameters, and a folder for files that need not stay.
        It reports with `ReportToTune`, and at its end `{"ended": "", "epoch": 0}`, or why it failed.
    folder : pathlib.Path
        Holds the search's `Request`, and receives the results.

    Raises
    ------
    DeviceError
        The machine lacks the devices of a trial.
    KeyboardInterrupt, Terminated
        Ctrl-C or SIGTERM, after the results were written.
    """
    tune = require_tune("search")
    request = read_request(folder)
    random.seed(request.seed)  # population-based training draws from it
    with _started_ray(request, folder) as (resources, temporary), _sigterm_as_interrupt() as terminated:
        tuner = _tuner(tune, tune.with_resources(_named(trainable, temporary), resources), folder)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Consider boosting PBT")  # trials have processes of their own
            tuner.fit()
    results = Results(request, folder)
    unfinished = [trial for trial in results.trials.values() if trial.status in ("waiting", "running", "paused")]
    if unfinished:
        where = f"{len(unfinished)} of {len(results.trials)} trials are not finished. Results are in {folder}; --resume continues"
        raise Terminated(where) if terminated else KeyboardInterrupt(where)
    return results


def _named(trainable: Trainable, temporary: str) -> Callable[[Dict[str, Any]], None]:
    """Return the function for Ray. Its name stays the same, because a resumed search compares it."""

    def trial(config: Dict[str, Any]) -> None:
        trainable(config["options"], temporary)

    return trial


def _tuner(tune: Any, trainable: Any, folder: Path) -> Any:
    """Return a new tuner, or the one of an interrupted search."""
    request, path = read_request(folder), folder.absolute() / _RAY
    space = {"options": tune.grid_search(request.trials)}
    if list(path.glob("experiment_state-*.json")) and tune.Tuner.can_restore(str(path)):
        return tune.Tuner.restore(str(path), trainable=trainable, param_space=space, resume_unfinished=True, resume_errored=True)
    shutil.rmtree(path, ignore_errors=True)  # killed before the first trial
    return tune.Tuner(
        trainable,
        param_space=space,
        tune_config=tune.TuneConfig(
            metric=request.metric,
            mode=request.mode,
            scheduler=None if request.scheduler == "none" else make_scheduler(str(folder)),
            reuse_actors=False,
            trial_dirname_creator=_trial_dirname,
        ),
        run_config=tune.RunConfig(
            name=_RAY,
            stop={"epoch": request.epochs},  # what follows it in a training program is of no use here
            storage_path=str(folder.absolute()),
            callbacks=[make_watch(str(folder))],
            failure_config=tune.FailureConfig(max_failures=_RETRIES),
            checkpoint_config=tune.CheckpointConfig(num_to_keep=_num_kept(request)),
            verbose=0,
        ),
    )


def _trial_dirname(trial: Any) -> str:
    return f"trial-{_number_of(trial)}"


def _number_of(trial: Any) -> int:
    """Return the number of a trial from 1: Ray's identifiers end in it, from 0."""
    return int(trial.trial_id.rsplit("_", 1)[1]) + 1


def _interval(epochs: int) -> int:
    """Return the number of epochs between two changes by population-based training."""
    return max(1, epochs // 4)


def _num_kept(request: Request) -> int:
    """Return how many checkpoints of each trial to keep: two, so that Ray Tune's saved state, which is older, names one.

    Population-based training copies a checkpoint of the trial's previous interval.
    """
    return _interval(request.epochs) + 2 if request.scheduler == "pbt" else 2


def make_scheduler(folder: str) -> Any:
    """Return Ray's scheduler of the search in a folder. Pickle stores a call of this function."""
    request = read_request(Path(folder))
    schedulers = require("ray.tune.schedulers", "tune", "search")
    if request.scheduler == "pbt":
        space = {name: values for name, values in read_space(request.space).items() if name in MUTABLE}
        return schedulers.PopulationBasedTraining(
            time_attr="epoch",
            perturbation_interval=_interval(request.epochs),
            hyperparam_mutations={"options": {name: _domain(values) for name, values in space.items()}},
            custom_explore_fn=_Clipped(space),
            require_attrs=False,
            log_config=False,
        )

    class ASHA(schedulers.AsyncHyperBandScheduler):  # type: ignore[name-defined]
        """Ray's, whose memory of earlier results survives a restart of the search: Ray does not save it."""

        def on_trial_add(self, controller: Any, trial: Any) -> None:
            super().on_trial_add(controller, trial)
            reached = request.epochs if "ended" in trial.last_result else trial.last_result.get("epoch", 0)
            for row in Results(request, Path(folder)).trials[_number_of(trial)].rows:
                if row["epoch"] <= reached:
                    self.on_trial_result(controller, trial, row)  # its decision was made before the restart

        def __reduce__(self) -> Any:
            return make_scheduler, (folder,)

    return ASHA(time_attr="epoch", max_t=request.epochs, grace_period=1, reduction_factor=3, stop_last_trials=False)


def _domain(values: Values) -> Any:
    if values.kind == "choice":
        return list(values.choices)
    tune = require_tune("search")
    return {"log": tune.loguniform, "uniform": tune.uniform}.get(values.kind, tune.randint)(values.low, values.high)


class _Clipped:
    """Keeps what population-based training has changed inside the space."""

    def __init__(self, space: Dict[str, Values]) -> None:
        self._space = space

    def __call__(self, config: Dict[str, Any]) -> Dict[str, Any]:
        options: Options = config["options"]
        clipped = {name: self._space[name].clipped(value) if name in self._space else value for name, value in options.items()}
        return {**config, "options": clipped}


def make_watch(folder: str) -> Any:
    """Return a callback of Ray Tune that writes the results of the search in a folder, and shows them.

    Pickle stores a call of this function.
    """
    tune = require_tune("search")
    results = Results(read_request(Path(folder)), Path(folder))
    shown = _Shown(results)
    known: Dict[str, Any] = {}

    class Watch(tune.Callback):  # type: ignore[name-defined]
        """Records each result."""

        def on_trial_result(self, iteration: int, trials: List[Any], trial: Any, result: Dict[str, Any], **info: Any) -> None:
            own = results.trials[_number_of(trial)]
            own.options = dict(trial.config["options"])  # the scheduler may already have changed those of this result
            if "ended" in result:
                own.reason = result["ended"]
            elif "epoch" in result:
                names = [name for name in result if name not in _RAYS and not name.startswith("config")]
                row = {name: result[name] for name in names if isinstance(result[name], (int, float, str))}
                own.add(row, result["config"]["options"])
                shown.report(own)
            results.save()

        def on_step_end(self, iteration: int, trials: List[Any], **info: Any) -> None:
            changed = [one for one in trials if self._update(one)]
            if changed:
                results.save()
            shown.refresh(bool(changed))

        def on_experiment_end(self, trials: List[Any], **info: Any) -> None:
            shown.end()  # after Ctrl-C, Ray now has the status of finished trials for all others

        def _update(self, trial: Any) -> bool:
            own, before = results.trials[_number_of(trial)], known.get(trial.trial_id)
            own.status = _STATUS[trial.status]
            if trial.status == "ERROR":
                own.reason = str(trial.get_error() or "its process ended").strip().splitlines()[-1]
            elif trial.status != "TERMINATED":
                own.reason = ""  # of an earlier attempt
            elif own.reason:
                own.status = "failed"
            elif "ended" in trial.last_result or trial.last_result.get("epoch") == results.request.epochs:
                own.status = "done"
            known[trial.trial_id] = own.status
            return own.status != before

        def __reduce__(self) -> Any:
            return make_watch, (folder,)

    return Watch()


_RAYS = {"timestamp", "date", "time_this_iter_s", "time_total_s", "pid", "hostname", "node_ip", "time_since_restore"}
_RAYS |= {"iterations_since_restore", "checkpoint_dir_name", "should_checkpoint", "done", "training_iteration", "trial_id"}
_RAYS |= {"experiment_tag"}


class _Shown:
    """The trials as a table that changes on a terminal, and as one line for each epoch elsewhere."""

    def __init__(self, results: Results) -> None:
        self._results, self._console = results, Console(emoji=False)
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None
        self._at = 0.0

    def report(self, trial: Trial) -> None:
        """Print the last row of a trial, except on a terminal."""
        request, row = self._results.request, trial.rows[-1]
        if self._live is None:
            options = "  ".join(f"{name} {value}" for name, value in row["options"].items())
            value = _short(row.get(request.metric, "?"))
            print(f"trial {trial.number}  epoch {row['epoch']}/{request.epochs}  {request.metric} {value}  {options}", flush=True)

    def refresh(self, now: bool) -> None:
        """Draw the table again: now, or once a second."""
        if self._live is None or not (now or time.monotonic() - self._at > 1):
            return
        self._at = time.monotonic()
        self._live.start()
        self._live.update(trial_table(self._results), refresh=True)

    def end(self) -> None:
        """Leave the last table on the terminal, or print it."""
        if self._live is None:
            Console(emoji=False, width=120).print(trial_table(self._results))
        else:
            self.refresh(True)
            self._live.stop()


def trial_table(results: Results) -> Table:
    """Return the trials as a table, the best one marked."""
    request, best, table = results.request, results.best(), Table()
    for name in ("trial", "status", "epoch", request.metric, *request.trials[0]):
        table.add_column(name, justify="left" if name == "status" else "right", overflow="fold")
    for trial in results.trials.values():
        mark, value = ("* " if trial is best else ""), results.value(trial)
        epoch = f"{trial.rows[-1]['epoch'] if trial.rows else 0}/{request.epochs}"
        options = [_short(value) for value in trial.options.values()]
        style = "bold" if trial is best else "dim" if trial.status in ("stopped", "failed") else None
        table.add_row(f"{mark}{trial.number}", trial.status, epoch, "" if value is None else _short(value), *options, style=style)
    return table


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@contextmanager
def _started_ray(request: Request, folder: Path) -> Iterator[Any]:
    """Start Ray on this machine alone; yield the resources of a trial, and a temporary folder. Both end with the block."""
    ray = require("ray", "tune", "search")
    kind, number = request.kind_and_number
    left = folder / _TEMPORARY
    if left.exists():
        before = Path(left.read_text(encoding="utf-8"))
        if before.name.startswith(_PREFIX):
            shutil.rmtree(before, ignore_errors=True)
    base = tempfile.gettempdir()
    temporary = tempfile.mkdtemp(prefix=_PREFIX, dir=base if len(base) < 30 else "/tmp")  # the names of sockets have a limit
    left.write_text(temporary, encoding="utf-8")
    try:
        ray.init(
            address="local",
            num_cpus=num_cores(),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=_OBJECT_STORE_BYTES,
            _node_ip_address="127.0.0.1",
            _temp_dir=temporary,
        )
        logging.getLogger("ray.tune").setLevel(logging.ERROR)
        there = ray.cluster_resources().get(kind.upper(), 0)
        if number > there:
            raise DeviceError(
                f"search: got --devices-per-trial {request.devices} on a machine with {there:.0f} "
                f"{'cores' if kind == 'cpu' else 'GPUs'}; expected at most that many. Pass fewer."
            )
        yield ({"cpu": number} if kind == "cpu" else {"cpu": 1, "gpu": number}), temporary
    finally:
        ray.shutdown()
        shutil.rmtree(temporary, ignore_errors=True)
        left.unlink()


@contextmanager
def _sigterm_as_interrupt() -> Iterator[List[int]]:
    """Treat SIGTERM as Ctrl-C, which Ray Tune handles; the yielded list then holds its number.

    Starting Ray replaces the handler of SIGTERM, so this comes after it.
    """
    caught: List[int] = []

    def handle(signum: int, _frame: Any) -> None:
        caught.append(signum)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield caught
    finally:
        signal.signal(signal.SIGTERM, before)

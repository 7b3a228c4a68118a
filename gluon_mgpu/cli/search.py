"""gluon-mgpu search: searches for hyper-parameters of the training programs with Ray Tune."""

from __future__ import annotations

import importlib
import re
import shutil
import traceback
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import click
from click.core import ParameterSource

from ..errors import DataError, last_line
from ..loop.callbacks import Callback, Checkpoint
from ..loop.stopping import Terminated
from ..plots import plot_trials, save
from ..runtime.environment import require
from ..runtime.file_locks import FolderLock
from ..tune.report import ReportToTune, require_tune, trial_folder
from ..tune.results import REQUEST, Request, Results, read_request
from ..tune.running import MUTABLE, run_trials, set_defaults
from ..tune.space import Options, arguments_of, read_space, sample_trials
from ._options import count, output_option, seed_option
from ._training import FitExtras
from .train import train_resnet18
from .train_seq2seq import monitored, train_seq2seq


@dataclass(frozen=True)
class Program:
    """A training program, its usual space, and the metric by which its trials are compared."""

    command: click.Command
    space: Tuple[str, ...]
    metric: Callable[[Dict[str, Any]], str]


PROGRAMS = {
    "resnet18": Program(
        train_resnet18, ("lr=log:0.003:0.3", "batch-size=choice:32,64,128"), metric=lambda options: "test_accuracy"
    ),
    "seq2seq": Program(
        train_seq2seq,
        (
            "lr=log:0.0003:0.03",
            "batch-tokens=choice:600,1200,2400",
            "hidden-size=choice:64,128,256",
            "dropout=uniform:0:0.4",
            "label-smoothing=uniform:0:0.2",
        ),
        metric=monitored,
    ),
}
_OURS = ("devices", "output", "resume", "epochs", "seed")  # of a trial: this command sets them
_DEFAULT_SPACES = "; ".join(f"for {name}, {' '.join(program.space)}" for name, program in PROGRAMS.items())


@click.command()
@click.argument("program", type=click.Choice(list(PROGRAMS)))
@count("--trials", default=20, help="Number of trials.")
@click.option(
    "--devices-per-trial",
    default="cpu*1",
    show_default=True,
    help="cpu*N, N CPU contexts with one core each, or gpu*N, N GPUs. As many trials run at once as the machine has devices for.",
)
@click.option(
    "--scheduler",
    type=click.Choice(["asha", "pbt", "none"]),
    default="asha",
    show_default=True,
    help="asha stops trials that are worse than two thirds of the others; pbt replaces the worst trials by copies of the best "
    f"ones and changes their {', '.join(MUTABLE)}; none runs all to the end.",
)
@click.option(
    "--space",
    multiple=True,
    metavar="NAME=VALUES",
    help="Options of the training program to search, such as 'lr=log:1e-4:1e-1 dropout=uniform:0:0.5 num-layers=int:1:3 "
    f"cell=choice:gru,lstm'. By default, {_DEFAULT_SPACES}.",
)
@click.option("--metric", help="Column of the history by which trials are compared. By default, the one that chooses best.")
@click.option("--mode", type=click.Choice(["min", "max"]), help="Whether smaller or larger is better. By default, by the name.")
@count("--epochs", default=8, help="Largest number of epochs of a trial.")
@output_option("runs/search", "results.csv, results.json, search.png, best_trial, and what --resume needs")
@seed_option("Seed of the trials' hyper-parameters, and of each trial's weights and data.")
@click.option("--resume", is_flag=True, help="Continue the search in --output, with the options that it was started with.")
@click.argument("arguments", metavar="[ARGUMENTS...]", nargs=-1)
@click.pass_context
def search(context: click.Context, /, program: str, resume: bool, output: Path, **options: Any) -> None:
    """Search for hyper-parameters of gluon-mgpu train PROGRAM: several trials, each in a process of its own.

    Arguments after -- go to every trial: gluon-mgpu search resnet18 --trials 8 -- --data mnist. Ctrl-C keeps all results, and
    --resume continues.
    """
    set_defaults()
    require_tune("search")
    asked = None if resume else _request(program, **options)  # raises before anything is written
    if asked is None:
        _check_resumed(context, read_request(output))
    elif (output / REQUEST).exists():
        raise DataError(f"search: got {output}, which holds a search; expected a new folder. Pass --resume, or another --output.")
    output.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(output, "search")
    lock.acquire()
    try:
        if asked is not None:
            asked.write(output)
        request = read_request(output)
        try:
            results = run_trials(_trainable(request, output.absolute()), output)
        except (KeyboardInterrupt, Terminated):
            _summarize(Results(request, output))
            raise
        _check_trained(results)
        _summarize(results)
    finally:
        lock.release()


def _request(
    program: str,
    trials: int,
    devices_per_trial: str,
    scheduler: str,
    space: Sequence[str],
    metric: Optional[str],
    mode: Optional[str],
    epochs: int,
    seed: int,
    arguments: Sequence[str],
) -> Request:
    """Return the search, having checked that the training program accepts all of its trials."""
    if not re.fullmatch(r"(cpu|gpu)[*:][1-9]\d*", devices_per_trial):
        raise click.BadParameter(f"got {devices_per_trial!r}; expected cpu*N or gpu*N.", param_hint="--devices-per-trial")
    texts = " ".join(space).split() or list(PROGRAMS[program].space)
    if scheduler == "pbt" and not set(read_space(texts)) & set(MUTABLE):
        raise click.BadParameter(f"got none of {', '.join(MUTABLE)}, which pbt can change; expected one.", param_hint="--space")
    parsed = _parse(program, list(arguments))
    given = [name for name in _OURS if parsed.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    if given:
        raise click.UsageError(
            f"got --{given[0]} after --; expected only options that the search does not set. Pass --devices-per-trial, --epochs, "
            "--seed and --output before --."
        )
    searched = sample_trials(read_space(texts), trials, seed)
    known = {word for parameter in parsed.command.params for word in parameter.opts if not getattr(parameter, "is_flag", False)}
    for name in searched[0]:
        if f"--{name}" not in known or name in _OURS:
            raise click.BadParameter(
                f"got {name!r}; expected options of gluon-mgpu train {program} that take a value.", param_hint="--space"
            )
        if parsed.get_parameter_source(name.replace("-", "_")) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"got --{name} after -- and in --space; expected one of them.")
    for trial in searched:
        _parse(program, [*arguments, *arguments_of(trial)])  # raises if a value is out of range
    metric = metric or PROGRAMS[program].metric(parsed.params)
    return Request(
        program=program,
        arguments=["--epochs", str(epochs), "--seed", str(seed), *arguments],
        trials=searched,
        space=texts,
        metric=metric,
        mode=mode or ("min" if metric.endswith("loss") else "max"),
        scheduler=scheduler,
        devices=devices_per_trial,
        epochs=epochs,
        seed=seed,
    )


def _parse(program: str, arguments: List[str], extras: Optional[FitExtras] = None) -> click.Context:
    """Return the context of a training program with these arguments, checked."""
    return PROGRAMS[program].command.make_context(f"gluon-mgpu train {program}", list(arguments), obj=extras)


def _check_resumed(context: click.Context, stored: Request) -> None:
    """Raise if the command line has other options than the search that it resumes."""
    then = {"program": stored.program, "trials": len(stored.trials), "scheduler": stored.scheduler, "metric": stored.metric}
    then.update(devices_per_trial=stored.devices, mode=stored.mode, epochs=stored.epochs, seed=stored.seed)
    then.update(space=stored.space, arguments=stored.arguments[4:])
    for name, value in then.items():
        now = context.params[name]
        now = " ".join(now).split() if name in ("space", "arguments") else now
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE and now != value and now != []:
            raise click.UsageError(
                f"got {name.replace('_', '-')} {now} for a search that was started with {value}; expected the same. Leave it "
                "out, or start another search with another --output."
            )


def _trainable(request: Request, output: Path) -> Callable[[Options, str], None]:
    """Return the function that trains one trial. Ray sends its code, so MXNet is imported after Ray has set the devices."""
    name, values = __name__, (request.program, list(request.arguments), request.device_names, str(output / "logs"))
    load = importlib.import_module

    def run(options: Options, temporary: str) -> None:
        load(name).run_trial(options, temporary, *values)

    return run


def run_trial(options: Options, temporary: str, program: str, arguments: List[str], devices: str, logs: str) -> None:
    """Train one trial of a search, in the process that Ray Tune has started for it. Its output goes to a file in `logs`."""
    tune = require("ray.tune", "tune", "search")
    folder = trial_folder(temporary)
    number = int(folder.name.rsplit("_", 1)[1]) + 1
    words = [*arguments, *arguments_of(options), "--devices", devices, "--output", str(folder), "--resume", "auto"]
    Path(logs).mkdir(exist_ok=True)
    ended = ""
    with open(Path(logs) / f"trial-{number}.txt", "a", encoding="utf-8") as log, redirect_stdout(log), redirect_stderr(log):
        print(f"gluon-mgpu train {program} {' '.join(words)}", flush=True)
        extras = FitExtras(_with_report, {"hyperparameters": "trainer"})
        try:
            with _parse(program, words, extras) as context:
                context.command.invoke(context)
        except OSError:  # a full disk, for example: Ray Tune tries again, from the trial's last checkpoint
            traceback.print_exc()
            raise
        except Exception as error:  # such as a loss of NaN: it would fail again
            traceback.print_exc()
            ended = f"{type(error).__name__}: {last_line(error)}"
    tune.report({"ended": ended, "epoch": 0})


def _with_report(callbacks: List[Callback]) -> List[Callback]:
    saves = next(callback for callback in callbacks if isinstance(callback, Checkpoint))
    return [*callbacks, ReportToTune(saves)]


def _summarize(results: Results) -> None:
    """Write the files of a search, and print its best trial as a command."""
    request, folder, best = results.request, results.folder, results.best()
    if best is None:
        return
    values = {trial.number: results.value(trial) for trial in results.trials.values()}
    points = [(trial.options, values[trial.number], trial is best) for trial in results.trials.values()]
    kinds = {name: one.kind for name, one in read_space(request.space).items()}
    save(plot_trials(points, kinds, request.metric), folder / "search.png")
    _copy_best(folder, best.number)
    print(f"saved results.csv, results.json, search.png and best_trial in {folder}")
    print(f"best: trial {best.number}, {request.metric} {values[best.number]:.4g}")
    print(request.command(best.options), flush=True)


def _check_trained(results: Results) -> None:
    """Raise if no trial has a value."""
    if results.best() is None:
        metric, reasons = results.request.metric, [trial.reason for trial in results.trials.values() if trial.reason]
        raise DataError(
            f"search: got no trial with {metric!r} ({reasons[0] if reasons else 'no column of this name'}); expected one or "
            f"more. Read the trials' output in {results.folder / 'logs'}. Correct --space, --metric or the options after --."
        )


def _copy_best(folder: Path, number: int) -> None:
    """Copy the latest checkpoints of the best trial to `best_trial`."""
    saved = sorted((folder / "ray" / f"trial-{number}").glob("checkpoint_*"))
    if saved:
        shutil.rmtree(folder / "best_trial", ignore_errors=True)
        shutil.copytree(saved[-1], folder / "best_trial")

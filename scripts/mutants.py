"""Mistakes made on purpose: each must make the tests of the default run fail.

    python scripts/mutants.py              # all of them; the exit status is 1 if one survives
    python scripts/mutants.py 3 17         # only these
    python scripts/mutants.py --list

Each mutant replaces one piece of code in a copy of the tree, and runs the tests that should notice, without `--exhaustive`. One
that survives asks for a test. A mutant whose code has changed is reported: update it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import List, Sequence, Tuple

import click

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("gluon_mgpu", "gluon_mgpu_startup", "tests", "scripts", "docs", "setup.cfg", "pyproject.toml")
TIMEOUT_S = 900


@dataclass(frozen=True)
class Mutant:
    """One wrong replacement in one module, and the test files that should fail."""

    mistake: str
    module: str
    right: str
    wrong: str
    tests: Tuple[str, ...]


def _mutants() -> List[Mutant]:
    found: List[Mutant] = []

    def module(name: str, *tests: str) -> None:
        current[:] = [name, *tests]

    def add(mistake: str, right: str, wrong: str, *tests: str) -> None:
        found.append(Mutant(mistake, f"gluon_mgpu/{current[0]}.py", right, wrong, tuple(tests or current[1:])))

    current: List[str] = []
    module("data_parallel/sharding", "test_sharding")
    add(
        "every process takes the first part",
        "rank, num_processes = process_shard()",
        "rank, num_processes = 0, process_shard()[1]",
        "test_processes",
    )
    add("the remainder goes to the last shards", "each + (i < extra)", "each + (i >= num_shards - extra)")
    add("weights are not normalised", "num_examples * number / total", "num_examples * number")
    add("ties of the largest remainder go to the last", "sizes[i] - quotas[i])", "quotas[i] - sizes[i])")
    add("a shard of no examples is loaded", "zip(bounds, contexts) if end > begin]", "zip(bounds, contexts) if end >= begin]")
    add("gathered shards are in the wrong order", "mx.nd.concat(*moved, dim=axis)", "mx.nd.concat(*moved[::-1], dim=axis)")

    module("data_parallel/step", "test_step")
    add(
        "the nominal batch size divides",
        "num_examples if num_units is None else num_units, self.ignore_stale_grad",
        "1, self.ignore_stale_grad",
    )

    module("data_parallel/passes", "test_step")
    add(
        "the loss is not scaled for fp16",
        "backward(trainer.scale(losses) if losses else [])",
        "backward(losses if losses else [])",
        "test_mixed_training",
    )
    add(
        "evaluation runs in training mode",
        "autograd.pause(train_mode=False)",
        "autograd.pause(train_mode=True)",
        "test_evaluation",
    )

    module("data_parallel/compiled", "test_compiled")
    add("an executor writes into gradients that have moved", "self._moves != num_moves() or ", "")
    add("a gradient that a compiled pass writes is not marked", "writing_gradients(self._params,", "writing_gradients({},")

    module("data_parallel/executors", "test_compiled")
    add("outputs are not copied", "[output.new() for output in self._outputs]", "list(self._bound.outputs)")
    add("running statistics are written without telling the engine", "self._statistics.push()", "pass")
    add("passes that add use the executor of those that write", "(id(graph), state, *", "(id(graph), *")

    module("trainer/trainer", "test_trainer", "test_step")
    add(
        "the divisor is forgotten in accumulation",
        "self._num_counted += batch_size",
        "self._num_counted = batch_size",
        "test_accumulation",
    )
    add("clip_norm is compared with the gradient before it is divided", "self._clip_norm / rescale)", "self._clip_norm)")
    add("clip_value is compared with the gradient before it is divided", "self._clip_value / rescale)", "self._clip_value)")
    add("a discarded sum is still applied", "self._num_counted, self._summed = 0, None", "self._num_counted = 0", "test_trainer")

    module("trainer/reduction", "test_reduction", "test_trainer")
    add("devices are not reduced", "if self._num_devices == 1 and self._group is None:", "if True:")
    add(
        "the last slice of a bucket is left out",
        "range(0, size, step)]",
        "range(0, size - step, step)]",
        "test_buckets",
        "test_trainer",
    )

    add("weights stay on their owner", "for call in self._shares:", "for call in []:", "test_shard_optimizer")

    module("trainer/replicas", "test_trainer", "test_freshness")
    add(
        "the gradient of an idle device stays",
        "self._zero_idle(fresh, buffers)",
        "pass",
        "test_trainer",
        "test_freshness",
        "test_step",
    )
    add(
        "gradients stay fresh after a step",
        "self._fresh.clear()\n            if self._static_graph",
        "pass\n            if self._static_graph",
    )
    add("a frozen parameter is not noticed", "if self._placement.has_changed():", "if False:")
    add("a stale gradient raises nothing", "self._check_unused(used, ignore_stale_grad)", "pass")

    module("trainer/freshness", "test_freshness")
    add("an earlier pass counts", "return fresh & ~foreign", "return fresh")
    add("an undecidable pass is guessed", "            if is_foreign is None:", "            if False:")
    add("a pass that a loss of nothing made is forgotten", "(self.calls < history.empty)", "(self.calls < 0)")

    module("trainer/update", "test_parity", "test_trainer")
    add(
        "momentum is not applied to a bucket",
        "if optimizer.momentum > 0:",
        "if optimizer.momentum > 9:",
    )
    add("weight decay and rescaling are swapped", '("rescale_grad", optimizer.rescale_grad)', '("rescale_grad", 1.0)')

    add("states stay with the former owner", "if replica != owner and index in", "if False and index in", "test_shard_optimizer")
    add(
        "each owner counts alone",
        "[counts] * len(self._contexts) if",
        "[dict(counts) for _ in self._contexts] if",
        "test_shard_optimizer",
    )

    module("trainer/buffers", "test_shard_optimizer")
    add("the first device has the sum", "[self.gradients[self.owner]]", "self.gradients[:1]")

    module("trainer/loss_scaler", "test_loss_scaler", "test_mixed_training")
    add("the scale never grows", "self.num_good == self._every", "self.num_good == -1")
    add("the scale never falls", "max(_SMALLEST, scale / self._factor)", "max(_SMALLEST, scale)")

    module("trainer/running_stats", "test_running_stats", "test_batchnorm")
    add("all devices count alike", "weighted_mean(found, weights)", "weighted_mean(found, [1.0] * len(found))")

    module("trainer/buckets", "test_buckets")
    add(
        "weights of convolutions are laid into buckets",
        "return len(param.shape) > 2 and any(",
        "return False and any(",
        "test_buckets",
        "test_regressions",
    )

    module("data/sharded_sampler", "test_sharded_sampler")
    add("every process takes the first part", "self._process.rank", "0")

    module("checkpoint/atomic_folder", "test_folders", "test_checkpoint", "test_crash_images")
    add("the checksum is not compared", "if sha256.hexdigest() == ", "if True or sha256.hexdigest() == ")
    add("the size is not compared", "if size != entry", "if False and size != entry")
    add("the manifest is copied first", "for are_manifests in (False, True):", "for are_manifests in (True, False):")
    add("an unfinished folder is taken", "return bool(manifests)", "return True")
    add(
        "the old folder is preferred to the finished new one",
        "return new if _is_finished(new) else",
        "return old if os.path.isdir(old) else",
    )

    module("checkpoint/snapshot", "test_checkpoint", "test_resume")
    add(
        "the counts of the optimizer are lost",
        "trainer._update.restore(states, _counts(content)",
        "trainer._update.restore(states, {}",
    )
    add("the random generators are not restored", "rng.set_random_state(", "(lambda state: None)(", "test_resume")
    add(
        "the loss scale is not restored",
        'if trainer.loss_scaler is not None and training.get("loss_scaler") is not None:',
        "if False:",
        "test_precision",
        "test_checkpoint",
    )
    add(
        "running statistics of each device are not restored",
        'if training["devices"] == len(trainer.contexts):',
        "if False:",
        "test_resume",
        "test_checkpoint",
    )

    module("loop/metrics", "test_metrics", "test_evaluation")
    add("the mean is of shards, not of examples", "total / counts[name]", "total / len(counts)")
    add("sums are overwritten", "on_device[name] + total if name in on_device else total", "total")
    add("sums are of float32", 'values.astype("float64")', 'values.astype("float32")')

    module("distributed/membership", "test_processes")
    add("any_process asks only this process", "any(processes.all_gather_bytes(", "bool(processes.all_gather_bytes(")
    add("the mean over processes takes no weights", "weights=shares[shares > 0]", "weights=None")

    module("trainer/across_processes", "test_processes")
    add("the divisor is this process's own", "self._count_sum.run(0)", "pass")

    module("distributed/launcher/handshake", "test_strangers")
    add("a wrong proof is accepted", "hmac.compare_digest(", "bool(")
    module("loop/timeline", "test_trace")
    add("a device waits for the host before a sum", "waits_for_devices = end in updates", "waits_for_devices = False")
    add("operations before the trace count", "span.clipped(self.begin, self.end) for span", "span for span")
    module("trainer/update", "test_optimizers")
    add("prepared operators keep states that were replaced", "any(states.get(index) is not state for", "any(state is None for")
    add("rates of another parameter", "optimizer._get_lrs(indices)", "optimizer._get_lrs(indices[::-1])")
    module("data_parallel/executors", "test_compiled")
    add("Dropout is bound where no seed reaches it", "bind() if graph.draws else", "bind() if False else")
    module("pipeline/passes", "test_pipeline")
    add("tasks run as soon as they can", "queue_in_order(device, last, arrays", "queue_in_order(device, [], arrays")
    add("only one reader's gradient counts", "sum(ones[1:], ones[0]) if ones", "ones[0] if ones")
    add("a recomputed stage draws new numbers", "if micro_batch.seeds and", "if records and micro_batch.seeds and")
    add("statistics of micro-batches are not collected", "self._stats[stage].add(sum(micro_batch.sizes))", "pass")
    module("pipeline/schedule", "test_pipeline")
    add("1f1b holds one micro-batch more", "backward < depths[stage])", "backward <= depths[stage])")
    module("pipeline/running_stats", "test_pipeline")
    add("the variance of the means is left out", "num_examples * (of_var + mx.nd.square(of_mean))", "num_examples * of_var")
    module("trainer/groups", "test_pipeline")
    add("the norm is of one group", "for own in buffers.by_group if own]", "for own in buffers.by_group[:1] if own]")
    module("pipeline/passes", "test_hybrid")
    add("all devices compute the first part of a micro-batch", "begin = sum(sizes[:part])", "begin = 0")
    add("gradients of one part count", "[reader + one for one in parts]", "[reader]")
    add("two stages of a device replace each other's gradients", " or pipeline.has_shared)", ")")
    module("pipeline/stage", "test_pipeline")
    add(
        "gradients of embedded tokens are asked for",
        "needs_gradient.append(number in self._reads_params)",
        "needs_gradient.append(True)",
    )
    module("pipeline/recompute", "test_recompute")
    add("the host does not wait for the weights to be read", "        if self._kept:\n", "        if False:\n")
    add("gradients replace sums", "if req == _ADD and", "if False and")
    return found


def survives(mutant: Mutant, folder: Path) -> str:
    """Return why a mutant is not caught; nothing if it is."""
    path = folder / mutant.module
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.right) != 1:
        return f"its code occurs {text.count(mutant.right)} times"
    path.write_text(text.replace(mutant.right, mutant.wrong), encoding="utf-8")
    files = [f"tests/{name}.py" for name in mutant.tests]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", *files]
    environ = {**os.environ, "PYTHONPATH": str(folder)}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return ""  # a hang is noticed as well
    finally:
        path.write_text(text, encoding="utf-8")
    if done.returncode == 0:
        return f"{', '.join(mutant.tests)} pass"
    if done.returncode != 1:
        return f"pytest ended with {done.returncode}: {done.stdout.decode()[-500:]}"
    return ""


@click.command(help=(__doc__ or "").splitlines()[0])
@click.argument("numbers", nargs=-1, type=int)
@click.option("--list", "only_list", is_flag=True, help="Print the mutants and run nothing.")
def main(numbers: Sequence[int], only_list: bool) -> None:
    """Run mutants, and exit with 1 if one is not caught."""
    mutants = dict(enumerate(_mutants(), 1))
    chosen = [number for number in mutants if not numbers or number in numbers]
    not_caught = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in () if only_list else COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, folder / name)
        for number in chosen:
            mutant = mutants[number]
            print(f"{number:3} {mutant.module}: {mutant.mistake}", end="", flush=True)
            why = "" if only_list else survives(mutant, folder)
            not_caught += bool(why)
            print("" if only_list else f"  NOT CAUGHT: {why}" if why else "  caught", flush=True)
    if not only_list:
        print(f"{len(chosen) - not_caught} of {len(chosen)} caught")
    sys.exit(1 if not_caught else 0)


if __name__ == "__main__":
    main()

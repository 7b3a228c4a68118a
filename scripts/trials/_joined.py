"""Programs of a launched job; run as a script, one process of it: it writes what came of each program on its devices."""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import List, Optional, Tuple

import gluon_mgpu as mgpu
import mxnet as mx
import numpy as np
from _composing import Composer
from _program import Program, apart_in, run_ours
from _statements import Look, Move, Pass, Statement
from _worlds import Ours, Setting

# Every parameter gets a gradient in each pass: in a job, no process looks for those without.
_MODELS = (
    "mlp",
    "regression",
    "deep",
    "conv",
    "tied",
    "embedding",
    "tied_embedding",
    "two_inputs",
    "gan",
    "batchnorm",
    "recurrent",
)
_NUM_PROGRAMS = 6  # of one job, most of whose time goes into starting it


class _JointComposer(Composer):
    """Makes one program of a job.

    Parameters
    ----------
    seed : int
    num_devices : int
        Of all processes.
    """

    def __init__(self, seed: int, num_devices: int) -> None:
        super().__init__(seed, _MODELS)
        self.num_devices = num_devices

    def _setting(self) -> Setting:
        setting = super()._setting()
        self.is_local = self.adds = False
        options = {name: value for name, value in setting.trainer.items() if name not in ("every", "find_unused_parameters")}
        return replace(setting, trainer=options)

    def _num(self) -> int:
        return 1 if self.name == "batchnorm" else super()._num()  # the first device of the first process

    def _shares(self, num: int) -> Tuple[int, ...]:
        return ()

    def _pass(self, what: Optional[str] = None) -> Pass:
        one = super()._pass(what)
        back = "mgpu" if one.back == "autograd" else one.back  # Gluon's takes no empty list, which idle processes have
        return replace(one, back=back, split="split_batch" if one.split == "gluon" else one.split)

    def _parallel(self) -> List[Statement]:
        return self._by_hand()

    def _change(self, setting: Setting) -> List[Statement]:
        while True:  # each process has a folder of its own here, and checkpoints are written by the first
            statements = super()._change(setting)
            last = statements[-1]
            if not isinstance(last, Move) and not (self.name == "batchnorm" and isinstance(last, Look)):
                return statements

    def _end(self) -> List[Statement]:
        # predict asks no other process: what it takes of BatchNorm, an evaluation has averaged before
        looks = super()._end()
        return [replace(one, scores=True) for one in looks if isinstance(one, Look)] + looks


def joint_programs(seed: int) -> Tuple[int, int, List[Program]]:
    """Return how many processes a job has, the devices of each, and its programs."""
    num_processes, num_here = (2, 3, 2, 3)[seed % 4], (1, 1, 2, 2)[seed % 4]
    seeds = range(seed * _NUM_PROGRAMS, (seed + 1) * _NUM_PROGRAMS)
    return num_processes, num_here, [_JointComposer(one, num_processes * num_here).program() for one in seeds]


def main(seed: int, places: List[int], folder: Path) -> None:
    """Run these programs of a seed, one after the other, in the processes of this job."""
    rank = mgpu.this_process().rank
    _, num_here, programs = joint_programs(seed)
    for place in places:
        program, own = programs[place], folder / f"{place}-{rank}"
        own.mkdir()
        (mx.npx.set_np if program.setting.arrays == "np" else mx.npx.reset_np)()
        ours = Ours(program.setting, [mx.cpu(i) for i in range(num_here)], own)
        failure = run_ours(program, ours)
        if failure is not None:
            (own / "failure.json").write_text(json.dumps(asdict(failure)))
            sys.exit(1)  # the others cannot continue without it
        arrays = {f"output{i}": output for i, output in enumerate(ours.outputs)}
        arrays.update({f"weight{i}": value for i, (_, value) in enumerate(ours.weights())})
        np.savez(own / "result.npz", apart=np.array(apart_in(ours)), **arrays)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(int(sys.argv[1]), [int(place) for place in sys.argv[2].split(",")], Path(sys.argv[3]))

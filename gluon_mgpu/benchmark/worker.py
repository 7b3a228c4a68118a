"""A contender's process: builds what it is asked for, then answers each request for a round. Started by `compare`.

It is run as a file, by any Python, and takes from this package only what its contender uses: a contender other than ours must
not get the settings that `import gluon_mgpu` brings to MXNet, nor need the package installed.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Dict

_ROOT = Path(__file__).resolve().parent.parent.parent
_OURS = ("ours", "ours-static", "ours-padded")
_INSTALL = {
    "numpy": "pip install numpy",
    "mxnet": "pip install mxnet==1.9.1",
    "d2l": "pip install d2l==1.0.3 in an environment with NumPy 1.23.5, then --python d2l=PATH",
    "gluoncv": "pip install gluoncv",
    "torch": "pip install torch",
}
_END_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG


def find_contender(name: str, workload: str) -> Any:
    """Return the class of a contender: made with a Case, it has `wait`, `step` and what else its workload calls."""
    _find_package(whole=name in _OURS)
    if workload == "seq2seq":
        if name == "torch":
            return importlib.import_module("gluon_mgpu.benchmark.seq2seq_with_torch").Eager
        module = importlib.import_module("gluon_mgpu.benchmark.seq2seq_with_mxnet")
        names = {"ours": module.Ours, "ours-padded": module.OursPadded}
        return {**names, "gluon-cells": module.Cells, "korean-post": module.Post}[name]
    if name.startswith("torch"):
        module = importlib.import_module("gluon_mgpu.benchmark.with_torch")
        return {"torch": module.Eager, "torch-compile": module.Compiled, "torch-ddp": module.DDP}[name]
    module = importlib.import_module("gluon_mgpu.benchmark.with_mxnet")
    return {
        "ours": module.Ours,
        "ours-static": module.OursStatic,
        "gluon": module.Gluon,
        "gluon-defaults": module.Gluon,
        "d2l": module.D2L,
        "gluoncv": module.GluonCV,
        "gluoncv-threads": module.GluonCVThreads,
    }[name]


def _find_package(whole: bool) -> None:
    """Let `gluon_mgpu` be imported: as it is, or as an empty shell around its modules."""
    sys.path[:] = [folder for folder in sys.path if Path(folder or ".").resolve() != Path(__file__).resolve().parent]
    if whole:
        sys.path.append(str(_ROOT))
    else:
        shell = ModuleType("gluon_mgpu")
        shell.__path__ = [str(_ROOT / "gluon_mgpu")]
        sys.modules["gluon_mgpu"] = shell


def serve(name: str, workload: str, requests: Any, answer: Callable[[Dict[str, Any]], None]) -> None:
    """Answer requests, one JSON object a line, until there are no more.

    ```
    ──► (started)                                   ◄── {"versions": {...}}
    ──► {"setup": "2 contexts", "case": {...}}      ◄── {}
    ──► {"round": "2 contexts"}                     ◄── {"found": {"whole_s": ...}}
                                                    ◄── {"failed": why} instead of any of these
    ```
    """
    try:
        contender = find_contender(name, workload)
        answer({"versions": {"python": sys.version.split()[0], **contender.versions()}})
    except Exception as error:
        answer({"failed": _why(error)})
        return
    case = importlib.import_module("gluon_mgpu.benchmark.case").Case
    run_round = importlib.import_module("gluon_mgpu.benchmark.measure").run_round
    ready = {}
    for line in requests:
        request = json.loads(line)
        try:
            if "setup" in request:
                ready[request["setup"]] = (contender(case(**request["case"])), case(**request["case"]))
                answer({})
            else:
                answer({"found": run_round(*ready[request["round"]])})
        except Exception as error:
            answer({"failed": _why(error)})


def _why(error: Exception) -> str:
    missing = (getattr(error, "name", None) or "").split(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if missing in _INSTALL:
        return f"not installed: {_INSTALL[missing]}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"


def main() -> None:
    """Serve the contender that the first argument names, for the workload of the second, over standard input and output."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_END_WITH_PARENT, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer
    requests = os.fdopen(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def answer(content: Dict[str, Any]) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    serve(sys.argv[1], sys.argv[2], requests, answer)


if __name__ == "__main__":
    main()

"""The process of one contender: builds what it is asked for, then answers each request for a round. Started by `compare`.

Any Python can run this file. It imports only what its contender uses, because a contender other than ours must not get the
settings that `import gluon_mgpu` applies to MXNet, and need not have the package installed.
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

_FOLDER = Path(__file__).resolve().parent
_ROOT = _FOLDER.parent.parent
_OURS = ("ours", "ours-compiled")
_INSTALL = {
    "numpy": "pip install numpy",
    "mxnet": "pip install --no-deps mxnet==1.9.1",
    "d2l": "pip install d2l==1.0.3 in an environment with NumPy 1.23.5, then --python d2l=PATH",
    "gluoncv": "pip install gluoncv==0.10.5.post0 opencv-python-headless 'numpy<1.24'",
    "torch": "pip install torch",
}
_END_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG


def find_contender(name: str, workload: str) -> Any:
    """Return the class of a contender. Its instances, made from a Case, have `wait`, `step` and what their workload calls."""
    prepare_imports(with_package=name in _OURS or workload == "seq2seq")
    if workload == "seq2seq":
        return _find_translator(name)
    if name.startswith("torch"):
        import with_torch

        return {"torch": with_torch.Eager, "torch-compile": with_torch.Compiled, "torch-ddp": with_torch.DDP}[name]
    import with_mxnet

    return {
        "ours": with_mxnet.Ours,
        "ours-compiled": with_mxnet.OursCompiled,
        "gluon": with_mxnet.Gluon,
        "gluon-defaults": with_mxnet.Gluon,
        "d2l": with_mxnet.D2L,
        "gluoncv": with_mxnet.GluonCV,
    }[name]


def _find_translator(name: str) -> Any:
    if name == "torch":
        import seq2seq_with_torch

        return seq2seq_with_torch.Eager
    import seq2seq_with_mxnet as loops

    return {"ours": loops.Ours, "ours-compiled": loops.OursCompiled, "gluon": loops.Gluon}[name]


def prepare_imports(with_package: bool) -> None:
    """Make the modules of this folder and `gluon_mgpu` importable: the package itself, or an empty shell around its modules.

    The package is imported before MXNet, so that its runtime settings apply. The shell gives its modules without them.
    """
    if str(_FOLDER) not in sys.path:  # `python -I` leaves it out
        sys.path.insert(0, str(_FOLDER))
    if with_package:
        sys.path.append(str(_ROOT))
        importlib.import_module("gluon_mgpu")
    else:
        shell = ModuleType("gluon_mgpu")
        shell.__path__ = [str(_ROOT / "gluon_mgpu")]
        sys.modules["gluon_mgpu"] = shell


def serve(name: str, workload: str, requests: Any, answer: Callable[[Dict[str, Any]], None]) -> None:
    """Answer requests, one JSON object per line, until there are no more.

    ```
    ──► (started)                                   ◄── {"versions": {...}}
    ──► {"setup": "2 contexts", "case": {...}}      ◄── {}
    ──► {"round": "2 contexts"}                     ◄── {"found": {"whole_s": ...}}
                                                    ◄── {"failed": reason} instead of any of these
    ```
    """
    try:
        contender = find_contender(name, workload)
        answer({"versions": {"python": sys.version.split()[0], **contender.versions()}})
    except Exception as error:
        answer({"failed": reason_of(error)})
        return
    from case import Case
    from measure import run_round  # needs NumPy, which a contender's Python may lack

    ready = {}
    for line in requests:
        request = json.loads(line)
        try:
            if "setup" in request:
                case = Case(**request["case"])
                ready[request["setup"]] = (contender(case), case)
                answer({})
            else:
                answer({"found": run_round(*ready[request["round"]])})
        except Exception as error:
            answer({"failed": reason_of(error)})


def reason_of(error: Exception) -> str:
    """Return why a contender failed, in one line: how to install what is missing, or the error's last line."""
    missing = (getattr(error, "name", None) or "").split(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if missing in _INSTALL:
        return f"not installed: {_INSTALL[missing]}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"


def main() -> None:
    """Serve the contender of the first argument, for the workload of the second, over standard input and output."""
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

"""A process of its own that runs trials: one that hangs or crashes in MXNet is a finding, and not the end of the search."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from typing import IO, Any, Dict, Optional

_LIMIT_S = 300.0  # a trial takes a tenth of a second, a finding is made shorter in some; a busy machine takes longer
_MOST_TRIALS = 400  # of one process, so that what MXNet keeps of graphs does not add up


class Child:
    """Runs `run(seed) -> dict` of a module in another process, and begins a new one after a hang or a crash.

    Parameters
    ----------
    module : str
        In this folder.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._process: Optional[subprocess.Popen[bytes]] = None
        self._log: Optional[IO[bytes]] = None
        self._num_trials = 0

    def ask(self, seed: int) -> Dict[str, Any]:
        """Return what the module's `run` returns, or `{"found": ...}` of a hang or a crash."""
        if self._process is None or self._num_trials >= _MOST_TRIALS:
            self.end()
            self._begin()
        process, self._num_trials = self._process, self._num_trials + 1
        assert process is not None and process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{seed}\n".encode())
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], _LIMIT_S)
        line = process.stdout.readline() if ready else b""
        if line:
            answer: Dict[str, Any] = json.loads(line)
            return answer
        code = process.poll() if ready else None
        what = (
            f"crash: the process ended with {process.wait()}"
            if ready or code is not None
            else f"hang: no end in {_LIMIT_S:.0f} s"
        )
        said = self._said()
        self.end()
        return {"found": f"{what}\n{said}"}

    def end(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout, self._log):
                if pipe is not None:
                    pipe.close()
        self._process = None

    def _begin(self) -> None:
        self._log, self._num_trials = tempfile.TemporaryFile(), 0  # noqa: SIM115  open as long as the process
        environ = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "DMLC_LOG_STACK_TRACE_DEPTH": "0",
            "MXNET_STORAGE_FALLBACK_LOG_VERBOSE": "0",
        }
        pipes: Dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._log}
        self._process = subprocess.Popen([sys.executable, __file__, self._module], env=environ, **pipes)

    def _said(self) -> str:
        assert self._log is not None
        self._log.seek(0)
        return self._log.read()[-3000:].decode(errors="replace")


def _serve(module: str) -> None:
    """Answer each seed on standard input with a line of JSON; what MXNet prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    run = __import__(module).run
    for line in sys.stdin:
        print(json.dumps(run(int(line))), file=answers, flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1])

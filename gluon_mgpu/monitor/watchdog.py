"""Watchdog: prints the stacks of all threads, and the arrays that are not written yet, when no step has ended for some time."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from contextlib import suppress
from typing import Any, Dict, Optional, TextIO

from mxnet import gluon

from ..checks import real_number
from ..loop.callbacks import Callback, FitState
from ..mxnet_internals.engine import is_ready
from ..nested import Array

EXIT_STALLED = 75  # sysexits.h: a temporary failure, after which a supervisor may restart
_SHOWN = 10
_NO_FILE = (AttributeError, OSError, OverflowError, RuntimeError, ValueError)  # of faulthandler: no real file, too many seconds


class Watchdog(Callback):
    """Prints Python's stacks of all threads and the arrays that are not written yet, when no step has ended for some time.

    The stacks come from `faulthandler`. If a thread holds Python's lock, so that the watchdog cannot run, `faulthandler` prints
    them alone; the watchdog uses its single timer (`dump_traceback_later`). MXNet does not expose which operation runs. The
    parameters and gradients that it still has to write are named.

    As a callback of `fit`, it notices each batch of training and evaluation. In your own loop, use a `with` block and call
    `beat` after each step.

    Parameters
    ----------
    timeout_s : float, seconds
        Longer than compiling and the first step on a GPU.
    net : gluon.Block, optional
        The network whose parameters are named; that of `fit` by default.
    file : file, optional
        With a descriptor; `sys.stderr` by default.
    end_process : bool
        End the process afterwards with status 75, so that a supervisor can restart it. Nothing is saved.

    Raises
    ------
    TrainerError
        `timeout_s` is not a finite number above 0.

    Examples
    --------
    >>> import mxnet as mx
    >>> with Watchdog(timeout_s=60) as watchdog:
    ...     for X in [mx.nd.ones((2, 3))]:
    ...         y = X * 2
    ...         watchdog.beat()
    """

    def __init__(
        self,
        timeout_s: float = 120.0,
        *,
        net: Optional[gluon.Block] = None,
        file: Optional[TextIO] = None,
        end_process: bool = False,
    ) -> None:
        self.timeout_s = real_number("Watchdog", "timeout_s", timeout_s, above=True, advice="120 seconds are usual.")
        self._poll_s = min(5.0, self.timeout_s / 4)
        self._net, self._file, self._end_process = net, file, end_process
        self._thread: Optional[threading.Thread] = None
        self._stop = threading.Event()
        self._beat_at, self._num_beats, self._reported = 0.0, 0, False

    def start(self) -> None:
        """Start the watchdog."""
        self.stop()
        self._stop.clear()
        self._num_beats, self._reported = 0, False
        self._beat_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="Watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the watchdog."""
        thread, self._thread = self._thread, None
        self._stop.set()
        if thread is not None:
            thread.join()

    def beat(self) -> None:
        """Report that a step was made."""
        self._num_beats += 1
        self._beat_at = time.monotonic()

    def __enter__(self) -> Watchdog:
        self.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.stop()

    def on_fit_begin(self, state: FitState) -> None:
        self._net = state.net
        self.start()

    def on_phase(self, state: FitState, phase: str) -> None:
        if phase in ("data", ""):  # the next batch, or the end of a pass
            self.beat()

    def on_fit_end(self, state: FitState) -> None:
        self.stop()

    def _run(self) -> None:
        while not self._stop.wait(self._poll_s):
            with suppress(*_NO_FILE):  # it prints only if this thread does not come back to set it again
                faulthandler.dump_traceback_later(self.timeout_s + 2 * self._poll_s, file=self._file or sys.stderr)
            quiet_s = time.monotonic() - self._beat_at
            if quiet_s < self.timeout_s:
                if self._reported:
                    self._print("gluon_mgpu: steps continue after the stall.")
                self._reported = False
            elif not self._reported:
                self._reported = True
                self._report(quiet_s)
        faulthandler.cancel_dump_traceback_later()

    def _report(self, quiet_s: float) -> None:
        num_beats = self._num_beats
        # Part by part: if one fails or blocks, the parts before it are printed.
        self._print(f"gluon_mgpu: no step for {quiet_s:.1f} s, after {num_beats}")
        try:
            faulthandler.dump_traceback(self._file or sys.stderr)
        except _NO_FILE as error:
            self._print(f"The stacks cannot be printed there: {error}")
        with suppress(Exception):  # whatever a user's network raises: the process must end all the same
            pending = [name for name, array in self._arrays().items() if not is_ready(array)]
            self._print("\n  ".join([f"arrays that are not written yet: {len(pending)}", *pending[:_SHOWN]]))
        if self._end_process and num_beats == self._num_beats:  # no step has ended meanwhile
            self._print(f"gluon_mgpu: the watchdog ends this process with status {EXIT_STALLED}.")
            os._exit(EXIT_STALLED)

    def _arrays(self) -> Dict[str, Array]:
        """Return the parameters and gradients, which others hold as well: none is freed meanwhile."""
        found: Dict[str, Array] = {}
        parameters = self._net.collect_params() if self._net is not None else {}
        for name, parameter in parameters.items():
            with suppress(RuntimeError):  # it has no values yet
                found.update({f"{name} on {array.context}": array for array in parameter.list_data()})
                gradients = parameter.list_grad() if parameter.grad_req != "null" else []
                found.update({f"gradient of {name} on {array.context}": array for array in gradients})
        return found

    def _print(self, text: str) -> None:
        with suppress(*_NO_FILE):  # a full disk, or a pipe whose reader has ended
            print(text, file=self._file or sys.stderr, flush=True)

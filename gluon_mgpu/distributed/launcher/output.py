"""The output of a job's processes: shown line by line with the process's name in front, and complete in log files."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Callable, Deque, List

_LONGEST = 64 * 1024  # bytes of a line that is shown before it is complete
_KEPT = 200  # lines of standard error
_SHOWN = 40  # lines of standard error in a failure
_WIDTH = 500
_TRACEBACK = "Traceback (most recent call last):"


class Output:
    """The output of a job's processes: two streams, and a folder of logs.

    Parameters
    ----------
    folder : pathlib.Path
        Holds one file per process: `rank-0.log`, `server-0.log`, `scheduler.log`.
    out, err : binary files
        Show the processes' standard output and error.
    """

    def __init__(self, folder: Path, out: BinaryIO, err: BinaryIO) -> None:
        self.folder = folder
        self._streams = (out, err)

    def report(self, text: str) -> None:
        """Show a message of the launcher, and append it to `launcher.log`."""
        line = f"gluon-mgpu launch: {text}\n".encode("utf-8", "replace")
        self.show(line, 1)
        with suppress(OSError):  # a full disk must not end the job
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self.folder / "launcher.log", "ab") as file:
                file.write(line)

    def show(self, data: bytes, stream: int) -> None:
        """Write to standard output (0) or error (1); ignore a closed stream, since the logs hold everything."""
        with suppress(OSError):
            self._streams[stream].write(data)
            self._streams[stream].flush()

    def log(self, name: str, restart: int) -> Log:
        """Return the log of one process; each restart writes to a new file."""
        stem = f"rank-{name}" if name.isdigit() else name.replace(" ", "-")
        folder = self.folder / f"restart-{restart}" if restart else self.folder
        folder.mkdir(parents=True, exist_ok=True)
        return Log(folder / f"{stem}.log", f"[{name}] ".encode(), self.show)


class Log:
    """The output of one process.

    A line is shown when it is complete. If carriage returns overwrite it, as in progress bars, only the last text is shown.
    """

    def __init__(self, path: Path, prefix: bytes, show: Callable[[bytes, int], None]) -> None:
        self.path = path
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115  (closed with the process)
        self._prefix, self._show_bytes = prefix, show
        self._is_incomplete = False
        self._begun = [b"", b""]  # incomplete lines of standard output and error
        self._kept: Deque[str] = deque(maxlen=_KEPT)

    def write(self, data: bytes, stream: int) -> None:
        """Write bytes from the process's standard output (0) or error (1)."""
        try:
            self._file.write(data)
        except (OSError, ValueError) as error:  # a full disk must not end the training; orphans write when it is closed
            if not (self._is_incomplete or self._file.closed):
                self._is_incomplete = True
                self._show_bytes(f"gluon-mgpu launch: {self.path} is incomplete: {error}\n".encode(), 1)
        *lines, begun = (self._begun[stream] + data).split(b"\n")
        if len(begun) > _LONGEST:
            lines, begun = [*lines, begun], b""
        self._begun[stream] = begun
        self._show(lines, stream)

    def close(self) -> None:
        """Show incomplete lines, and close the file."""
        for stream, begun in enumerate(self._begun):
            self._show([begun] if begun else [], stream)
        self._file.close()

    def last_lines(self) -> List[str]:
        """Return the last traceback on standard error, or its last lines, once the log is closed.

        Examples
        --------
        >>> log = Log(Path("/dev/null"), b"[0] ", lambda data, stream: None)
        >>> log.write(b"careful\\nTraceback (most recent call last):\\n  ...\\nValueError: no\\n", 1)
        >>> log.close()
        >>> log.last_lines()
        ['Traceback (most recent call last):', '  ...', 'ValueError: no']
        """
        lines = list(self._kept)
        begins = [i for i, line in enumerate(lines) if line.startswith(_TRACEBACK)]
        shown = lines[begins[-1] :] if begins else lines[-10:]
        return [line[:_WIDTH] for line in shown[-_SHOWN:]]

    def _show(self, lines: List[bytes], stream: int) -> None:
        shown = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines]
        if shown:
            self._show_bytes(b"".join(self._prefix + line + b"\n" for line in shown), stream)
        if stream == 1:
            self._kept.extend(line.decode("utf-8", "replace") for line in shown if line)

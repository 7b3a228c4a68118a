"""Files that are complete or absent, whenever the program is killed: written under another name, synced, and renamed."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Iterator


@contextmanager
def new_file(path: Path, *, follow: bool = True) -> Iterator[Path]:
    """Yield the path of a new, empty file, which then replaces the file at `path`; remove it on an exception.

    Each process has its own: several may write the same file, and the last one counts.

    A link at `path` stays, and a device or a pipe is written to. Without `follow`, they are replaced: the folder of a run may be
    another user's work.
    """
    if follow and os.path.exists(path) and not os.path.isfile(path):
        yield path
        return
    path = Path(os.path.realpath(path)) if follow else path
    new = path.with_name(f".new{os.environ.get('GLUON_MGPU_RANK', '')}-{os.getpid()}.{path.name}")
    try:
        new.unlink(missing_ok=True)
        os.close(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))  # not through a link of this name
        yield new
        sync(new)
        new.replace(path)
    except BaseException as error:
        if isinstance(error, OSError) and error.errno and not error.filename:  # a full disk names none
            error.filename = str(path)
        with suppress(OSError):
            new.unlink()
        raise


def sync(path: Path) -> None:
    """Sync a file, or the names in a folder, to the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)

"""Files with a manifest of their sizes and checksums, which is written last: a folder with a valid manifest is complete."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Dict, Iterator

from ..checks import short
from ..errors import StateError
from ..runtime.new_files import sync
from ..runtime.untrusted_files import MOST_JSON, values_of

MANIFEST = "manifest.json"
FORMAT, VERSION = "gluon_mgpu checkpoint", 1
_FILE = {"bytes": range(2**63), "sha256": str}
_FORM = {"format": FORMAT, "version": range(1, 2**31), "files": {"*": _FILE}, "*": object}


class FolderWriter:
    """Writes the files of an existing, empty folder, syncs each to the disk, and finally writes the manifest that lists them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: Dict[str, Dict[str, Any]] = {}

    @contextmanager
    def file(self, name: str) -> Iterator[BinaryIO]:
        """Yield a new file to write to; it is synced to the disk afterwards."""
        with open(self._folder / name, "x+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            self._files[name] = _entry(file.read())

    def text(self, name: str, text: str) -> None:
        """Write a text, in UTF-8; raise `StateError` for one that would not be read."""
        content = text.encode()
        if len(content) > MOST_JSON:
            raise StateError(
                f"Checkpoint: got {len(content)} bytes of {name}; expected {MOST_JSON} at most, since larger files are not read. "
                "Evaluate less often within an epoch, or keep less in progress."
            )
        with self.file(name) as file:
            file.write(content)

    def finish(self, **values: Any) -> None:
        """Write the manifest, with these additional values."""
        content = {"format": FORMAT, "version": VERSION, **values, "files": dict(self._files)}
        sync(self._folder)  # the names of the other files reach the disk before the manifest's
        self.text(MANIFEST, json.dumps(content, indent=1))
        sync(self._folder)


@dataclass(frozen=True)
class Files:
    """The content of some files of a folder, by name, all of the same version."""

    folder: Path
    contents: Dict[str, bytes] = field(repr=False)

    def inner(self, name: str) -> Files:
        """Return those of a subfolder."""
        start = f"{name}/"
        found = {key[len(start) :]: content for key, content in self.contents.items() if key.startswith(start)}
        return Files(self.folder / name, found)

    def check(self, operation: str) -> Dict[str, Any]:
        """Return the manifest, if it lists exactly these files, with their sizes and checksums.

        Raises
        ------
        StateError
            It does not, or the manifest is invalid or of a later version.
        """
        try:
            manifest: Dict[str, Any] = values_of(self.contents[MANIFEST], _FORM, MANIFEST)
        except (KeyError, ValueError) as error:
            raise StateError(
                f"{operation}: got {self.folder / MANIFEST}, which is not a checkpoint's manifest ({error}); expected one. Use "
                "another checkpoint."
            ) from None
        version, listed = manifest["version"], manifest["files"]
        if version > VERSION:
            raise StateError(
                f"{operation}: got {self.folder} of version {version}; expected {VERSION}. Install a newer gluon_mgpu."
            )
        for name in sorted({*listed, *self.contents} - {MANIFEST}):
            content = self.contents.get(name)
            if content is None or _entry(content) != listed.get(name):
                raise StateError(
                    f"{operation}: got {self.folder / short(name)[1:-1]}, which is damaged (its size or checksum differs from "
                    "the manifest); expected the listed file. Use another checkpoint."
                )
        return manifest


def _entry(content: bytes) -> Dict[str, Any]:
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}

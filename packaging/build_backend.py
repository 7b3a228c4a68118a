"""setuptools' build backend, which also puts gluon_mgpu.pth into every wheel, editable or not.

Python reads a .pth file when it starts; this one lets `import mxnet` work on NumPy >= 1.24 (see gluon_mgpu_startup).
setuptools has no setting for files beside the packages, so that the wheel it built gets one more member here.
"""

from __future__ import annotations

import base64
import hashlib
import os
import warnings
import zipfile
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  (the hooks that need no change)

PTH = "gluon_mgpu.pth"
SOURCE = os.path.join("packaging", PTH)


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: Any = None) -> str:
    name: str = build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
    _add_pth(os.path.join(wheel_directory, name))
    return name


def build_editable(wheel_directory: str, config_settings: Any = None, metadata_directory: Any = None) -> str:
    # It warns of every editable install, whatever the project looks like.
    warnings.filterwarnings("ignore", message=r"\s*Editable installation")
    name: str = build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
    _add_pth(os.path.join(wheel_directory, name))
    return name


def _add_pth(wheel: str) -> None:
    """Write the wheel anew, with the file and its line in RECORD."""
    with open(SOURCE, "rb") as file:
        content = file.read()
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    line = "{},sha256={},{}\n".format(PTH, digest, len(content))
    with zipfile.ZipFile(wheel) as old:
        members = [(info, old.read(info)) for info in old.infolist()]
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as new:
        new.writestr(PTH, content)
        for info, data in members:
            new.writestr(info, data + line.encode() if info.filename.endswith(".dist-info/RECORD") else data)

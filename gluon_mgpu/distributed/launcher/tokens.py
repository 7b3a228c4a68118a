"""The secret that the launchers of one job share, and where it is kept."""

from __future__ import annotations

import os
import re
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import Mapping, Optional

from ..process import LaunchError

TOKEN = "GLUON_MGPU_TOKEN"
_BYTES = 32
_MOST = 4096  # bytes of a file with a token
_FORM = re.compile(r"[!-~]{16,512}")  # characters that every keyboard can type


def new_token() -> str:
    """Return 256 random bits as text."""
    return secrets.token_urlsafe(_BYTES)


def check_token(token: str, source: str) -> str:
    """Return a token without the blanks around it.

    Raises
    ------
    LaunchError
        The token is too short, or has blanks or other than ASCII characters. The error does not show the token.
    """
    token = token.strip()
    if not _FORM.fullmatch(token):
        raise LaunchError(
            f"launch: got a token of {len(token)} characters in {source}; expected 16 to 512 ASCII characters without blanks. "
            "Use the token that node 0 shows, or the output of openssl rand -hex 32."
        )
    return token


def token_in_environment(environ: Optional[Mapping[str, str]] = None) -> str:
    """Return the token in `GLUON_MGPU_TOKEN`, "" if it is not set."""
    token = (os.environ if environ is None else environ).get(TOKEN, "")
    return check_token(token, TOKEN) if token else ""


def read_token(path: Path) -> str:
    """Return the token in a file.

    Raises
    ------
    LaunchError
        The file is missing, not a regular file, open to other users, or holds no valid token.
    """
    missing = "a file with the token of node 0. Copy the file from node 0"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a named pipe must not keep the launcher waiting
    except OSError as error:
        raise _refused(path, error.strerror or str(error), missing) from None
    try:
        state = os.fstat(descriptor)
        mode = stat.S_IMODE(state.st_mode)
        if not stat.S_ISREG(state.st_mode):
            raise _refused(path, "not a regular file", missing)
        if mode & 0o077:
            raise _refused(path, f"mode {mode:03o}", f"mode 600, so that other users cannot read it. Run chmod 600 {path}")
        if state.st_uid not in (os.geteuid(), 0):
            raise _refused(path, f"a file of user {state.st_uid}", "a file that you own. Copy it")
        text = os.read(descriptor, _MOST).decode("ascii", "replace")
    except OSError as error:
        raise _refused(path, error.strerror or str(error), missing) from None
    finally:
        os.close(descriptor)
    return check_token(text, str(path))


def make_token_file(path: Path) -> bool:
    """Write a new token into a new file that only this user can read; return False if the file already exists.

    Raises
    ------
    LaunchError
        The folder is missing or cannot be written to.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return False
    except OSError as error:
        raise _refused(path, error.strerror or str(error), "a writable folder. Choose another path") from None
    try:
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(new_token() + "\n")
    except OSError as error:
        with suppress(OSError):
            os.unlink(path)
        raise _refused(path, error.strerror or str(error), "disk space for a token. Choose another path") from None
    return True


def _refused(path: Path, found: str, needed: str) -> LaunchError:
    return LaunchError(f"launch: got --token-file {path}: {found}; expected {needed}.")

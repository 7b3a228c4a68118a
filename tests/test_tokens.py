"""The file with the token: only its owner may read it, and it is whole or not there."""

import errno
import os

import pytest
from gluon_mgpu.distributed import LaunchError
from gluon_mgpu.distributed.launcher import tokens
from gluon_mgpu.distributed.launcher.tokens import check_token, make_token_file, read_token

from .conftest import assert_house_style


def refused(path, told):
    with pytest.raises(LaunchError, match=f"--token-file .*{told}") as caught:
        read_token(path)
    assert_house_style(caught.value)


def test_a_new_token_is_for_this_user_only_and_comes_back(tmp_path):
    path = tmp_path / "token"
    assert make_token_file(path) and path.stat().st_mode & 0o777 == 0o600
    token = read_token(path)
    assert len(token) >= 43 and check_token(f" {token}\n", "f") == token
    assert not make_token_file(path) and read_token(path) == token  # an existing one is kept


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_file_that_others_can_open_is_refused(tmp_path, mode):
    make_token_file(tmp_path / "token")
    (tmp_path / "token").chmod(mode)
    refused(tmp_path / "token", f"mode {mode:o}; expected mode 600")


def test_a_file_of_another_user_is_refused(tmp_path, monkeypatch):
    """That user could read the token, and replace it."""
    make_token_file(tmp_path / "token")
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    owner = (tmp_path / "token").stat().st_uid
    real = os.fstat

    def foreign(number):
        mode, inode, device, links, _, *rest = real(number)
        return os.stat_result((mode, inode, device, links, owner or 4711, *rest))

    monkeypatch.setattr(os, "fstat", foreign)
    refused(tmp_path / "token", f"a file of user {owner or 4711}; expected a file that you own")


def test_what_cannot_be_read_is_refused(tmp_path, monkeypatch):
    refused(tmp_path / "missing", "No such file or directory; expected a file with the token of node 0")
    refused(tmp_path, "not a regular file")
    os.mkfifo(tmp_path / "pipe", 0o600)
    refused(tmp_path / "pipe", "not a regular file")  # and it does not wait for a writer
    make_token_file(tmp_path / "token")

    def failing(*_):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "read", failing)
        refused(tmp_path / "token", "Input/output error; expected")


def test_a_full_disk_leaves_no_file_without_a_token(tmp_path, monkeypatch):
    """The next call would take an empty file for the token of an earlier one."""

    def full():
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tokens, "new_token", full)
    with pytest.raises(LaunchError, match="No space left on device; expected disk space") as caught:
        make_token_file(tmp_path / "token")
    assert_house_style(caught.value)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(LaunchError, match="expected a writable folder"):
        make_token_file(tmp_path / "missing" / "token")

"""How two launchers prove to each other that they know the job's token, before either parses what the other sends.

    node 0                                                    another node
      │ ──── challenge: magic, version, nonce ──────────────────► │
      │ ◄─── answer: magic, version, node rank, nonce, proof ──── │   the node has proved it: node 0 listens to it
      │ ──── proof ─────────────────────────────────────────────► │   node 0 has proved it: the node obeys

Each message has a fixed size. A proof is HMAC-SHA256 with the token as the key, over the name of the side that proves and
over challenge and answer. So it fits one connection, one side, one version and one node: sent again or back, it is wrong. Both
derive a key for each direction in the same way, with which `Wire` authenticates what follows. Nothing is encrypted.

Source: HMAC challenge and response as in RFC 5802 (SCRAM) and multiprocessing.connection; keys per direction as in RFC 8446, 7.1.
"""

from __future__ import annotations

import hmac
import os
import struct
from dataclasses import dataclass
from typing import Tuple

from .connection import LostError

VERSION = 2
PROOF_BYTES = 32
_MAGIC = b"gluon-mgpu"
_CHALLENGE = struct.Struct(f"!{len(_MAGIC)}sH32s")
_ANSWER = struct.Struct(f"!{len(_MAGIC)}sHI32s")  # without the proof that follows
CHALLENGE_BYTES = _CHALLENGE.size
ANSWER_BYTES = _ANSWER.size + PROOF_BYTES


class HandshakeError(LostError):
    """The other side is no launcher, one of another version, or one that does not know the token."""


@dataclass(frozen=True)
class Keys:
    """What authenticates the messages of one connection, a key for each direction."""

    to_leader: bytes
    to_follower: bytes


def mac(key: bytes, label: str, data: bytes) -> bytes:
    """Return HMAC-SHA256 of data for one purpose."""
    return hmac.digest(key, label.encode("ascii") + b"\0" + data, "sha256")


def make_challenge() -> bytes:
    """Return what node 0 sends first."""
    return _CHALLENGE.pack(_MAGIC, VERSION, os.urandom(32))


def answer_challenge(token: bytes, challenge: bytes, node_rank: int) -> Tuple[bytes, bytes, Keys]:
    """Return a node's answer, the proof that it must get for it, and the keys.

    Raises
    ------
    HandshakeError
        What came is not a challenge of this version.
    """
    magic, version, _ = _CHALLENGE.unpack(challenge)
    _check_version(magic, version)
    said = _ANSWER.pack(_MAGIC, VERSION, node_rank, os.urandom(32))
    proof, expected, keys = _prove(token, challenge + said)
    return said + proof, expected, keys


def check_answer(token: bytes, challenge: bytes, answer: bytes) -> Tuple[int, bytes, Keys]:
    """Return the rank of the node that has answered a challenge, node 0's proof for it, and the keys.

    Raises
    ------
    HandshakeError
        The answer is of no launcher, of another version, or does not prove that it knows the token.

    Examples
    --------
    >>> challenge = make_challenge()
    >>> answer, expected, keys = answer_challenge(b"a secret of both sides", challenge, 1)
    >>> check_answer(b"a secret of both sides", challenge, answer) == (1, expected, keys)
    True
    """
    said, proof = answer[: _ANSWER.size], answer[_ANSWER.size :]
    magic, version, node_rank, _ = _ANSWER.unpack(said)
    _check_version(magic, version)
    right, ours, keys = _prove(token, challenge + said)
    check_proof(proof, right)
    return node_rank, ours, keys


def check_proof(proof: bytes, expected: bytes) -> None:
    """Raise HandshakeError unless a proof is the expected one; the time that it takes tells nothing of either."""
    if not hmac.compare_digest(proof, expected):
        raise HandshakeError("does not know this job's token")


def _check_version(magic: bytes, version: int) -> None:
    if magic != _MAGIC:
        raise HandshakeError("is no launcher of this version")
    if version != VERSION:
        raise HandshakeError(f"speaks version {version} of the launcher's protocol, and this one {VERSION}")


def _prove(token: bytes, said: bytes) -> Tuple[bytes, bytes, Keys]:
    """Return the follower's proof, the leader's, and the keys."""
    keys = Keys(mac(token, "key to leader", said), mac(token, "key to follower", said))
    return mac(token, "proof of follower", said), mac(token, "proof of leader", said), keys

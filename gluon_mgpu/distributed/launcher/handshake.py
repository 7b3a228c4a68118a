"""Two launchers prove to each other that they know the job's token, before either parses the other's messages.

    node 0                                                    another node
      │ ──── challenge: magic, version, nonce ──────────────────► │
      │ ◄─── answer: magic, version, node rank, nonce, proof ──── │   node 0 checks the node's proof
      │ ──── proof ─────────────────────────────────────────────► │   the node checks node 0's proof

Each message has a fixed size. A proof is HMAC-SHA256 with the token as the key, over the name of the proving side, the
challenge and the answer. So a proof is valid for one connection, side, version and node only; a replayed or reflected proof is
invalid. Both sides derive a key for each direction in the same way. `Wire` authenticates all later messages with them. Nothing
is encrypted.

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
    """The other side is not a launcher, has another version, or does not know the token."""


@dataclass(frozen=True)
class Keys:
    """The keys that authenticate the messages of one connection, one per direction."""

    to_leader: bytes
    to_follower: bytes


def mac(key: bytes, label: str, data: bytes) -> bytes:
    """Return HMAC-SHA256 of data for one purpose."""
    return hmac.digest(key, label.encode("ascii") + b"\0" + data, "sha256")


def make_challenge() -> bytes:
    """Return the first message of node 0."""
    return _CHALLENGE.pack(_MAGIC, VERSION, os.urandom(32))


def answer_challenge(token: bytes, challenge: bytes, node_rank: int) -> Tuple[bytes, bytes, Keys]:
    """Return a node's answer, the proof that it expects in return, and the keys.

    Raises
    ------
    HandshakeError
        The message is not a challenge of this version.
    """
    magic, version, _ = _CHALLENGE.unpack(challenge)
    _check_version(magic, version)
    answer = _ANSWER.pack(_MAGIC, VERSION, node_rank, os.urandom(32))
    proof, expected, keys = _prove(token, challenge + answer)
    return answer + proof, expected, keys


def check_answer(token: bytes, challenge: bytes, answer: bytes) -> Tuple[int, bytes, Keys]:
    """Return the rank of the node that has answered a challenge, node 0's proof for it, and the keys.

    Raises
    ------
    HandshakeError
        The answer is not a launcher's, has another version, or its proof is wrong.

    Examples
    --------
    >>> challenge = make_challenge()
    >>> answer, expected, keys = answer_challenge(b"a secret of both sides", challenge, 1)
    >>> check_answer(b"a secret of both sides", challenge, answer) == (1, expected, keys)
    True
    """
    content, proof = answer[: _ANSWER.size], answer[_ANSWER.size :]
    magic, version, node_rank, _ = _ANSWER.unpack(content)
    _check_version(magic, version)
    expected, ours, keys = _prove(token, challenge + content)
    check_proof(proof, expected)
    return node_rank, ours, keys


def check_proof(proof: bytes, expected: bytes) -> None:
    """Raise HandshakeError unless a proof is the expected one, in constant time."""
    if not hmac.compare_digest(proof, expected):
        raise HandshakeError("does not know this job's token")


def _check_version(magic: bytes, version: int) -> None:
    if magic != _MAGIC:
        raise HandshakeError("is not a launcher of this version")
    if version != VERSION:
        raise HandshakeError(f"uses version {version} of the launcher's protocol; this launcher uses {VERSION}")


def _prove(token: bytes, exchange: bytes) -> Tuple[bytes, bytes, Keys]:
    """Return the follower's proof, the leader's, and the keys, for a challenge and its answer."""
    keys = Keys(mac(token, "key to leader", exchange), mac(token, "key to follower", exchange))
    return mac(token, "proof of follower", exchange), mac(token, "proof of leader", exchange), keys

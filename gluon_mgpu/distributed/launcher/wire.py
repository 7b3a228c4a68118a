"""Authenticated messages between the launchers of two machines, over a connection that must not fall silent.

    length (4 bytes) | HMAC-SHA256 (32 bytes) of direction, number, length and message | message: JSON

The number counts the messages of a direction, so that none can be dropped, repeated or reordered.
"""

from __future__ import annotations

import hmac
import struct
import time
from collections import deque
from typing import Any, Deque, Mapping, Optional, Tuple

from .connection import Connection, LostError
from .fields import Field
from .handshake import PROOF_BYTES, Keys, mac
from .messages import TO_FOLLOWER, TO_LEADER, Message, read, write

BEATS = 5  # messages that each side sends within the longest silence allowed
_LONGEST = 256 * 1024  # bytes of a message
_HEADER = struct.Struct(f"!I{PROOF_BYTES}s")
_NUMBERED = struct.Struct("!QI")
_INVALID = "sent an invalid message"
# Bytes that a side may send at once, and per second; each message counts as 1 KiB more than its size. Unread messages may hold
# as many bytes as one burst.
_BURST, _PER_S, _EACH = 4 << 20, 512 << 10, 1 << 10


class Wire:
    """One end of a connection whose other end has proved that it knows the token.

    Parameters
    ----------
    connection : Connection
    keys : Keys
    silence_s : float, seconds
        The other side is lost when it is silent for longer.
    leads : bool
        Whether this is node 0's end.
    """

    def __init__(self, connection: Connection, keys: Keys, silence_s: float, *, leads: bool) -> None:
        self._connection, self._silence_s = connection, silence_s
        self._send_key, self._key = (keys.to_follower, keys.to_leader) if leads else (keys.to_leader, keys.to_follower)
        self._known: Mapping[str, Field] = TO_LEADER if leads else TO_FOLLOWER
        self._num_sent = self._num_received = 0
        self._messages: Deque[Tuple[str, Message, int]] = deque()
        self._waiting = 0  # bytes of the unread messages
        self._heard_at = self._sent_at = self._refilled_at = time.monotonic()
        self._allowed = float(_BURST)
        connection.expect(_HEADER.size, self._take_header)

    def send(self, kind: str, **values: Any) -> None:
        """Send one message; a later `receive` raises if the other side is lost."""
        self._sent_at = time.monotonic()
        data = write(kind, values)
        assert len(data) <= _LONGEST, f"{kind} takes {len(data)} bytes"
        proof = mac(self._send_key, "message", _NUMBERED.pack(self._num_sent, len(data)) + data)
        self._num_sent += 1
        self._connection.send(_HEADER.pack(len(data), proof) + data)

    def beat(self) -> None:
        """Send a heartbeat if nothing else has been sent lately."""
        if time.monotonic() - self._sent_at > self._silence_s / BEATS:
            self.send("alive")

    def receive(self) -> Optional[Tuple[str, Message]]:
        """Return kind and fields of the next received message, None if there is none; heartbeats are skipped.

        Raises
        ------
        LostError
            All messages are read, and the other side is lost.
        """
        if self._messages:
            kind, fields, size = self._messages.popleft()
            self._waiting -= size
            return kind, fields
        if self._connection.lost:
            raise LostError(self._connection.lost)
        silent_s = time.monotonic() - self._heard_at
        if silent_s > self._silence_s:
            raise LostError(f"was silent for {silent_s:.0f} s")
        return None

    @property
    def closed(self) -> bool:
        """Whether the connection has ended, on both sides."""
        return self._connection.closed

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def close_gently(self) -> None:
        """Send unsent bytes, accept no more messages, and close when the other side does."""
        self._messages.clear()
        self._connection.close_gently()

    def _take_header(self, header: bytes) -> None:
        length, proof = _HEADER.unpack(header)
        if 0 < length <= _LONGEST:
            self._connection.expect(length, lambda data: self._take(data, proof))
        else:
            self._connection.lose(_INVALID)

    def _take(self, data: bytes, proof: bytes) -> None:
        numbered = _NUMBERED.pack(self._num_received, len(data)) + data
        if not hmac.compare_digest(proof, mac(self._key, "message", numbered)):
            self._connection.lose("sent a message that failed authentication")
            return
        self._num_received += 1
        try:
            kind, fields = read(data, self._known)
        except ValueError:
            self._connection.lose(_INVALID)
            return
        size = len(data) + _EACH
        if not self._allows(size):
            self._connection.lose("sent too many bytes")
            return
        self._heard_at = time.monotonic()
        if kind != "alive":
            self._messages.append((kind, fields, size))
            self._waiting += size
        self._connection.expect(_HEADER.size, self._take_header)

    def _allows(self, num_bytes: int) -> bool:
        now = time.monotonic()
        self._allowed = min(_BURST, self._allowed + _PER_S * (now - self._refilled_at)) - num_bytes
        self._refilled_at = now
        return self._allowed >= 0 and self._waiting <= _BURST

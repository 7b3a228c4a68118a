"""Lines of JSON between the launchers of two machines, over a connection that must not fall silent."""

from __future__ import annotations

import json
import selectors
import socket
import time
from contextlib import suppress
from typing import Any, Dict, List

_LONGEST = 256 * 1024  # bytes of a line; what is longer is not from a launcher
_READ = 1 << 16
BEATS = 5  # messages that each side sends in the time after which it is taken to be gone


class LostError(ConnectionError):
    """The other side has closed the connection, has not been heard of for too long, or says what no launcher says."""


class Wire:
    """One end of a connection.

    What comes in is parsed as JSON objects, and nothing else is done with it.

    Parameters
    ----------
    connection : socket.socket
    selector : selectors.BaseSelector
        Told to call this end when there is something to read.
    silence_s : float, seconds
        After which the other side is lost.
    """

    def __init__(self, connection: socket.socket, selector: selectors.BaseSelector, silence_s: float) -> None:
        self._connection, self._selector, self._silence_s = connection, selector, silence_s
        self._begun = b""
        self._messages: List[Dict[str, Any]] = []
        self._lost = ""
        self._heard_at = self._sent_at = time.monotonic()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(silence_s / BEATS)  # for sending: lines are shorter than what the kernel takes at once
        selector.register(connection, selectors.EVENT_READ, self._read)

    def send(self, kind: str, **values: Any) -> None:
        """Send one message; that nobody takes it is seen by the next `receive`."""
        self._sent_at = time.monotonic()
        try:
            self._connection.sendall(json.dumps({"kind": kind, **values}).encode() + b"\n")
        except OSError as error:
            self._lost = self._lost or str(error)

    def beat(self) -> None:
        """Send a sign of life if nothing else has been sent lately."""
        if time.monotonic() - self._sent_at > self._silence_s / BEATS:
            self.send("alive")

    def receive(self) -> List[Dict[str, Any]]:
        """Return the messages that have come, in their order.

        Raises
        ------
        LostError
            There will be no more.
        """
        messages, self._messages = self._messages, []
        if not messages and self._lost:
            raise LostError(self._lost)
        silent_s = time.monotonic() - self._heard_at
        if not messages and silent_s > self._silence_s:
            raise LostError(f"has not been heard of for {silent_s:.0f} s")
        return messages

    def close(self) -> None:
        """Close the connection."""
        if self._connection.fileno() >= 0:
            self._selector.unregister(self._connection)
            self._connection.close()

    def close_when_read(self) -> None:
        """Close the connection when the other side has: closing on unread bytes could take back what was sent last."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
            while self._connection.recv(_READ):
                pass
        self.close()

    def _read(self) -> None:
        try:
            data = self._connection.recv(_READ)
        except OSError as error:
            data, self._lost = b"", self._lost or str(error)
        if data and not self._lost:
            self._heard_at = time.monotonic()
            *lines, self._begun = (self._begun + data).split(b"\n")
            if len(self._begun) > _LONGEST:
                self._lost = "sends what no launcher sends"
            for line in lines:
                self._take(line)
        else:
            self._lost = self._lost or "has closed the connection"
            self._selector.unregister(self._connection)
            self._connection.close()

    def _take(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if isinstance(message, dict) and isinstance(message.get("kind"), str):
            self._messages.append(message)
        else:
            self._lost = "sends what no launcher sends"

"""A connection that never blocks and holds a bounded number of bytes."""

from __future__ import annotations

import selectors
import socket
from contextlib import suppress
from typing import Callable, Optional

_MOST_UNSENT = 1 << 20  # bytes held for a side that does not read
_READ = 1 << 16
_ROUND_S = 0.1  # an event ends the wait earlier
_CLOSED = "closed the connection"
_PIECES = 32  # reads in one turn, so that other connections get theirs


class LostError(ConnectionError):
    """The other side closed the connection, was silent for too long, or sent an invalid message."""


def wait_for_events(selector: selectors.BaseSelector) -> None:
    """Wait for events, at most `_ROUND_S`, and call their handlers."""
    for key, _ in selector.select(_ROUND_S):
        now = selector.get_map().get(key.fd)  # a handler may have closed it, and another file may have its number
        if now is not None and now.fileobj is key.fileobj:
            now.data()


class Connection:
    """One end of a TCP connection.

    It reads only expected bytes: `expect` sets their number and the function that takes them. Further bytes stay in the kernel,
    which makes the other side wait.

    Parameters
    ----------
    plug : socket.socket
        Connected.
    selector : selectors.BaseSelector
        Calls this end when it can read or write.

    Attributes
    ----------
    lost : str
        Why the connection ended; "" while it is open.
    """

    def __init__(self, plug: socket.socket, selector: selectors.BaseSelector) -> None:
        self.lost = ""
        self._plug, self._selector = plug, selector
        self._unsent, self._received = bytearray(), bytearray()
        self._expected = 0
        self._take: Optional[Callable[[bytes], None]] = None
        self._ending = False
        plug.setblocking(False)
        with suppress(OSError):  # the other side has already left
            plug.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._events = 0

    @property
    def closed(self) -> bool:
        """Whether the socket is closed."""
        return self._plug.fileno() < 0

    def expect(self, count: int, take: Callable[[bytes], None]) -> None:
        """Pass the next `count` bytes to `take`, once; `take` may call `expect` again."""
        self._expected, self._take = count, take
        self._watch()

    def send(self, data: bytes) -> None:
        """Send bytes, now or when there is room."""
        if not self.lost and not self._ending:
            self._unsent += data
            self._flush()
            if len(self._unsent) > _MOST_UNSENT:
                self.lose("does not read its messages")

    def poll(self) -> None:
        """Send unsent bytes, and read expected bytes that have arrived."""
        self._flush()
        for _ in range(_PIECES):
            if self.lost or not (self._take or self._ending) or not self._read():
                break
        self._watch()

    def lose(self, why: str) -> None:
        """Close the connection for a reason; the first reason is kept."""
        self.lost = self.lost or why
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self.lost = self.lost or "was closed here"
        if not self.closed:
            if self._events:
                self._selector.unregister(self._plug)
            self._plug.close()

    def close_gently(self) -> None:
        """Send unsent bytes, then discard what arrives until the other side closes, or `close` is called.

        Closing a socket with unread bytes could discard the last bytes sent.
        """
        self._ending, self._take = True, None
        self._flush()

    def _flush(self) -> None:
        if self.closed:
            return
        try:
            while self._unsent:
                del self._unsent[: self._plug.send(self._unsent)]
            if self._ending:
                self._plug.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            pass
        except OSError as error:
            self.lose(_reason(error))
        self._watch()

    def _watch(self) -> None:
        """Register for the events this end needs: not for reading while it expects no bytes."""
        reads, writes = bool(self._take or self._ending), bool(self._unsent)
        wanted = (selectors.EVENT_READ if reads else 0) | (selectors.EVENT_WRITE if writes else 0)
        if self.closed or wanted == self._events:
            return
        if not wanted:
            self._selector.unregister(self._plug)
        elif not self._events:
            self._selector.register(self._plug, wanted, self.poll)
        else:
            self._selector.modify(self._plug, wanted, self.poll)
        self._events = wanted

    def _read(self) -> bool:
        """Read once; return whether there may be more."""
        try:
            left = _READ if self._ending else self._expected - len(self._received)
            data = self._plug.recv(min(_READ, left))
        except BlockingIOError:
            return False
        except OSError as error:
            self.lose(_reason(error))
            return False
        if not data:
            self.lose(_CLOSED)
            return False
        self._received += b"" if self._ending else data
        if self._take and len(self._received) == self._expected:
            take, complete = self._take, bytes(self._received)
            self._take, self._received = None, bytearray()
            take(complete)
        return True


def _reason(error: OSError) -> str:
    return _CLOSED if isinstance(error, ConnectionError) else f"cannot be reached ({error.strerror})"

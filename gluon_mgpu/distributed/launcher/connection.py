"""A connection on which neither reading nor writing waits, and that holds a bounded number of bytes."""

from __future__ import annotations

import selectors
import socket
from contextlib import suppress
from typing import Callable, Optional

_MOST_UNSENT = 1 << 20  # bytes for an end that does not read
_READ = 1 << 16
_ROUND_S = 0.1  # news end the wait
_CLOSED = "has closed the connection"
_PIECES = 32  # read in one turn, so that the others have theirs


class LostError(ConnectionError):
    """The other side has closed the connection, has not been heard of for too long, or sends what no launcher sends."""


def wait_for_news(selector: selectors.BaseSelector) -> None:
    """Wait until something has come, or a moment has passed, and call those who wait for it."""
    for key, _ in selector.select(_ROUND_S):
        now = selector.get_map().get(key.fd)  # the one before may have closed it, and another may have its number
        if now is not None and now.fileobj is key.fileobj:
            now.data()


class Connection:
    """One end of a TCP connection.

    It reads no byte that nobody expects: `expect` says how many, and whom to give them to. What comes beyond stays with the
    kernel, which lets the other side wait.

    Parameters
    ----------
    plug : socket.socket
        Connected.
    selector : selectors.BaseSelector
        Calls this end when there is something to read, or room to write.

    Attributes
    ----------
    lost : str
        Why there is nothing more to come, "" while there may be.
    """

    def __init__(self, plug: socket.socket, selector: selectors.BaseSelector) -> None:
        self.lost = ""
        self._plug, self._selector = plug, selector
        self._unsent, self._received = bytearray(), bytearray()
        self._expected = 0
        self._take: Optional[Callable[[bytes], None]] = None
        self._ending = False
        plug.setblocking(False)
        with suppress(OSError):  # it has gone already
            plug.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._events = 0

    @property
    def closed(self) -> bool:
        """Whether the socket has been given back."""
        return self._plug.fileno() < 0

    def expect(self, count: int, take: Callable[[bytes], None]) -> None:
        """Give the next `count` bytes to `take`, once; it may expect more."""
        self._expected, self._take = count, take
        self._watch()

    def send(self, data: bytes) -> None:
        """Send bytes, now or when there is room."""
        if not self.lost and not self._ending:
            self._unsent += data
            self._flush()
            if len(self._unsent) > _MOST_UNSENT:
                self.lose("does not read what it is sent")

    def look(self) -> None:
        """Send what is left to send, and read what is expected and here."""
        self._flush()
        for _ in range(_PIECES):
            if self.lost or not (self._take or self._ending) or not self._read():
                break
        self._watch()

    def lose(self, why: str) -> None:
        """Close the connection because of something; the first reason stands."""
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
        """Send what is left and no more; throw away what comes, until the other side closes, or `close` is called.

        Closing on unread bytes could take back what was sent last.
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
        """Be called for what there is to do, and not for bytes that nobody expects."""
        reads, writes = bool(self._take or self._ending), bool(self._unsent)
        wanted = (selectors.EVENT_READ if reads else 0) | (selectors.EVENT_WRITE if writes else 0)
        if self.closed or wanted == self._events:
            return
        if not wanted:
            self._selector.unregister(self._plug)
        elif not self._events:
            self._selector.register(self._plug, wanted, self.look)
        else:
            self._selector.modify(self._plug, wanted, self.look)
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
            take, whole = self._take, bytes(self._received)
            self._take, self._received = None, bytearray()
            take(whole)
        return True


def _reason(error: OSError) -> str:
    return _CLOSED if isinstance(error, ConnectionError) else f"is out of reach ({error.strerror})"

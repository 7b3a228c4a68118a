"""The table from which Horovod's processes read each other's addresses, served over HTTP at one address. Run as a program.

    python horovod_rendezvous.py 127.0.0.1 29500

It answers the three requests of Horovod's HTTPStore: PUT and GET of /scope/key, and DELETE, with which a process reports that
it has found all others.

Horovod's processes use no password, so any client that reaches the address can read and change the table. The server bounds
entries, bytes, connections and their time. A new connection replaces the oldest one when there are too many.

Source: Horovod 0.28.1, horovod/common/gloo/http_store.cc, horovod/runner/http/http_server.py.
"""

from __future__ import annotations

import resource
import socket
import sys
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Dict

_MOST_BYTES = 1 << 20  # of an entry; an address takes a few hundred
_MOST_ENTRIES = 1 << 16
_MOST_IN_ALL = 256 << 20  # bytes of all entries
_LONGEST_NAME = 1000
_MOST_CONNECTIONS = 512
_WAIT_S = 10.0  # for the next bytes of a request
_REQUEST_S = 30.0  # for all of it


class RendezvousServer(ThreadingHTTPServer):
    """Serves the table until the process ends."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, host: str, port: int) -> None:
        self.entries: Dict[str, bytes] = {}
        self.num_bytes = 0
        self._lock = threading.Lock()
        self._since: Dict[Any, float] = {}  # connection -> when it began, the oldest first
        self._most = min(_MOST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind without asking a name server for this machine's name, as HTTPServer does."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the launcher reserves the port until this listens
        self.socket.bind(self.server_address)
        host, port = self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(host), int(port)

    def put(self, name: str, entry: bytes) -> bool:
        """Store an entry; return whether there was room for it."""
        with self._lock:
            num_bytes = self.num_bytes + len(entry) - len(self.entries.get(name, b""))
            is_new = name not in self.entries
            if num_bytes > _MOST_IN_ALL or len(name) > _LONGEST_NAME or (is_new and len(self.entries) >= _MOST_ENTRIES):
                return False
            self.entries[name], self.num_bytes = entry, num_bytes
            return True

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a new thread; close the oldest connections if there are too many."""
        open_ones = list(self._since)
        for oldest in open_ones[: max(0, len(open_ones) + 1 - self._most)]:
            self._end(oldest)
        self._since[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Forget a connection that has been answered."""
        self._since.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Close connections that take too long, such as clients that send one byte at a time."""
        for request, since in list(self._since.items()):
            if time.monotonic() - since > _REQUEST_S:
                self._end(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connections that break off."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    def _end(self, request: Any) -> None:
        """Shut a connection down, which ends its thread."""
        self._since.pop(request, None)
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    server: RendezvousServer
    timeout = _WAIT_S

    def do_GET(self) -> None:
        """Send an entry, or 404 if it is not stored yet."""
        entry = self.server.entries.get(self.path)
        self._answer(404 if entry is None else 200, entry or b"")

    def do_PUT(self) -> None:
        """Store an entry."""
        size = self.headers.get("Content-Length", "")
        if not (size.isascii() and size.isdigit()) or len(size) > 9 or int(size) > _MOST_BYTES:
            self._answer(400)
            return
        entry = self.rfile.read(int(size))
        self._answer(200 if len(entry) == int(size) and self.server.put(self.path, entry) else 400)

    def do_DELETE(self) -> None:
        """Accept a process's report that it is done; keep the entries for the others."""
        self._answer(200)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def _answer(self, code: int, entry: bytes = b"") -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(entry)))
        self.end_headers()
        self.wfile.write(entry)


if __name__ == "__main__":
    RendezvousServer(sys.argv[1], int(sys.argv[2])).serve_forever()

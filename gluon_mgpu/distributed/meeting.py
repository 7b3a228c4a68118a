"""Where Horovod's processes learn each other's addresses: a small table over HTTP, at one address only. Run as a program.

    python meeting.py 127.0.0.1 29500

It knows the three requests of Horovod's HTTPStore: PUT and GET of /scope/key, and DELETE, with which a process says that it has
found all others.

Source: Horovod 0.28.1, horovod/common/gloo/http_store.cc, horovod/runner/http/http_server.py.
"""

from __future__ import annotations

import socket
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Dict

_MOST_BYTES = 1 << 20  # of an entry; an address takes some hundred
_MOST_ENTRIES = 1 << 20
_WAIT_S = 10.0  # for the rest of a request


class Meeting(ThreadingHTTPServer):
    """Serves the table until the process ends."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, host: str, port: int) -> None:
        self.entries: Dict[str, bytes] = {}
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind without asking a name server for this machine's name, as HTTPServer does."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the launcher holds the port until somebody listens
        self.socket.bind(self.server_address)
        host, port = self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(host), int(port)


class _Handler(BaseHTTPRequestHandler):
    server: Meeting
    timeout = _WAIT_S

    def do_GET(self) -> None:
        """Give an entry, or say that it is not there yet."""
        entry = self.server.entries.get(self.path)
        self._answer(404 if entry is None else 200, entry or b"")

    def do_PUT(self) -> None:
        """Take an entry."""
        size = self.headers.get("Content-Length", "")
        if not (size.isascii() and size.isdigit()) or int(size) > _MOST_BYTES or len(self.server.entries) >= _MOST_ENTRIES:
            self._answer(400)
            return
        self.server.entries[self.path] = self.rfile.read(int(size))
        self._answer(200)

    def do_DELETE(self) -> None:
        """Take a process's word that it needs nothing more; others may."""
        self._answer(200)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def _answer(self, code: int, entry: bytes = b"") -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(entry)))
        self.end_headers()
        self.wfile.write(entry)


if __name__ == "__main__":
    Meeting(sys.argv[1], int(sys.argv[2])).serve_forever()

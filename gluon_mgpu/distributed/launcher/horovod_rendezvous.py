"""The table from which Horovod's processes read each other's addresses, served over HTTP at one address. Run as a program.

    python horovod_rendezvous.py 127.0.0.1 29500

It answers the three requests of Horovod's HTTPStore: PUT and GET of /scope/key, and DELETE, with which a process reports that
it has found all others.

Horovod's processes use no password, so any client that reaches the address can read and change the table.

Source: Horovod 0.28.1, horovod/common/gloo/http_store.cc, horovod/runner/http/http_server.py.
"""

from __future__ import annotations

import socket
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Dict


class RendezvousServer(ThreadingHTTPServer):
    """Serves the table until the process ends."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, host: str, port: int) -> None:
        self.entries: Dict[str, bytes] = {}
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind without asking a name server for this machine's name, as HTTPServer does."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the launcher reserves the port until this listens
        self.socket.bind(self.server_address)
        host, port = self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(host), int(port)


class _Handler(BaseHTTPRequestHandler):
    server: RendezvousServer
    timeout = 10.0  # seconds for the next bytes of a request

    def do_GET(self) -> None:
        """Send an entry, or 404 if it is not stored yet."""
        entry = self.server.entries.get(self.path)
        self._answer(404 if entry is None else 200, entry or b"")

    def do_PUT(self) -> None:
        """Store an entry."""
        size = int(self.headers.get("Content-Length", "0"))
        entry = self.rfile.read(size)
        if len(entry) == size:
            self.server.entries[self.path] = entry
        self._answer(200 if len(entry) == size else 400)

    def do_DELETE(self) -> None:
        """Accept a process's report that it is done; keep the entries for the others."""
        self._answer(200)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def _answer(self, code: int, entry: bytes = b"") -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(entry)))
        self.end_headers()
        self.wfile.write(entry)


if __name__ == "__main__":
    RendezvousServer(sys.argv[1], int(sys.argv[2])).serve_forever()

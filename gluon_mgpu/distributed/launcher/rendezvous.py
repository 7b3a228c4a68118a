"""Horovod's rendezvous server at one address, where its processes find each other. Run as a program.

python -m gluon_mgpu.distributed.launcher.rendezvous 127.0.0.1 29500
"""

from __future__ import annotations

import importlib
import sys


def main(host: str, port: int) -> None:
    """Serve until the process ends."""
    http_server = importlib.import_module("horovod.runner.http.http_server")

    class Handler(http_server.KVStoreHandler):  # type: ignore[name-defined]
        def do_DELETE(self) -> None:  # noqa: N802
            self.send_status_code(200)  # the process has found the others, which may still need its address

    class Server(http_server.RendezvousHTTPServer):  # type: ignore[name-defined]
        request_queue_size = 1024  # all processes connect at once

    Server((host, port), Handler, False).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

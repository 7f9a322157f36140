"""The report page while runs are in progress: served on the local machine, refreshed after every round."""

from __future__ import annotations

import hashlib
import logging
import sys
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fedkeep._util.text import one_line, printable
from fedkeep.analysis.run_set import read_runs
from fedkeep.errors import FedkeepError, RunError
from fedkeep.reports.data import page_data
from fedkeep.reports.page import embed, render
from fedkeep.runs.files import ROUNDS
from fedkeep.runs.reading import find_runs

log = logging.getLogger("fedkeep")

HOST = "127.0.0.1"
PAUSE_FACTOR = 4  # pause between two renderings, in units of their duration: at most a fifth of the time is rendering


class Source:
    """The current data of the page, read again only when a round has been written."""

    def __init__(self, runs: Sequence[str | Path]) -> None:
        self.runs = list(runs)
        self._lock = threading.Lock()
        self._stamps: Any = None
        self._next_update = 0.0
        self._data: dict[str, Any] = _waiting("No round has been evaluated yet.")

    def data(self) -> dict[str, Any]:
        """Return the data of the page, updated if a round has been written since."""
        with self._lock:
            if time.monotonic() < self._next_update:
                return self._data
            started = time.monotonic()
            try:
                stamps = [(path, *_stamp(path / ROUNDS), *_stamp(path)) for path in find_runs(self.runs)]
                if stamps != self._stamps:
                    self._data = page_data(read_runs(self.runs))
                    self._stamps = stamps
            except FedkeepError as error:  # no round yet, or a folder is being created, moved or removed
                self._data = self._data if self._data["problems"] else _waiting(f"Waiting: {printable(error)}.")
            except Exception as error:  # whatever a folder contains, every request is answered
                log.warning("the page could not be updated: %s: %s", type(error).__name__, one_line(error))
            ended = time.monotonic()
            self._next_update = ended + PAUSE_FACTOR * (ended - started)
            return self._data


def _waiting(headline: str) -> dict[str, Any]:
    return {"verdict": {"headline": headline, "details": []}, "problems": [], "left_out": []}


def _stamp(file: Path) -> tuple[int, int]:
    """Return the time and size of a file, (0, 0) if there is none."""
    try:
        status = file.stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size


def serve(runs: Sequence[str | Path], port: int) -> ThreadingHTTPServer:
    """Return a server of the report page of these runs; `serve_forever` starts it. Port 0 selects a free port."""
    find_runs(runs)  # raises if a folder holds no run
    source = Source(runs)

    class Handler(_Handler):
        pass

    Handler.source = source
    try:
        return _Server((HOST, port), Handler)
    except OSError as error:
        raise RunError(
            f"cannot listen on port {port} ({error.strerror}): choose another port, or 0 for any free port",
            key="port",
            value=port,
        ) from None


class _Server(ThreadingHTTPServer):
    """The server; a browser that closes its connection is no error."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print a traceback, unless the client has gone."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """Serves / and /data.json, and only to requests for this machine's own host name."""

    source: Source
    server_version, sys_version = "fedkeep", ""
    timeout = 60

    def do_GET(self) -> None:
        """Send the page or its data."""
        port = self.connection.getsockname()[1]
        # Another site can make a browser call this server under its own host name (DNS rebinding): reject those.
        if self.headers.get("Host") not in (f"{HOST}:{port}", f"localhost:{port}"):
            self._send(403, "text/plain", b"only requests for 127.0.0.1 or localhost are answered\n")
        elif self.path == "/":
            self._send(200, "text/html; charset=utf-8", render(self.source.data(), live=True).encode())
        elif self.path == "/data.json":
            body = embed({**self.source.data(), "live": True}).encode()
            etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
            same = self.headers.get("If-None-Match") == etag
            self._send(304 if same else 200, "application/json", b"" if same else body, etag)
        else:
            self._send(404, "text/plain", b"not found: only / and /data.json exist\n")

    do_HEAD = do_GET  # noqa: N815 (the name that http.server looks for)

    def _send(self, status: int, kind: str, body: bytes, etag: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", "frame-ancestors 'none'")  # which a page cannot say of itself
        self.send_header("X-Frame-Options", "DENY")
        if etag:
            self.send_header("ETag", etag)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: every refresh would be a line."""

"""The page while runs go on: served on loopback, and made anew when a run has written another round."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fedkeep.analysis.groups import group
from fedkeep.errors import FedkeepError, RunError
from fedkeep.reports.data import page_data
from fedkeep.reports.page import embed, render
from fedkeep.runs.files import ROUNDS
from fedkeep.runs.reading import find_runs

HOST = "127.0.0.1"
REST = 4  # a page that takes long to make is made less often: making it is at most a fifth of the time


class Source:
    """What the runs show by now, read again only when a round has been written."""

    def __init__(self, runs: Sequence[str | Path]) -> None:
        self.runs = list(runs)
        self._lock = threading.Lock()
        self._seen: Any = None
        self._next = 0.0
        self._data: dict[str, Any] = _waiting("No round has been evaluated yet.")

    def data(self) -> dict[str, Any]:
        """Return the page's data, new where that is due."""
        with self._lock:
            if time.monotonic() < self._next:
                return self._data
            began = time.monotonic()
            try:
                seen = [(path, *_stamp(path / ROUNDS)) for path in find_runs(self.runs)]
                if seen != self._seen:
                    self._data = page_data(group(self.runs))
                    self._seen = seen
            except FedkeepError as error:  # no round yet; or a folder that is just being made, moved or removed
                self._data = self._data if self._data["groups"] else _waiting(f"Waiting: {error}.")
            ended = time.monotonic()
            self._next = ended + REST * (ended - began)
            return self._data


def _waiting(headline: str) -> dict[str, Any]:
    return {"verdict": {"headline": headline, "details": []}, "groups": []}


def _stamp(file: Path) -> tuple[int, int]:
    try:
        found = file.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size


def serve(runs: Sequence[str | Path], port: int) -> ThreadingHTTPServer:
    """Make the server of these runs' page; `serve_forever` runs it. Port 0 takes any that is free."""
    find_runs(runs)  # says at once what is not a run
    source = Source(runs)

    class Handler(_Handler):
        pass

    Handler.source = source
    try:
        return ThreadingHTTPServer((HOST, port), Handler)
    except OSError as error:
        raise RunError(f"port {port} cannot be listened on ({error.strerror}): choose another, or 0 for any") from None


class _Handler(BaseHTTPRequestHandler):
    """Two answers, / and /data.json; asked by another name than loopback's, none."""

    source: Source
    server_version, sys_version = "fedkeep", ""
    timeout = 60

    def do_GET(self) -> None:
        """Answer with the page, or with its data."""
        port = self.connection.getsockname()[1]
        # A page from elsewhere can make a browser call us under its own name (DNS rebinding): only ours is answered.
        if self.headers.get("Host") not in (f"{HOST}:{port}", f"localhost:{port}"):
            self._answer(403, "text/plain", b"this page is served to the machine it runs on, and to no other name\n")
        elif self.path == "/":
            self._answer(200, "text/html; charset=utf-8", render(self.source.data(), live=True).encode())
        elif self.path == "/data.json":
            body = embed({**self.source.data(), "live": True}).encode()
            mark = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
            same = self.headers.get("If-None-Match") == mark
            self._answer(304 if same else 200, "application/json", b"" if same else body, mark)
        else:
            self._answer(404, "text/plain", b"there are two things here: / and /data.json\n")

    do_HEAD = do_GET  # noqa: N815 (the name that http.server looks for)

    def _answer(self, status: int, kind: str, body: bytes, mark: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        if mark:
            self.send_header("ETag", mark)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Keep quiet: a line for every refresh helps nobody."""

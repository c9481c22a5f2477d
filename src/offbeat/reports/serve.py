"""`offbeat report --live`: serve a report on this machine, and update it while its runs go on.

The server listens on 127.0.0.1 only, and the address has a random token, so that other users of the machine cannot
read along. It checks the Host header, so that no web page can reach it under a name of its own.
"""

import secrets
import sys
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final

from offbeat.errors import OffbeatError, RunError
from offbeat.reports.page import content_policy, load_runs, render, render_body
from offbeat.run.directory import RunDirectory
from offbeat.storage.files import held_by

HOST: Final = "127.0.0.1"
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class ReportSource:
    """The newest report of some runs. It is made again only after a run has written an event, started or ended."""

    def __init__(self, paths: Sequence[Path], names: Sequence[str] = ()) -> None:
        self._paths, self._names = paths, names
        self._lock = threading.Lock()
        self._body = ""
        self._shown = ""

    def state(self) -> str:
        """Return a text that changes whenever the report would."""
        parts = []
        for path in self._paths:
            events = RunDirectory(path).events
            size = events.stat().st_size if events.exists() else 0
            parts.append(f"{size}-{'on' if held_by(RunDirectory(path).lock) else 'off'}")
        return f'"{" ".join(parts)}"'

    def page(self) -> str:
        """Return the whole page."""
        state = self.state()
        return render(load_runs(self._paths, self._names), live=state)

    def body(self) -> tuple[str, str]:
        """Return the content of the page, and the state that it shows."""
        with self._lock:  # several browser windows ask at once: one of them waits for the other's result
            state = self.state()
            if state != self._shown:
                self._body, self._shown = render_body(load_runs(self._paths, self._names)), state
            return self._body, self._shown


class ReportServer(ThreadingHTTPServer):
    """A live report on loopback. `serve_forever` blocks; a `with` block closes the port."""

    daemon_threads = True

    def __init__(self, source: ReportSource, port: int = 0) -> None:
        """Open a port; 0 chooses a free one."""
        self.source, self.token = source, secrets.token_urlsafe(16)
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise RunError(f"port {port} cannot be opened: {error.strerror}; give another --port, or none") from error

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of a client that went away."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]  # the base class names a socket

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/{self.token}/"


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD of the page and of its content, and nothing else."""

    server: ReportServer
    timeout = 60

    def do_GET(self) -> None:
        port, (place, _, name) = self.server.server_port, self.path.rpartition("/")
        answers = {"": self._page, "part": self._part}
        known = self.headers.get("Host") in (f"{HOST}:{port}", f"localhost:{port}")
        if known and secrets.compare_digest(place.encode(), f"/{self.server.token}".encode()) and name in answers:
            self._try(answers[name])
        else:
            self._answer(404, "not found")

    do_HEAD = do_GET

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a broken request, or one of another method, as every other; the base class writes HTML."""
        self._answer(405 if code == 501 else code, "only GET and HEAD are answered", Allow="GET, HEAD")

    def _page(self) -> None:
        policy = f"{content_policy(live=True)}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        self._answer(200, self.server.source.page(), **{"Content-Security-Policy": policy})

    def _part(self) -> None:
        if self.headers.get("If-None-Match") == self.server.source.state():
            self._answer(304, "")
            return
        body, state = self.server.source.body()
        self._answer(200, body, ETag=state)

    def _try(self, answer: Callable[[], None]) -> None:
        try:
            answer()
        except Exception as error:  # a run directory that was moved or is damaged; the browser asks again
            self._answer(500, f"{error}" if isinstance(error, OffbeatError | OSError) else repr(error))

    def _answer(self, status: int, text: str, **headers: str) -> None:
        content = text.encode(errors="backslashreplace")
        kind = "html" if status == 200 else "plain"  # an error may name a path that is HTML
        described = {"Content-Type": f"text/{kind}; charset=utf-8", "Content-Length": str(len(content))}
        self.send_response_only(status)
        for name, value in (_HEADERS | headers | described).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Requests are not worth a line."""

"""Headless Chromium driven over its DevTools pipe: no port is opened and nothing but the standard library is needed."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

PATIENCE: Final = 60.0
"""Seconds to wait for an answer."""


class Chromium:
    """One page. Every event it sends is kept in `events`."""

    def __init__(self) -> None:
        binary = shutil.which("chromium") or shutil.which("chromium-browser")
        if binary is None:
            raise SystemExit("this needs chromium: apt install chromium")
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        command = f"exec {binary} --headless=new --no-sandbox --disable-gpu --hide-scrollbars --remote-debugging-pipe "
        command += f"--user-data-dir={self._profile.name} 3<&{to_read} 4>&{to_write}"
        self._process = subprocess.Popen(
            ["bash", "-c", command], pass_fds=(to_read, to_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_read)
        os.close(to_write)
        os.set_blocking(self._read, False)
        self._buffer, self._number, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: object) -> dict[str, Any]:
        """A command, and its answer."""
        self._number += 1
        message: dict[str, object] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + PATIENCE
        while True:
            said = self._next(until, method)
            if said.get("id") == self._number:
                if "error" in said:
                    raise RuntimeError(f"{method}: {said['error']}")
                return dict(said["result"])
            self.events.append(said)

    def wait(self, event: str) -> None:
        """Until this event has come since the last look at `events`."""
        until = time.monotonic() + PATIENCE
        while not any(one.get("method") == event for one in self.events):
            self.events.append(self._next(until, event))

    def _next(self, until: float, what: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            try:
                self._buffer += os.read(self._read, 1 << 20)
            except BlockingIOError:
                if time.monotonic() > until:
                    raise TimeoutError(f"chromium did not answer {what} within {PATIENCE:g} s") from None
                time.sleep(0.01)
        line, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(line))

    def open(self, file: Path, *, width: int, dark: bool) -> None:
        """Load a file at this width; `events` begins anew."""
        self.events.clear()
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Page.navigate", url=file.resolve().as_uri())
        self.wait("Page.loadEventFired")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"]))
        return found["result"].get("value")

    def screenshot(self, to: Path, *, top: float = 0, height: float | None = None) -> None:
        """The whole page, or a strip of it, as PNG."""
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": top, "width": size["width"], "height": height or size["height"], "scale": 1}
        made = self.send("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        to.write_bytes(base64.b64decode(made["data"]))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session = ""
        try:
            self.send("Browser.close")
        except (OSError, TimeoutError):
            self._process.kill()
        self._process.wait(10)
        os.close(self._write)
        os.close(self._read)
        self._profile.cleanup()

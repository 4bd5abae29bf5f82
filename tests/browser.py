"""A headless Chromium that tests ask about pages, by the DevTools protocol over two pipes."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

CHROMIUM = shutil.which("chromium")
CALL_SECONDS = 120.0  # on a busy machine, the first answer takes a while


def needs_chromium() -> pytest.MarkDecorator:
    """Skip a test where Debian's `chromium` is not installed; in CI it then fails, because CI installs it."""
    return pytest.mark.skipif(
        CHROMIUM is None and not os.environ.get("CI"), reason="needs Debian's chromium: apt-get install chromium"
    )


@dataclass
class Tab:
    """One page. `complaints` are what its console and the browser's log have said against it so far."""

    browser: Browser
    session: str
    complaints: list[str] = field(default_factory=list)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.browser.call(method, parameters, session=self.session)

    def open(self, path: Path, *, width: int, media: Literal["screen", "print"] = "screen") -> None:
        """Show a file in a window of so many CSS pixels and wait until it is laid out."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setEmulatedMedia", media=media)
        self.call("Page.navigate", url=path.absolute().as_uri())
        while self.evaluate("document.readyState") != "complete" or self.evaluate("location.href") == "about:blank":
            pass

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in found:
            raise AssertionError(found["exceptionDetails"])
        return found["result"].get("value")

    def screenshot(self) -> bytes:
        """Return a PNG of the whole page."""
        return base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"])

    def pdf(self) -> bytes:
        return base64.b64decode(self.call("Page.printToPDF", preferCSSPageSize=True)["data"])


class Browser:
    """The protocol: JSON messages that end with a zero byte, answered by their number."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._write = os.fdopen(to_browser, "wb")
        self._read = os.fdopen(from_browser, "rb")
        self._number = 0
        self._tabs: dict[str, Tab] = {}
        self._rest = b""

    def call(self, method: str, parameters: dict[str, Any], *, session: str | None = None) -> dict[str, Any]:
        """Return the answer to one call; raises `RuntimeError` if the browser refuses it."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        self._write.write(json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        self._write.flush()
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])
            self._note(answer)

    def tab(self) -> Tab:
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        tab = self._tabs[session] = Tab(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.call(f"{domain}.enable")
        return tab

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._read.fileno(), 1 << 20)
            if not part:
                raise RuntimeError("the browser has ended")
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, event: dict[str, Any]) -> None:
        tab = self._tabs.get(event.get("sessionId", ""))
        if tab is None:
            return
        told, what = event["method"], event["params"]
        if told in {"Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"}:
            tab.complaints.append(json.dumps(what))
        elif told == "Network.requestWillBeSent" and not what["request"]["url"].startswith(("file:", "data:")):
            tab.complaints.append(f"asks for {what['request']['url']}")


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser with a profile of its own, which is ended with all of its processes."""
    assert CHROMIUM is not None, "chromium is not installed; apt-get install chromium"
    read_here, write_there = os.pipe()
    read_there, write_here = os.pipe()
    options = (
        f"--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars --user-data-dir={profile}"
    )
    process = subprocess.Popen(
        ["bash", "-c", f"exec {CHROMIUM} {options} --remote-debugging-pipe 3<&{read_there} 4>&{write_there}"],
        pass_fds=(read_there, write_there),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(read_there)
    os.close(write_there)
    try:
        yield Browser(write_here, read_here)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

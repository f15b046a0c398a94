"""Control a headless Chromium over its debugging pipe, and read the content and console errors of a page.

The pipe is two file descriptors. Each JSON message ends with a NUL byte; no port and no websocket is used.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Any

# Seconds to wait for an answer from the browser; on a loaded machine a page can need minutes.
GUARD_S = 1800.0
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def installed() -> str | None:
    """Return the path of the installed browser, or None if there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab of the browser.

    Attributes:
        errors: uncaught exceptions, console errors and failed requests of the page.
    """

    def __init__(self, to_browser: int, from_browser: int):
        self._to, self._from = to_browser, from_browser
        self._rest, self._number, self._answers = b"", 0, {}  # type: ignore[var-annotated]
        self._session: str | None = None
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, timeout: float = GUARD_S, **params: Any) -> dict[str, Any]:
        """Send one command of the DevTools protocol and return its result."""
        self._number += 1
        number, message = self._number, {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + timeout
        while number not in self._answers:
            self._read(end - time.monotonic())
        answer = self._answers.pop(number)
        assert "error" not in answer, answer
        return answer["result"]

    def _read(self, timeout: float) -> None:
        ready, _, _ = select.select([self._from], [], [], max(0.0, timeout))
        assert ready, "no answer from the browser in time"
        self._rest += os.read(self._from, 1 << 20)
        *messages, self._rest = self._rest.split(b"\0")
        for message in map(json.loads, messages):
            if "id" in message:
                self._answers[message["id"]] = message
            else:
                self._note(message["method"], message["params"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.errors.append(" ".join(str(a.get("value", a.get("description"))) for a in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def value(self, javascript: str) -> Any:
        """Evaluate a JavaScript expression on the page and return its value; promises are awaited."""
        answer = self.call("Runtime.evaluate", expression=javascript, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, javascript: str) -> Any:
        """Evaluate an expression until it is true, at most `GUARD_S` seconds, and return its last value."""
        end = time.monotonic() + GUARD_S
        while not (value := self.value(javascript)) and time.monotonic() < end:
            time.sleep(0.2)
        return value


@contextlib.contextmanager
def browser(executable: str, width: int = 1400, height: int = 1500) -> Iterator[Page]:
    """Open a browser with one page; remove its profile folder at the end."""
    into_read, into_write = os.pipe()
    out_read, out_write = os.pipe()

    def wire() -> None:  # the browser reads from file descriptor 3 and writes to 4
        low, high = os.dup(into_read), os.dup(out_write)
        os.dup2(low, 3)
        os.dup2(high, 4)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [
            executable, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--no-first-run", "--remote-debugging-pipe", f"--user-data-dir={profile}",
            f"--window-size={width},{height}", "about:blank",
        ]  # fmt: skip
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(command, pass_fds=(3, 4), preexec_fn=wire, **quiet)
        os.close(into_read)
        os.close(out_write)
        try:
            yield Page(into_write, out_read)
        finally:
            os.close(into_write)
            os.close(out_read)
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

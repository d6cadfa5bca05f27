"""Drive a headless Chromium through the pipe of its DevTools protocol. Messages are JSON and end in a zero byte."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--remote-debugging-pipe",
)
_SECONDS = 30


def binary() -> str | None:
    """Return the path of this machine's Chromium or Chrome, or None if none is installed."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """Start a browser with its profile in `folder`, and yield a Page that drives it; end the browser afterwards.

    A Chromium or Chrome must be installed (see `binary`).
    """
    found = binary()
    assert found is not None
    ours, theirs = os.pipe(), os.pipe()  # the browser reads descriptor 3 and writes descriptor 4
    script = f'exec "$0" "$@" 3<&{ours[0]} 4>&{theirs[1]}'
    arguments = ["bash", "-c", script, found, *_FLAGS, f"--user-data-dir={folder}", "about:blank"]
    process = subprocess.Popen(
        arguments,
        pass_fds=(ours[0], theirs[1]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(ours[0])
    os.close(theirs[1])
    try:
        yield Page(ours[1], theirs[0])
    finally:
        process.terminate()
        process.wait(_SECONDS)
        os.close(ours[1])
        os.close(theirs[0])


class Page:
    """The first tab of a browser, which this object controls.

    The attribute ``events`` lists the messages that the browser sent unasked since the last ``open``, such as requests,
    console messages and exceptions.

    Args:
        to: the file descriptor of the pipe that the browser reads.
        back: the file descriptor of the pipe that the browser writes.
    """

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back, self._left, self._number = to, back, b"", 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        targets = self.send("Target.getTargets")["targetInfos"]
        target = next(t["targetId"] for t in targets if t["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol with these parameters, wait for the answer, and return its result.

        Raises:
            AssertionError: if the answer is an error, or if the browser is silent for 30 seconds.
        """
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            found = self._receive()
            if found.get("id") == self._number:
                assert "error" not in found, found
                result: dict[str, Any] = found["result"]
                return result

    def open(self, address: str) -> None:
        """Go to an address and wait until it is loaded. Earlier messages are removed from ``events``."""
        self.events.clear()
        self.send("Page.navigate", url=address)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._receive()

    def run(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, None if it is undefined.

        Raises:
            AssertionError: if the expression throws an exception.
        """
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def events_of(self, *methods: str) -> list[dict[str, Any]]:
        """Return the parameters of the events so far whose method is one of `methods`, such as "Log.entryAdded"."""
        return [event["params"] for event in self.events if event["method"] in methods]

    def _receive(self) -> dict[str, Any]:
        """Return the browser's next message, be it an event or an answer. Events are stored in ``events`` too.

        Raises:
            AssertionError: if no whole message arrives within 30 seconds.
        """
        end = time.monotonic() + _SECONDS
        while b"\0" not in self._left:
            ready, _, _ = select.select([self._back], [], [], max(end - time.monotonic(), 0))
            data = os.read(self._back, 1 << 20) if ready else b""
            assert data, "the browser does not answer"
            self._left += data
        text, self._left = self._left.split(b"\0", 1)
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self.events.append(message)
        return message

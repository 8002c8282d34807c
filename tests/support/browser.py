"""Chromium without a window, driven by the DevTools protocol over two pipes: no driver, no port, no package.

The messages are JSON, each followed by a zero byte: https://chromedevtools.github.io/devtools-protocol/. The browser
reads file descriptor 3 and writes descriptor 4. `find_chromium` returns None on a machine without it.
"""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TIMEOUT = 60.0
"""Seconds for one command; a busy machine takes 10 s to start the browser."""
_OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--no-first-run", "--disable-extensions", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--disable-default-apps", "--mute-audio", "--remote-debugging-pipe"),
)
_KEYS = {"Space": (32, " "), "Escape": (27, ""), "ArrowLeft": (37, ""), "ArrowRight": (39, "")}
"""Keys with their numbers and texts."""
_LEGIBILITY = """
(() => {
  const luminance = (color) => {
    const parts = color.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255)
      .map((part) => part <= 0.03928 ? part / 12.92 : Math.pow((part + 0.055) / 1.055, 2.4));
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const background = (element) => {
    for (let node = element; node; node = node.parentElement) {
      const color = getComputedStyle(node).backgroundColor;
      if (!color.endsWith(", 0)")) return color;
    }
    return "rgb(255, 255, 255)";
  };
  let lowest = [99, ""], smallest = 99;
  for (const element of document.querySelectorAll("body *:not(script):not(noscript)")) {
    const text = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!text || !element.getClientRects().length) continue;
    const style = getComputedStyle(element);
    const color = element instanceof SVGElement ? style.fill : style.color;
    const values = [luminance(color), luminance(background(element))].sort((a, b) => b - a);
    const contrast = (values[0] + 0.05) / (values[1] + 0.05);
    if (contrast < lowest[0]) lowest = [contrast, element.outerHTML.slice(0, 100)];
    smallest = Math.min(smallest, parseFloat(style.fontSize));
  }
  return {lowest, smallest, background: background(document.body)};
})()
"""
"""The lowest contrast of a text and its background (WCAG 2), the smallest font in pixels, the page's background."""


def find_chromium() -> str | None:
    """Return the path of Chromium or Chrome, None if there is none."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page:
    """A page of a browser, with the events that it caused."""

    def __init__(self, requests: int, answers: int) -> None:
        """Connect to a browser that has started, and open an empty page."""
        self._requests, self._answers = requests, answers
        self._buffer, self._number, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._requests, data) :]
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])
            self.events.append(answer)

    def _read(self) -> dict[str, Any]:
        deadline = time.monotonic() + TIMEOUT
        while b"\0" not in self._buffer:
            if not select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            data = os.read(self._answers, 1 << 20)
            if not data:
                raise EOFError("the browser has ended")
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

    def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the size of the window in CSS pixels, and the colour scheme that the user prefers."""
        mobile = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        """Open an address and wait until the page is loaded."""
        self.call("Page.navigate", url=url)
        deadline = time.monotonic() + TIMEOUT
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            if time.monotonic() > deadline:
                raise TimeoutError(url)
            self.evaluate("1")
            time.sleep(0.02)
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression, after its promise if it is one."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"])
        return result["result"].get("value")

    def measure_legibility(self) -> dict[str, Any]:
        """Return the lowest contrast with its element, the smallest font, and the background of the page."""
        result: dict[str, Any] = self.evaluate(_LEGIBILITY)
        return result

    def click(self, selector: str) -> None:
        """Click the middle of an element with the mouse."""
        x, y = self._locate(selector, 0.5, 0.5)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def hover(self, selector: str, across: float = 0.5, down: float = 0.5) -> None:
        """Move the mouse over an element, to a share of its width and height."""
        x, y = self._locate(selector, across, down)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, key: str) -> None:
        """Press a key in the element with the focus."""
        number, text = _KEYS[key]
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=text or key, code=key, text=text, windowsVirtualKeyCode=number
            )

    def _locate(self, selector: str, across: float, down: float) -> tuple[float, float]:
        box = self.evaluate(
            f"(() => {{ const element = document.querySelector({json.dumps(selector)});"
            " element.scrollIntoView({block: 'center'}); const box = element.getBoundingClientRect();"
            " return [box.left, box.top, box.width, box.height]; })()"
        )
        return box[0] + across * box[2], box[1] + down * box[3]

    def list_requests(self) -> list[str]:
        """Return the addresses that the page requested."""
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]

    def list_complaints(self) -> list[str]:
        """Return messages of the console, exceptions and violations of a policy."""
        methods = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(event["params"]) for event in self.events if event.get("method") in methods]

    def screenshot(self, path: Path, *, full: bool = True) -> None:
        """Write a PNG of the page."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=full)["data"]
        path.write_bytes(base64.b64decode(data))


@contextmanager
def open_page(chromium: str) -> Iterator[Page]:
    """Start a browser with a new profile, yield an empty page, and end the browser."""
    requests_read, requests_write = os.pipe()
    answers_read, answers_write = os.pipe()
    # bash moves the browser's ends to 3 and 4; they must not have these numbers before.
    browser_ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (requests_read, answers_write)]
    connect = 'exec "$@" 3<&{} 4>&{}'.format(*browser_ends)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            ["bash", "-c", connect, "bash", chromium, *_OPTIONS, f"--user-data-dir={profile}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=browser_ends,
            env=os.environ | {"HOME": profile},
        )
        for end in (requests_read, answers_write, *browser_ends):
            os.close(end)
        try:
            yield Page(requests_write, answers_read)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(requests_write)
            os.close(answers_read)

"""Headless Chromium over its DevTools protocol: load a page, see what it asks for, take a picture.

    with Browser(executable()) as browser:
        page = browser.open("http://localhost:8000/", width=390, dark=True)
        page.requests, page.errors, page.run("document.title"), page.picture(Path("page.png"))
"""

import base64
import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from websocket import WebSocket, WebSocketTimeoutException, create_connection

FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
         "--no-first-run", "--disable-background-networking", "--disable-component-update", "--remote-debugging-port=0"]


def executable() -> str | None:
    """Where Chromium or Chrome is, if it is anywhere."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page:
    """A loaded page: the addresses it asked for, what went wrong in its scripts, and what it looks like."""

    def __init__(self, socket: WebSocket):
        self.socket, self.sent = socket, 0
        self.events: list[dict] = []

    def call(self, method: str, **params: Any) -> dict:
        """Send a command and return its result; what the page reports meanwhile is kept."""
        self.sent += 1
        self.socket.send(json.dumps({"id": self.sent, "method": method, "params": params}))
        while True:
            message = json.loads(self.socket.recv())
            if message.get("id") == self.sent:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                return message["result"]
            self.events.append(message)

    def settle(self, quiet: float = 0.5) -> None:
        """Wait until the page has reported nothing for `quiet` seconds."""
        self.socket.settimeout(quiet)
        try:
            while True:
                self.events.append(json.loads(self.socket.recv()))
        except WebSocketTimeoutException:
            self.socket.settimeout(30)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression in the page; a promise is waited for."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"]["exception"]["description"])
        return result["result"].get("value")

    @property
    def requests(self) -> list[str]:
        """Every address that the page asked for, in order."""
        return [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]

    @property
    def errors(self) -> list[str]:
        """Exceptions in scripts, and answers that were no success."""
        thrown = [e["params"]["exceptionDetails"] for e in self.events if e["method"] == "Runtime.exceptionThrown"]
        answers = [e["params"]["response"] for e in self.events if e["method"] == "Network.responseReceived"]
        return [d.get("exception", {}).get("description", d["text"]) for d in thrown] + [
            f"{a['status']} {a['url']}" for a in answers if a["status"] >= 400]

    def screen(self, width: int, height: int) -> None:
        """Give the page a screen of so many CSS pixels; below 600 wide it is a phone's."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                  mobile=width < 600)

    def picture(self, path: Path) -> None:
        """Write a PNG of the whole page, on a screen as long as the page."""
        self.screen(self.run("innerWidth"), self.run("document.documentElement.scrollHeight"))
        self.settle()
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


class Browser:
    """One browser with a profile of its own, ended with the block."""

    def __init__(self, program: str):
        self.program = program
        self.page: Page | None = None

    def __enter__(self) -> "Browser":
        self.profile = tempfile.TemporaryDirectory(prefix="shardlab-chromium-", ignore_cleanup_errors=True)
        self.process = subprocess.Popen([self.program, *FLAGS, f"--user-data-dir={self.profile.name}"],
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        port = Path(self.profile.name, "DevToolsActivePort")
        for _ in range(600):
            if port.exists() and len(port.read_text().split()) == 2:
                break
            time.sleep(0.05)
        self.port, path = port.read_text().split()
        self.control = self.connect(path)
        return self

    def connect(self, path: str) -> Page:
        """A connection to the browser itself, or to one of its pages."""
        return Page(create_connection(f"ws://127.0.0.1:{self.port}{path}", timeout=30, suppress_origin=True))

    def __exit__(self, *_: object) -> None:
        if self.page:
            self.page.socket.close()
        self.control.call("Browser.close")
        self.process.wait(timeout=30)
        self.control.socket.close()
        self.profile.cleanup()

    def open(self, url: str, width: int = 1280, height: int = 900, dark: bool = False) -> Page:
        """Load `url` in a new window and wait until it is quiet. The page that was open before is closed."""
        if self.page:
            self.page.call("Page.close")
            self.page.socket.close()
        target = self.control.call("Target.createTarget", url="about:blank")["targetId"]
        self.page = page = self.connect(f"/devtools/page/{target}")
        for domain in ("Page", "Network", "Runtime"):
            page.call(f"{domain}.enable")
        page.screen(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        page.call("Page.navigate", url=url)
        page.settle()
        page.run("document.fonts.ready.then(() => window.MathJax?.startup?.promise).then(() => true)")
        page.settle()
        return page

"""A headless Chromium, driven over its debugging protocol (Chrome DevTools Protocol 1.3)."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def browser_path() -> str | None:
    """Returns the path of a browser; None: there is none."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


class PageError(AssertionError):
    """The page's script raised."""


class Page:
    """One tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse):
        self.problems: list[str] = []
        """Exceptions, errors on the console, and violations of the Content-Security-Policy."""
        self.requests: list[str] = []
        """URLs of all requests."""
        self._socket = socket
        self._loaded = asyncio.Event()
        self._ids = itertools.count(1)
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            body = json.loads(message.data)
            if (number := body.get("id")) in self._replies:
                self._replies.pop(number).set_result(body)
            self._note(body.get("method", ""), body.get("params", {}))

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            entry = params["entry"]
            if entry["source"] != "network":  # a 401 is what a test wants to see
                self.problems.append(entry["text"])
        elif method == "Page.loadEventFired":
            self._loaded.set()
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command of the protocol."""
        number = next(self._ids)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        body = await asyncio.wait_for(reply, 60)
        if "error" in body:
            raise PageError(f"{method}: {body['error']}")
        return body["result"]

    async def run(self, script: str) -> Any:
        """The value of an expression of JavaScript, awaited."""
        found = await self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if details := found.get("exceptionDetails"):
            raise PageError(details.get("exception", {}).get("description", details["text"]))
        return found["result"].get("value")

    async def until(self, script: str, seconds: float = 30.0) -> Any:
        """Waits until an expression is true; its value."""
        deadline = time.monotonic() + seconds
        while not (value := await self.run(script)):
            if time.monotonic() > deadline:
                text = await self.run("document.body.innerText")
                raise AssertionError(f"not within {seconds} s: {script}\n{self.problems}\n{text}")
            await asyncio.sleep(0.05)
        return value

    async def open(self, url: str) -> None:
        self._loaded.clear()
        await self.call("Page.navigate", url=url)
        await asyncio.wait_for(self._loaded.wait(), 60)

    async def click(self, selector: str) -> None:
        await self.until(f"!!document.querySelector({json.dumps(selector)})")
        await self.run(f"document.querySelector({json.dumps(selector)}).click()")

    async def type(self, selector: str, text: str) -> None:
        await self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        await self.call("Input.insertText", text=text)

    async def press(self, name: str, code: int) -> None:
        """A key, by its name and Windows key code."""
        text = {"Enter": "\r"}.get(name, "")
        common = {"key": name, "code": name, "windowsVirtualKeyCode": code}
        await self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    async def shape(self, width: int, height: int, *, dark: bool = False, scale: int = 1) -> None:
        """The size of the window and the colours that its user prefers."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def picture(self, path: Path) -> None:
        """What the window shows, as WebP."""
        found = await self.call("Page.captureScreenshot", format="webp", quality=82)
        path.write_bytes(base64.b64decode(found["data"]))


@asynccontextmanager
async def browser() -> AsyncGenerator[Page]:
    """A page of a browser that nobody used before."""
    path = browser_path()
    assert path is not None
    with tempfile.TemporaryDirectory() as folder:
        process = await asyncio.create_subprocess_exec(
            *(path, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *("--remote-debugging-port=0", f"--user-data-dir={folder}", "--no-first-run"),
            *("--disable-background-networking", "--disable-dev-shm-usage", "about:blank"),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            async with aiohttp.ClientSession() as session:
                url = await _page_url(session, Path(folder) / "DevToolsActivePort")
                async with session.ws_connect(url, max_msg_size=0) as socket:
                    page = Page(socket)
                    for domain in ("Page", "Runtime", "Log", "Network"):
                        await page.call(f"{domain}.enable")
                    yield page
        finally:
            process.kill()
            await process.wait()
            await asyncio.sleep(0.2)  # its children let go of the folder


async def _page_url(session: aiohttp.ClientSession, ports: Path) -> str:
    async with asyncio.timeout(60):
        while not ports.exists() or not ports.read_text().strip():
            await asyncio.sleep(0.05)
        port = int(ports.read_text().splitlines()[0])
        while True:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as reply:
                for target in await reply.json():
                    if target["type"] == "page":
                        return target["webSocketDebuggerUrl"]
            await asyncio.sleep(0.05)

"""The engine's page in a browser under load, and the documentation's pictures.

`PICTURES=docs/figures` writes them there (`test_pictures`).
"""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import aiohttp
import pytest

from tests.e2e.browser import browser, browser_path
from tests.e2e.chat_page import DONE, LAST, say, settings
from tests.e2e.process import Server, read_until, start

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(browser_path() is None, reason="no chromium is installed"),
]


async def load(url: str, streams: int, stop: asyncio.Event) -> None:
    """Streams of all sizes, some of which begin alike."""
    begin = "Once upon a time there was a scheduler that let nobody starve. " * 4

    async def one(session: aiohttp.ClientSession, number: int) -> None:
        chance = random.Random(number)
        while not stop.is_set():
            words = " ".join(
                chance.choices(("sky", "red", "cat", "runs"), k=chance.choice((9, 90)))
            )
            body = {
                "prompt": begin * (number % 2) + words,
                "max_tokens": chance.choice((16, 48)),
                "ignore_eos": True,
            }
            async with session.post(f"{url}/v1/completions", json=body) as reply:
                assert reply.status == 200
                await reply.read()

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(one(session, number) for number in range(streams)))


async def test_the_engine_is_seen_at_work_under_64_streams() -> None:
    with Server() as server:
        stop = asyncio.Event()
        loading = asyncio.create_task(load(server.url, 64, stop))
        async with browser() as page:
            await page.shape(1280, 1500)
            await page.open(f"{server.url}/ui/engine")
            tile = "document.querySelector('.tile:nth-child({}) .value')?.textContent"
            await page.until(f"parseFloat({tile.format(3)}) > 0", 60)
            await page.until(f"parseFloat({tile.format(1)}) > 0", 60)
            await page.until(
                "document.getElementById('strip-text').textContent.startsWith('Bucket of')", 60
            )
            await page.until("document.querySelectorAll('#strip > i').length > 0")
            await page.until("/[1-9]/.test(document.getElementById('pages-text').textContent)", 60)
            await page.until("/median/.test(document.getElementById('ttft-text').textContent)", 60)
            await page.until("/median/.test(document.getElementById('tpot-text').textContent)", 60)
            await page.until("document.querySelectorAll('#times .dot').length > 0", 60)
            assert await page.run("document.querySelectorAll('#startup li').length") > 5
            drawn = (
                "(id => { const c = document.getElementById(id); return new Set("
                "c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size })"
            )
            for canvas in ("batch", "pages", "ttft", "tpot"):
                assert await page.run(f"{drawn}('{canvas}')") > 8, canvas
            await page.open(f"{server.url}/")  # and a chat beside it
            await say(page, "What is the capital of France?")
            await page.until(DONE, 120)
            assert "Paris" in await page.run(f"{LAST}.textContent")
            assert page.problems == []
        stop.set()
        await loading
        assert server.process.poll() is None


@pytest.mark.timeout(900)
@pytest.mark.skipif("PICTURES" not in os.environ, reason="PICTURES names no folder for them")
async def test_pictures() -> None:
    """Of the embedded model on this machine, with the default buckets and 40 streams."""
    folder = Path(os.environ["PICTURES"])
    process = start()
    stop = asyncio.Event()
    try:
        url = (await asyncio.to_thread(read_until, process, r"is ready: \S+ at (http\S+)/v1"))[1]
        async with browser() as page:
            await page.shape(1200, 720)
            await page.open(f"{url}/")
            await settings(page, logprobs=True, temperature="1", seed="7")
            for text in ("What can you do?", "Which is larger, 12 or 7?"):
                await say(page, text)
                await page.until("document.querySelector('#send').ariaLabel === 'Stop'")
                await page.until("document.querySelector('#send').ariaLabel === 'Send'", 120)
            await page.run(
                "[...document.querySelectorAll('.actions button')]"
                ".filter(each => each.textContent === 'Tokens').at(-1).click()"
            )
            unsure = (
                "[...document.querySelectorAll('.token')]"
                ".sort((a, b) => b.style.getPropertyValue('--doubt')"
                " - a.style.getPropertyValue('--doubt'))[0]"
            )
            await page.run(f"{unsure}.scrollIntoView({{block: 'center'}}); {unsure}.focus()")
            await asyncio.sleep(0.5)
            await page.picture(folder / "page_chat.webp")
            await page.shape(390, 760, dark=True)
            await asyncio.sleep(0.5)
            await page.run("document.querySelector('.skip').focus(); document.activeElement.blur()")
            await page.picture(folder / "page_phone.webp")
            loading = asyncio.create_task(load(url, 40, stop))
            await page.shape(1200, 1560, dark=True)
            await page.open(f"{url}/ui/engine")
            await asyncio.sleep(62)
            await page.picture(folder / "page_engine.webp")
            stop.set()
            await loading
    finally:
        process.kill()
        process.communicate()

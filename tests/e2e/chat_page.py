"""The chat's page, as a test uses it."""

from __future__ import annotations

import json
from typing import Any

from tests.e2e.browser import Page

ENTER, ESCAPE, RIGHT, TAB = ("Enter", 13), ("Escape", 27), ("ArrowRight", 39), ("Tab", 9)
READY = "document.getElementById('model')?.options.length > 0"
DONE = "!!document.querySelector('.message.assistant:last-child .actions')"
LAST = "document.querySelector('.message.assistant:last-child')"


async def say(page: Page, text: str) -> None:
    await page.until(READY)
    await page.type("#prompt", text)
    await page.press(*ENTER)


async def settings(page: Page, **values: Any) -> None:
    """As somebody has left them."""
    await page.until(READY)
    kept = json.dumps(json.dumps({"thinking": True, **values}))
    await page.run(f"localStorage.setItem('jaxserve.settings', {kept})")
    await page.open(await page.run("location.href"))
    await page.until(READY)

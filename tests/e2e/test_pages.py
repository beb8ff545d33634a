"""The pages in a browser: Chromium, where it is installed (`apt-get install chromium`).

axe-core (`npm install axe-core`) looks for faults that keep people out; `AXE_CORE` names its
`axe.min.js` if it is not in `node_modules`.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from jaxserve.api import EngineFailed, Request
from jaxserve.server.access import digest
from tests.e2e.browser import Page, browser, browser_path
from tests.e2e.chat_page import DONE, ENTER, ESCAPE, LAST, READY, RIGHT, TAB, say, settings
from tests.e2e.process import ROOT
from tests.fakes import CALL, END_CALL, END_THINK, IM_END, THINK, FakeEngine
from tests.server.conftest import serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(browser_path() is None, reason="no chromium is installed"),
]

MARKDOWN = """\
# Title
Some *emphasis*, **weight**, `code` and a [link](https://example.com/a?b=c).

1. one
2. two
   - inner

> quoted

| a | b |
|---|---|
| 1 | 2 |

```python
def f(x):  # why
    return "s" + str(12)
```
"""
HOSTILE = """\
<img src=x onerror="window.hurt=1"><script>window.hurt=2</script><svg onload="window.hurt=3">
[a](javascript:window.hurt=4) [b](data:text/html,<script>hurt</script>) ![c](http://127.0.0.1:9/c.png)
<iframe src="http://127.0.0.1:9/"></iframe> <a href="javascript:window.hurt=5">d</a>
[e](https://example.com/"onmouseover="window.hurt=6) **<b onclick=hurt>bold</b>**

```html" onload="window.hurt=7
</code></pre><script>window.hurt=8</script>
```

<style>body{display:none}</style>
"""


@asynccontextmanager
async def chatting(engine: FakeEngine, **settings: Any) -> AsyncGenerator[tuple[Page, str]]:
    """The chat page of a server with this engine, and the server's URL."""
    async with serving(engine, **settings) as url, browser() as page:
        await page.shape(1280, 860)
        await page.open(f"{url}/")
        yield page, url
        assert page.problems == []
        assert [each for each in page.requests if not each.startswith((url, "data:"))] == []


async def test_a_chat_streams_and_is_rendered_and_kept() -> None:
    step = asyncio.Semaphore(0)
    script = [THINK, *b"let me see", END_THINK, *MARKDOWN.encode(), IM_END]
    async with chatting(FakeEngine(script, step=step, cached_tokens=5)) as (page, url):
        await say(page, "Show me <b>everything</b>")
        for _ in range(8):
            step.release()
        await page.until(f"{LAST}?.textContent.includes('Thinking')")
        assert await page.run(f"{LAST}.getAttribute('aria-busy')") == "true"
        for _ in range(1000):
            step.release()
        await page.until(DONE)
        assert await page.run("document.querySelector('.user .said').innerHTML") == (
            "Show me &lt;b&gt;everything&lt;/b&gt;"
        )
        found = await page.run(f"{LAST}.querySelector('.text').innerHTML")
        for part in (
            "<h3>Title</h3>",
            "<em>emphasis</em>",
            "<strong>weight</strong>",
            "<code>code</code>",
            'href="https://example.com/a?b=c"',
            'rel="noopener noreferrer nofollow"',
            "<ol><li>one</li><li>two<ul><li>inner</li></ul></li></ol>",
            "<blockquote><p>quoted</p></blockquote>",
            "<th>a</th><th>b</th>",
            "<td>1</td><td>2</td>",
            '<span class="k">def</span> f(x):  <span class="c"># why</span>',
            '<span class="s">"s"</span>',
        ):
            assert part in found, (part, found)
        thought = f"{LAST}.querySelector('details')"
        assert await page.run(f"{thought}.open") is False
        assert await page.run(f"{thought}.lastChild.textContent") == "let me see"
        assert "5 of them cached" in await page.run(f"{LAST}.querySelector('.stats').textContent")
        await page.open(f"{url}/")  # another visit
        await page.until(DONE)
        assert await page.run(f"{LAST}.querySelector('.text').innerHTML") == found
        await page.click("#new")
        assert await page.run("document.querySelectorAll('#list li').length") == 2
        await page.click("#list li:nth-child(2) .delete")
        assert await page.run("document.querySelectorAll('#list li').length") == 1


async def test_an_answer_can_be_stopped_and_asked_for_again() -> None:
    engine = FakeEngine(b"Hello", hang=True)
    async with chatting(engine) as (page, _):
        await say(page, "Hi")
        await page.until(f"{LAST}?.textContent.includes('Hello')")
        await page.press(*ESCAPE)
        await page.until(DONE)
        assert "stopped" in await page.run(f"{LAST}.textContent")
        await asyncio.wait_for(engine.aborted.wait(), 5)
        await page.run(
            "[...document.querySelectorAll('.actions button')]"
            ".find(each => each.textContent === 'Again').click()"
        )
        await page.until("document.getElementById('send').ariaLabel === 'Stop'")
        await page.until(f"{LAST}?.textContent.includes('Hello')")
        await page.click("#send")
        await page.until(DONE)
        assert await page.run("document.querySelectorAll('.message.assistant').length") == 1
        assert len(engine.requests) == 2


async def test_a_server_with_keys_asks_for_one() -> None:
    key = {"api_key_digests": (digest("secret-key"),)}
    async with chatting(FakeEngine(b"Welcome"), **key) as (page, _):
        await page.until("!!document.querySelector('#key[open]')")
        await page.type("#key-input", "wrong")
        await page.press(*ENTER)
        await page.until("document.getElementById('key-why')?.textContent.includes('not one of')")
        await page.type("#key-input", "secret-key")
        await page.press(*ENTER)
        await say(page, "Hi")
        await page.until(DONE)
        assert "Welcome" in await page.run(f"{LAST}.textContent")
        assert await page.run("localStorage.getItem('jaxserve.key')") is None, "it was not asked to"
        await page.click("#show-request")
        code = await page.run("document.getElementById('request-code').textContent")
        assert "$JAXSERVE_API_KEY" in code and "secret-key" not in code
        await page.click("#as-python")
        code = await page.run("document.getElementById('request-code').textContent")
        assert 'os.environ["JAXSERVE_API_KEY"]' in code and "secret-key" not in code
        compile(code, "shown", "exec")


async def test_who_gives_no_key_is_asked_again_with_the_next_message_only() -> None:
    key = {"api_key_digests": (digest("secret-key"),)}
    async with chatting(FakeEngine(b"Welcome"), **key) as (page, _):
        await page.until("!!document.querySelector('#key[open]')")
        await page.press(*ESCAPE)
        await page.until("document.getElementById('phase').textContent === 'needs an API key'")
        await asyncio.sleep(4)
        assert await page.run("!document.querySelector('#key')")
        await page.type("#prompt", "Hi")
        await page.press(*ENTER)
        await page.until("!!document.querySelector('#key[open]')")
        await page.type("#key-input", "secret-key")
        await page.press(*ENTER)
        await page.until(DONE)
        assert "Welcome" in await page.run(f"{LAST}.textContent")
        await page.until(READY)
        assert await page.run("document.getElementById('phase').textContent") == "ready"


async def test_a_start_is_shown_while_it_lasts() -> None:
    engine = FakeEngine(b"Welcome")
    engine.phase = "compiling"
    async with chatting(engine) as (page, _):
        await page.until("document.getElementById('phase').textContent === 'compiling 50 %'")
        engine.phase = "serving"
        await page.until("document.getElementById('phase').textContent === 'ready'")
        await page.until(READY)


async def test_what_goes_wrong_is_said() -> None:
    engine = FakeEngine(b"Hello there", fail_after=5, failure=EngineFailed)
    async with chatting(engine) as (page, _):
        await say(page, "Hi")
        await page.until("!!document.querySelector('.message .error')")
        assert "Hello" in await page.run(f"{LAST}.textContent")
        assert await page.run("document.getElementById('send').ariaLabel") == "Send"
        await settings(page, tools="[{]")
        await say(page, "again")
        await page.until("!document.getElementById('settings-error').hidden")
        assert "not JSON" in await page.run("document.getElementById('settings-error').textContent")


async def test_what_a_model_writes_does_nothing() -> None:
    long = "x" * 20_000
    script = [*HOSTILE.encode(), *long.encode(), IM_END]
    engine = FakeEngine(script, max_model_len=100_000)
    async with chatting(engine) as (page, url):
        await say(page, "Hi")
        await page.until(DONE, 60)
        assert await page.run("window.hurt") is None
        tags = await page.run(
            f"[...new Set([...{LAST}.querySelectorAll('.text *')].map(each => each.localName))]"
        )
        assert set(tags) <= {"p", "a", "strong", "code", "pre", "div", "span", "button"}
        links = await page.run(f"[...{LAST}.querySelectorAll('a')].map(each => each.href)")
        assert all(
            link.startswith(("http://127.0.0.1:9/", "https://example.com/")) for link in links
        )
        attributes = await page.run(
            f"[...{LAST}.querySelectorAll('.text a')].flatMap(each => each.getAttributeNames())"
        )
        assert set(attributes) <= {"href", "target", "rel", "title"}
        text = await page.run(f"{LAST}.querySelector('.text').textContent")
        assert "<script>window.hurt=2</script>" in text and long in text
        width = "document.documentElement.scrollWidth <= innerWidth"
        assert await page.run(width), "a long line does not make the page wider"
        assert all(each.startswith(url) for each in page.requests)
        marks = [
            "*" * 60_000,
            "`" * 60_000,
            "[" * 60_000,
            "> " * 20_000,
            "- " * 20_000,
            "_a " * 20_000,
            "|" * 50_000,
            "```c\n" + '"\\' * 30_000,
            "```c\n" + "/*" * 19_000,
        ]
        for text in marks:
            spent = await page.run(
                "import('/ui/markdown.js').then(({render}) => {"
                f"  const began = performance.now(); const box = document.createElement('div');"
                f"  render(box, {json.dumps(text)}); return performance.now() - began}})"
            )
            assert spent < 3000, (text[:10], spent)


async def test_a_call_of_a_tool_is_shown_and_answered() -> None:
    call = b'\n{"name": "weather", "arguments": {"city": "Paris"}}\n'

    def script(request: Request) -> list[int]:
        if b"12 degrees" in bytes(each for each in request.prompt if each < 256):
            return [*b"It is cold.", IM_END]
        return [CALL, *call, END_CALL, IM_END]

    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    async with chatting(FakeEngine(script)) as (page, _):
        await settings(page, tools=json.dumps([tool]))
        await say(page, "How is the weather?")
        await page.until(DONE)
        assert await page.run(f"{LAST}.querySelector('.call b').textContent") == "weather"
        shown = await page.run(f"{LAST}.querySelector('.call pre').textContent")
        assert json.loads(shown) == {"city": "Paris"}
        await page.type(".call textarea", "12 degrees")
        await page.click(".call button")
        await page.until(f"{LAST}?.textContent.includes('It is cold.')")
        assert await page.run("document.querySelector('.tool .said').textContent") == "12 degrees"


async def test_tokens_are_shown_with_their_alternatives_by_keyboard_too() -> None:
    async with chatting(FakeEngine([*b"Hey", IM_END])) as (page, _):
        await settings(page, logprobs=True)
        await say(page, "Hi")
        await page.until(DONE)
        await page.run(
            "[...document.querySelectorAll('.actions button')]"
            ".find(each => each.textContent === 'Tokens').click()"
        )
        assert await page.run(
            "[...document.querySelectorAll('.token')].map(t => t.textContent)"
        ) == [*"Hey"]
        await page.run("document.querySelector('.token').focus()")
        await page.press(*RIGHT)
        assert await page.run("document.activeElement.textContent") == "e"
        assert await page.run("document.getElementById('alternatives').matches(':popover-open')")
        label = await page.run("document.activeElement.ariaLabel")
        assert label.startswith('"e", ') and "%" in label


async def accessible(page: Page) -> None:
    """axe-core finds no serious fault on the page as it stands."""
    file = Path(os.environ.get("AXE_CORE", ROOT / "node_modules" / "axe-core" / "axe.min.js"))
    if not file.is_file():
        pytest.skip("axe-core is not installed: npm install axe-core, or AXE_CORE=FILE")
    await page.run(file.read_text() + "; undefined")
    found = await page.run(
        "axe.run().then(({violations}) => violations.filter(({impact}) => "
        "['serious', 'critical', 'moderate'].includes(impact)).map(({id, nodes}) => "
        "[id, nodes.map(({html, failureSummary}) => html + ' ' + failureSummary)]))"
    )
    assert found == [], json.dumps(found, indent=1)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
async def test_nobody_is_kept_out(width: int, dark: bool) -> None:
    engine = FakeEngine([THINK, *b"hm", END_THINK, *MARKDOWN.encode(), IM_END])
    async with chatting(engine) as (page, url):
        await page.shape(width, 900, dark=dark)
        await page.until(READY)
        await accessible(page)
        await settings(page, logprobs=True)
        await say(page, "Hi")
        await page.until(DONE)
        await accessible(page)
        assert await page.run("document.documentElement.scrollWidth <= innerWidth")
        for button in ("#show-settings", "#show-request"):
            await page.click(button)
            await accessible(page)
            await page.press(*ESCAPE)
        await page.open(f"{url}/ui/engine")
        await page.until("document.querySelectorAll('.tile').length > 0")
        await accessible(page)
        assert await page.run("document.documentElement.scrollWidth <= innerWidth")


async def test_keys_alone_are_enough() -> None:
    async with chatting(FakeEngine([*b"Hey", IM_END])) as (page, _):
        await page.until(READY)
        reached: set[str] = set()
        await page.run("document.activeElement.blur()")
        for _ in range(24):
            await page.press(*TAB)
            reached.add(
                await page.run("document.activeElement.id || document.activeElement.localName")
            )
            outline = await page.run(
                "['prompt', ''].includes(document.activeElement.id) ? 'elsewhere' : "
                "getComputedStyle(document.activeElement).outlineStyle"
            )
            assert outline != "none"
        assert reached >= {
            "new",
            "model",
            "show-request",
            "show-settings",
            "theme",
            "prompt",
            "send",
        }

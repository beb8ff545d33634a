"""Grammars that crash, hang or swell what compiles them: the server goes on, and so do others."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.process import FEW_BUCKETS, finish, read_until, run, start

type Body = dict[str, Any]


def linked(count: int) -> Body:
    definitions = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return {"$defs": {**definitions, f"d{count}": {"type": "null"}}, "$ref": "#/$defs/d0"}


def multiple(number: int) -> Body:
    return {"type": "integer", "multipleOf": number}


TOOL = {"name": "f", "parameters": {"properties": {"n": multiple(99999787)}}}
HOSTILE: dict[str, Body] = {
    "references": {"guided_json": linked(2500)},
    "rules": {
        "guided_grammar": "start: r0\n"
        + "".join(f"r{i}: r{i + 1}\n" for i in range(5000))
        + 'r5000: "a"'
    },
    "gbnf": {"guided_grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000},
    "a multiple": {"guided_json": multiple(99999989)},
    "another multiple": {"guided_json": multiple(99999971)},
    "a tool": {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"},
    "expressions": {
        "guided_json": {
            "allOf": [{"type": "string", "pattern": f"^.*a{{{i}}}.{{9}}$"} for i in range(1, 301)]
        }
    },
}


def body(fields: Body) -> Body:
    message = {"role": "user", "content": "Hi"}
    return {"messages": [message], "max_tokens": 2, "reasoning_effort": "none", **fields}


async def chat(session: aiohttp.ClientSession, url: str, fields: Body) -> tuple[int, Any, float]:
    begun = time.monotonic()
    async with session.post(f"{url}/v1/chat/completions", json=body(fields)) as reply:
        if reply.status == 503:
            assert "Retry-After" in reply.headers
        return reply.status, await reply.json(), time.monotonic() - begun


def memory(pid: int) -> int:
    """MiB that are resident."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


@pytest.mark.slow  # what they do takes a minute of a processor
async def test_others_are_answered_and_the_process_is_the_same() -> None:
    process = start(*FEW_BUCKETS)
    try:
        url = (await asyncio.to_thread(read_until, process, r"listening on (http[^;\s]+)"))[1]
        await asyncio.to_thread(read_until, process, "ready after")
        async with aiohttp.ClientSession() as session:
            assert (await chat(session, url, {"guided_choice": ["yes"]}))[0] == 200
            before = memory(process.pid)
            hostile = {
                name: asyncio.create_task(chat(session, url, fields))
                for name, fields in HOSTILE.items()
            }
            others: list[float] = []
            while not all(task.done() for task in hostile.values()):
                number = len(others)
                status, answer, seconds = await chat(session, url, {"guided_regex": f"{number}!"})
                assert status == 200 and answer["choices"][0]["message"]["content"]
                others.append(seconds)
            outcomes = {name: task.result() for name, task in hostile.items()}
            table = {name: (status, took) for name, (status, _, took) in outcomes.items()}
            assert {status for status, _ in table.values()} <= {200, 400, 503}, table
            assert all(took < 45 for _, took in table.values()), table
            assert outcomes["gbnf"][0] == 400
            for name in ("a multiple", "another multiple", "expressions", "a tool"):
                status, answer, _ = outcomes[name]
                assert status == 503 or answer["error"]["code"] == "invalid_grammar", answer
            assert max(others) < 5, others
            assert memory(process.pid) < before + 100
            assert process.poll() is None
            status, answer, _ = await chat(session, url, {"guided_choice": ["yes"]})
            assert answer["choices"][0]["message"]["content"] == "yes"
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_server_ends_cleanly_while_a_grammar_is_compiled(number: signal.Signals) -> None:
    """Signals to all its processes, as a terminal or a service manager sends them, too."""
    process = run("-m", "jaxserve", "--port", "0", *FEW_BUCKETS, before="import os; os.setsid()")
    try:
        url = (await asyncio.to_thread(read_until, process, r"listening on (http[^;\s]+)"))[1]
        await asyncio.to_thread(read_until, process, "ready after")
        async with aiohttp.ClientSession() as session:
            assert (await chat(session, url, {"guided_choice": ["yes"]}))[0] == 200
            compiling = asyncio.create_task(chat(session, url, HOSTILE["a multiple"]))
            await asyncio.sleep(1.5)
            os.killpg(process.pid, number)
            status, output = await asyncio.to_thread(finish, process, timeout=10)
            answered, answer, _ = await compiling
    finally:
        process.kill()
        process.communicate()  # returns once no process holds its output any more
    assert status == 0 and "Traceback" not in output, output
    assert answered == 503, json.dumps(answer)

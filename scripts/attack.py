"""Sends harmful requests to a server of your own, and prints a table of the outcomes.

    python scripts/attack.py http://127.0.0.1:8000 --json outcomes.json

Each case (scripts/attack_cases.py) has a bounded number of requests and a time limit. After each
case the server must be healthy and answer an ordinary request. At the end it must be the same
process, its memory may have grown by at most --max-growth, and it must give the same answer as
before. Otherwise the exit status is 1.

Memory is read from /metrics. With --pid, the memory of the process and its children is checked too;
it may also grow by the cache of compiled grammars. Addresses other than loopback need --not-local:
attack other people's servers only with their permission.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import ipaddress
import json
import re
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
from attack_cases import CASES, CHAT, COMPLETIONS, Case, Outcome, Target, chat

CASE_SECONDS = 240.0
KEPT_GRAMMARS_MB = 135.0
"""The most memory of compiled grammars: `CACHE_BYTES` of `jaxserve.structured.guides`."""
QUESTION = chat("What is the capital of France?", temperature=0, seed=1)
ORDINARY: tuple[tuple[str, dict[str, Any]], ...] = (
    (CHAT, QUESTION),
    (CHAT, chat(response_format={"type": "json_object"})),
    (COMPLETIONS, {"prompt": "a b " * 1000, "max_tokens": 1}),
    ("/tokenize", {"prompt": "a b " * 100_000}),
)
"""Requests sent before memory is first measured: the first request of each kind allocates memory
that the server keeps."""


class Row(NamedTuple):
    """The outcomes of a case."""

    name: str
    outcomes: dict[str, int]
    longest: float
    """Seconds until the last answer."""
    well: bool
    """Whether all outcomes are allowed, and the server was healthy afterwards."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000")
    parser.add_argument(
        "--pid", type=int, help="the server's process: check its children's memory, too"
    )
    parser.add_argument("--api-key", help="if the server requires one")
    parser.add_argument("--only", default="", help="run only cases whose names match this pattern")
    parser.add_argument(
        "--patience",
        type=float,
        default=180.0,
        help="seconds for clients that never read; more than the server's --write-timeout",
    )
    parser.add_argument("--max-growth", type=float, default=100.0, help="MB")
    parser.add_argument("--json", type=Path, help="also write the outcomes here")
    parser.add_argument(
        "--not-local", action="store_true", help="allow a server on another machine"
    )
    args = parser.parse_args()
    if not args.not_local and not _is_local(args.url):
        parser.error(f"{args.url} is not this machine; if it is your own server, add --not-local")
    return asyncio.run(_run(args))


def _is_local(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def _run(args: argparse.Namespace) -> int:
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        url = args.url.rstrip("/")
        target = Target(url=url, session=session, headers=headers, patience=args.patience)
        for path, body in ORDINARY:
            await target.post(path, body)
        before, answer = await _state(target, args.pid), await _answer(target)
        if answer is None:
            print(f"{url} does not answer an ordinary request", file=sys.stderr)
            return 2
        rows: list[Row] = []
        for case in (case for case in CASES if re.search(args.only, case.name)):
            rows.append(await _attack(target, case))
            _show(rows[-1])
        after = await _settled(target, args.pid, before["memory_mb"] + args.max_growth)
        growth = {what: after[what] - before[what] for what in ("memory_mb", "with_children_mb")}
        most = args.max_growth + KEPT_GRAMMARS_MB
        checks = {
            "same process": after["started"] == before["started"],
            f"memory within {args.max_growth:g} MB of before": (
                growth["memory_mb"] <= args.max_growth
            ),
            f"that of all processes within {most:g} MB": growth["with_children_mb"] <= most,
            "the same answer": await _answer(target) == answer,
            "every case": all(row.well for row in rows),
        }
    for what, title in (("memory_mb", "memory"), ("with_children_mb", "with all processes")):
        print(f"{title}: {before[what]:.0f} MB before, {after[what]:.0f} MB after")
    for what, holds in checks.items():
        print(f"{'yes' if holds else 'NO '}  {what}")
    if args.json:
        content = {"cases": [row._asdict() for row in rows], "before": before, "after": after}
        args.json.write_text(json.dumps({**content, "checks": checks}, indent=1) + "\n")
    return 0 if all(checks.values()) else 1


async def _attack(target: Target, case: Case) -> Row:
    begun = time.monotonic()
    try:
        async with asyncio.timeout(CASE_SECONDS):
            outcomes = await case.attack(target)
    except TimeoutError:
        outcomes = [Outcome("not over", time.monotonic() - begun)]
    except OSError as error:
        outcomes = [Outcome(type(error).__name__, time.monotonic() - begun)]
    counts = collections.Counter(outcome.what for outcome in outcomes)
    well = set(counts) <= set(case.allowed) and await _is_well(target)
    return Row(case.name, dict(counts), max(outcome.seconds for outcome in outcomes), well)


def _show(row: Row) -> None:
    counts = ", ".join(f"{number} x {what}" for what, number in row.outcomes.items())
    print(f"{'ok ' if row.well else 'NO '} {row.longest:7.2f} s  {row.name}: {counts}", flush=True)


async def _is_well(target: Target) -> bool:
    """Whether the server is ready, and answers an ordinary request."""
    try:
        async with asyncio.timeout(30), target.session.get(f"{target.url}/health") as reply:
            healthy = reply.status == 200
        return healthy and (await target.post(CHAT, QUESTION)).what == "200"
    except (aiohttp.ClientError, TimeoutError):
        return False


async def _answer(target: Target) -> str | None:
    """The answer to a fixed greedy request, which never changes."""
    headers = {"Content-Type": "application/json", **target.headers}
    try:
        async with target.session.post(
            target.url + CHAT, json={**QUESTION, "max_tokens": 16}, headers=headers
        ) as reply:
            return (await reply.json())["choices"][0]["message"]["content"]
    except (aiohttp.ClientError, KeyError):
        return None


async def _settled(target: Target, pid: int | None, enough: float) -> dict[str, float]:
    """Waits until memory falls below `enough` MB, or a time limit. Returns the state."""
    for _ in range(20):
        state = await _state(target, pid)
        if state["memory_mb"] <= enough:
            break
        await asyncio.sleep(0.5)
    return state


async def _state(target: Target, pid: int | None) -> dict[str, float]:
    try:
        memory = await target.metric("process_resident_memory_bytes") or 0.0
        started = await target.metric("process_start_time_seconds") or 0.0
    except aiohttp.ClientError:
        return {"memory_mb": float("inf"), "with_children_mb": float("inf"), "started": 0.0}
    with_children = 0 if pid is None else _memory_of(pid)
    return {
        "memory_mb": memory / 1e6,
        "with_children_mb": with_children / 1e6,
        "started": started,
    }


def _memory_of(pid: int) -> int:
    """Bytes of a process and all its children: the sum of proportional set sizes, which counts
    shared memory once."""
    try:
        told = Path(f"/proc/{pid}/smaps_rollup").read_text()
        children = [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except OSError:
        return 0
    kilobytes = next((line.split()[1] for line in told.splitlines() if line[:4] == "Pss:"), "0")
    return 1024 * int(kilobytes) + sum(map(_memory_of, children))


if __name__ == "__main__":
    sys.exit(main())

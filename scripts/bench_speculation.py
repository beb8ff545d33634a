"""Servers that verify drafts and that do not, in turns on one card: tokens per second, over HTTP.

    python scripts/bench_speculation.py --out speculation.json
    python scripts/bench_speculation.py --model qwen3-4b --clients 1,8,64,256 --seconds 5
    python scripts/bench_speculation.py --model /models/Qwen3-4B --text

Two servers start on the card, each with a share of its memory, one with `--speculative-config off`.
Then each point is measured with the one and with the other, `--rounds` times, a closed loop of
`--seconds` each. The servers' idle time costs the other nothing.

A model is only its shape, with weights whose greedy output is known beforehand
(`chain_checkpoint.py`): random weights fall into loops, which look like a success of looking up.
Its workloads are made, not found, and say so in their names:

- `made-edit`: the prompt holds the coming answer, with one token of 24 changed, as a file does
  that is edited.
- `made-fresh`: no token of the prompt helps.
- `made-misleading`: the prompt holds pieces of six tokens of the answer, each followed by
  something else. It is as bad for looking up as text can be.

With `--text` the model is a folder of real weights, and its chats are asked to repeat files of this
repository with a name changed (`text-edit`), and for short essays (`text-chat`).

`equal` is the share of answers that are the same with drafts as without, as far as both came. In
other shapes a step rounds differently, so near ties may differ.

With `--heads eagle3,dflash,dspark` no server starts: the steps of one engine are timed without a
head and with each, of random weights. Their ratio is what a head costs where nothing is accepted.

A card's first start compiles; these flags halve that:

    --flags "--decode-buckets 1,2,4,8,16,32,64,128,256 --prefill-buckets 64,256,1024,2048"
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import importlib.metadata
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import aiohttp
import chain_checkpoint
import head_costs
from speculation_workloads import MADE, TEXTS, body

from jaxserve.model_spec import ModelSpec
from jaxserve.models.registry import NAMED_MODELS, spec_of

ROOT = Path(__file__).parents[1]
ARMS = {"off": "off", "on": '{"method": "ngram"}'}
PACKAGES = ("jaxserve", "jax", "jaxlib", "triton", "jax-cuda12-plugin", "jax-cuda13-plugin")


def main() -> int:
    args = parse_args()
    if args.heads:
        return head_costs.report(about(), args)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        model = args.model
        if not args.text:
            model = str(args.weights or Path(folder) / "chain")
            chain_checkpoint.make(shape(args.model), Path(model))
        began = time.monotonic()
        urls = {name: stack.enter_context(served(model, name, args)) for name in ARMS}
        started = time.monotonic() - began
        points = asyncio.run(measure(urls, args))
    result = {
        **about(),
        "model": Path(args.model).name,
        "weights": "real" if args.text else "made: the next token follows from the last",
        "flags": args.flags,
        "start_s": round(started, 1),
        "points": points,
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def parse_args() -> argparse.Namespace:
    def sizes(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="qwen3-4b", help="a named shape, or a folder")
    add("--heads", default="", help="time the steps with these draft heads instead, see above")
    add("--text", action="store_true", help="real weights, see above")
    add("--weights", type=Path, help="where made weights are kept (default: nowhere)")
    add("--workloads", default=None, help="with commas between them (default: all)")
    add("--clients", type=sizes, default=[1, 8, 32, 64, 256])
    add("--prompt-tokens", type=int, default=512)
    add("--output-tokens", type=int, default=192)
    add("--seconds", type=float, default=4.0, help="of each round of each server at each point")
    add("--rounds", type=int, default=1)
    add("--budget", type=float, default=150.0, help="seconds in which new points are begun")
    add("--memory", type=float, default=0.44, help="share of the card of each server")
    add("--start-timeout", type=float, default=600.0)
    add("--flags", default="", help="further flags of both servers, in one word")
    add("--out", type=Path, help="write the result as JSON")
    return parser.parse_args()


def shape(model: str) -> ModelSpec:
    """Of a named model or a folder with config.json."""
    if model in NAMED_MODELS:
        return NAMED_MODELS[model]
    return spec_of(json.loads((Path(model) / "config.json").read_text(encoding="utf-8")))


def about() -> dict[str, Any]:
    """The card, its driver, the versions, and the commit."""

    def told(*command: str) -> str:
        with contextlib.suppress(OSError):
            found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
            return found.stdout.strip()
        return ""

    versions: dict[str, str] = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    query = ("--query-gpu=name,driver_version,power.limit", "--format=csv,noheader")
    return {
        "card": told("nvidia-smi", *query) or "none, on a CPU",
        "cores": os.cpu_count(),
        "versions": versions,
        "commit": told("git", "rev-parse", "HEAD") or "unknown",
        "changed_files": len(told("git", "status", "--porcelain").splitlines()),
        "date": time.strftime("%Y-%m-%d"),
    }


@contextlib.contextmanager
def served(model: str, arm: str, args: argparse.Namespace) -> Iterator[str]:
    """The address of a server that is ready; it ends with the block."""
    paths = os.pathsep.join(str(ROOT / part) for part in ("", "kernels", "checkpoints"))
    before = os.environ.get("PYTHONPATH")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([paths, *([before] * bool(before))])}
    command = [sys.executable, "-m", "jaxserve", "--model", model, "--port", "0"]
    command += ["--gpu-memory-utilization", str(args.memory), *args.flags.split()]
    command += ["--speculative-config", ARMS[arm], "--served-model-name", "served"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, text=True
        )
        try:
            yield _address(process, log, time.monotonic() + args.start_timeout, arm)
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()


def _address(process: subprocess.Popen[str], log: Any, deadline: float, arm: str) -> str:
    while time.monotonic() < deadline and process.poll() is None:
        log.seek(0)
        text = log.read()
        if found := re.search(r"is ready: \S+ at (http\S+)/v1", text):
            times = re.search(r"step times, .*", text)
            print(f"{arm}: {times[0] if times else 'ready'}", flush=True)
            return found[1]
        time.sleep(0.25)
    log.seek(0)
    raise SystemExit(f"the server ({arm}) did not become ready:\n{log.read()[-4000:]}")


async def measure(urls: dict[str, str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """All points until the budget is spent, the cheapest first."""
    names = args.workloads.split(",") if args.workloads else list(TEXTS if args.text else MADE)
    timeout = aiohttp.ClientTimeout(total=120)
    connector = aiohttp.TCPConnector(limit=0)
    points: list[dict[str, Any]] = []
    end = time.monotonic() + args.budget
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        for url in urls.values():  # what is slow once
            await drive(session, url, names[0], 2, 0.5, args, seed="warm")
        for clients, name in itertools.product(args.clients, names):
            if time.monotonic() > end:
                print(f"the budget is spent: {name} of {clients} clients and more are left out")
                break
            point = await compare(session, urls, name, clients, args)
            print(line(point), flush=True)
            points.append(point)
    return points


async def compare(
    session: aiohttp.ClientSession,
    urls: dict[str, str],
    name: str,
    clients: int,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """One point: the servers in turns, with the same requests in each round."""
    rounds: dict[str, list[Run]] = {arm: [] for arm in urls}
    for number in range(args.rounds):
        order = list(urls) if number % 2 == 0 else list(urls)[::-1]
        for arm in order:
            seed = f"{name}/{clients}/{number}"
            run = await drive(session, urls[arm], name, clients, args.seconds, args, seed=seed)
            rounds[arm].append(run)
    answers = [
        {(number, key): text for number, run in enumerate(runs) for key, text in run.texts.items()}
        for runs in rounds.values()
    ]
    pairs = [(answers[0][key], answers[-1][key]) for key in answers[0].keys() & answers[-1].keys()]
    pairs = [(one[: len(other)], other[: len(one)]) for one, other in pairs if one and other]
    return {
        "workload": name,
        "clients": clients,
        "prompt_tokens": args.prompt_tokens,
        "output_tokens": args.output_tokens,
        "temperature": 0,
        **{arm: summary(runs) for arm, runs in rounds.items()},
        "speedup": rate(rounds["on"]) / max(rate(rounds["off"]), 1e-9),
        "compared": len(pairs),
        "equal": sum(one == other for one, other in pairs) / max(len(pairs), 1),
    }


@dataclasses.dataclass
class Run:
    """A round of one server."""

    seconds: float = 0.0
    """In which the counters counted: the last three quarters of the round."""
    ttft: list[float] = dataclasses.field(default_factory=list)
    gaps: list[float] = dataclasses.field(default_factory=list)
    """Seconds between two events of a stream; an event may have several tokens."""
    texts: dict[int, str] = dataclasses.field(default_factory=dict)
    """Answers, some of them cut off, by the request's number."""
    errors: list[str] = dataclasses.field(default_factory=list)
    counters: dict[str, float] = dataclasses.field(default_factory=dict)


async def drive(
    session: aiohttp.ClientSession,
    url: str,
    name: str,
    clients: int,
    seconds: float,
    args: argparse.Namespace,
    *,
    seed: str,
) -> Run:
    """A closed loop of so many clients. What has not ended after `seconds` is given up."""
    run, numbers = Run(), itertools.count()

    async def client() -> None:
        while len(run.errors) < 8:
            number = next(numbers)
            request = body(name, f"{seed}/{number}", args.prompt_tokens, args.output_tokens)
            await ask(session, url, request, run, number)

    tasks = [asyncio.create_task(client()) for _ in range(clients)]
    await asyncio.sleep(seconds / 4)
    began, before = time.perf_counter(), await counters(session, url)
    await asyncio.sleep(max(seconds * 3 / 4, 0.0))
    run.seconds, after = time.perf_counter() - began, await counters(session, url)
    run.counters = {key: value - before.get(key, 0.0) for key, value in after.items()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await settled(session, url)
    return run


async def counters(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """The server's counters by name and labels."""
    async with session.get(f"{url}/metrics") as reply:
        lines = (await reply.text()).splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


async def settled(session: aiohttp.ClientSession, url: str) -> None:
    """Wait until what was given up is gone."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        async with session.get(f"{url}/load") as reply:
            load = await reply.json()
        if not load["running"] and not load["waiting"]:
            return
        await asyncio.sleep(0.02)


async def ask(
    session: aiohttp.ClientSession, url: str, request: dict[str, Any], run: Run, number: int
) -> None:
    """Stream one answer."""
    path = "chat/completions" if "messages" in request else "completions"
    last, first, pieces = time.perf_counter(), True, list[str]()
    try:
        async with session.post(f"{url}/v1/{path}", json=request) as reply:
            if reply.status != 200:
                raise ValueError(f"{reply.status}: {(await reply.text())[:200]}")
            async for event in reply.content:
                if not event.startswith(b"data: {"):
                    continue
                now = time.perf_counter()
                pieces += [_text(choice) for choice in json.loads(event[6:])["choices"]]
                (run.ttft if first else run.gaps).append(now - last)
                first, last = False, now
    except (aiohttp.ClientError, ValueError, KeyError, TimeoutError) as error:
        run.errors.append(f"{type(error).__name__}: {error}"[:300])
    finally:
        run.texts[number] = "".join(pieces)


def _text(choice: dict[str, Any]) -> str:
    delta = choice.get("delta")
    return choice.get("text", "") if delta is None else delta.get("content") or ""


def rate(runs: list[Run]) -> float:
    """Generated tokens per second, of the round in the middle."""
    return median(total(run, "vllm:generation_tokens_total") / run.seconds for run in runs)


def total(run: Run, name: str, label: str = "") -> float:
    """The sum of a counter's samples whose labels contain a text."""
    return sum(
        value
        for key, value in run.counters.items()
        if key.partition("{")[0] == name and label in key
    )


def summary(runs: list[Run]) -> dict[str, Any]:
    def of_all(name: str, label: str = "") -> float:
        return sum(total(run, name, label) for run in runs)

    prefix = "vllm:spec_decode_num_"
    rows, drafts = of_all(f"{prefix}drafts_total"), of_all(f"{prefix}draft_tokens_total")
    accepted = of_all(f"{prefix}accepted_tokens_total")
    places = range(7)
    per_place = [
        of_all(f"{prefix}accepted_tokens_per_pos_total", f'position="{n}"') for n in places
    ]
    steps = {kind: of_all("jaxserve_step_seconds_count", f'kind="{kind}"') for kind in STEPS}
    return {
        "output_tok_per_s": round(rate(runs), 1),
        "rounds_tok_per_s": [round(rate([run]), 1) for run in runs],
        "ttft_ms": _percentiles([each for run in runs for each in run.ttft]),
        "event_gap_ms": _percentiles([each for run in runs for each in run.gaps]),
        "steps": steps,
        "late_steps": of_all("jaxserve_late_steps_total"),
        "draft_rows": rows,
        "accepted_per_draft_row": round(accepted / rows, 3) if rows else 0.0,
        "accepted_share": round(accepted / drafts, 3) if drafts else 0.0,
        "accepted_share_per_position": [round(n / rows, 3) for n in per_place] if rows else [],
        "errors": [error for run in runs for error in run.errors][:3],
        "compiles_while_serving": of_all("jaxserve_compiles_total", 'phase="serving"'),
    }


STEPS = ("decode", "mixed", "verify")


def _percentiles(seconds: list[float]) -> dict[str, float]:
    if len(seconds) < 2:
        return {}
    cuts = quantiles(seconds, n=100)
    return {name: round(1e3 * cuts[at - 1], 3) for name, at in (("p50", 50), ("p99", 99))}


def line(point: dict[str, Any]) -> str:
    off, on = point["off"], point["on"]
    return (
        f"{point['workload']:16} {point['clients']:4} clients: {off['output_tok_per_s']:8.0f} -> "
        f"{on['output_tok_per_s']:8.0f} tok/s, {point['speedup']:.3f} times; "
        f"{on['accepted_per_draft_row']:.2f} accepted a row of {on['draft_rows']:.0f}; "
        f"{point['equal']:.1%} of {point['compared']} equal"
        f"{'; ERRORS ' + on['errors'][0] if on['errors'] else ''}"
    )


if __name__ == "__main__":
    sys.exit(main())

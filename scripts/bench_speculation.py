"""Servers that verify drafts and that do not, in turns on one card: tokens per second, over HTTP.

    python scripts/bench_speculation.py --out speculation.json
    python scripts/bench_speculation.py --model qwen3-4b --clients 1,8,64,256 --budget 1200
    python scripts/bench_speculation.py --model /models/Qwen3-4B --text

Two servers start on the card, each with a share of its memory, one with `--speculative-config off`.
Then each point is measured with the one and with the other in turns: closed loops of `--seconds`
each, pair after pair, until the ratio's interval is `--precision` wide on each side, from three to
`--pairs` pairs. `speedup` is the median of the pairs' ratios (`paired.py`). The servers' idle time
costs the other nothing. Answers of a loop's first requests have lengths of their own, so that its
clients do not march in step.

Last comes overload: requests arrive at random times, `--load` times as many as the server without
drafts completes with the most clients. `goodput` counts the tokens of those whose first token came
within `--ttft` seconds and whose others came within `--tpot` on average.

A model is only its shape, with weights whose greedy output is known beforehand
(`chain_checkpoint.py`): random weights fall into loops, which look like a success of looking up.
Its workloads are made, not found, and say so in their names:

- `made-edit`: the prompt holds the coming answer, with one token of 24 changed, as a file does
  that is edited.
- `made-quotes`: the prompt holds the coming answer in passages of 32 tokens in another order, as
  documents do that are quoted.
- `made-fresh`: no token of the prompt helps.
- `made-misleading`: the prompt holds pieces of six tokens of the answer, each followed by
  something else. It is as bad for looking up as text can be.

With `--text` the model is a folder of real weights, and its chats are asked to repeat files of this
repository with a name changed (`text-edit`), to quote from its documentation (`text-quotes`), and
for short essays (`text-chat`).

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
import importlib.metadata
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import aiohttp
import chain_checkpoint
import head_costs
from paired import ratio_of
from speculation_load import Run, drive, goodput
from speculation_workloads import MADE, TEXTS

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
        servers = {name: stack.enter_context(served(model, name, args)) for name in ARMS}
        urls = {name: server.url for name, server in servers.items()}
        started = time.monotonic() - began
        points, overload = asyncio.run(measure(urls, args))
    result = {
        **about(),
        "model": Path(args.model).name,
        "weights": "real" if args.text else "made: the next token follows from the last",
        "flags": args.flags,
        "start_s": round(started, 1),
        "step_times": {name: server.step_times for name, server in servers.items()},
        "points": points,
        "overload": overload,
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
    add("--seconds", type=float, default=8.0, help="of each loop")
    add("--pairs", type=int, default=9, help="of loops at most at each point, at least 3")
    add("--precision", type=float, default=0.02, help="share of the ratio at which a point is done")
    add("--budget", type=float, default=1500.0, help="seconds in which new points are begun")
    add("--load", type=float, default=1.5, help="of overload; 0: none")
    add("--ttft", type=float, default=2.0, help="seconds")
    add("--tpot", type=float, default=0.05, help="seconds")
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


class Ready(NamedTuple):
    """A server that serves."""

    url: str
    step_times: str
    """As its log tells them: those of verify steps, too."""


@contextlib.contextmanager
def served(model: str, arm: str, args: argparse.Namespace) -> Generator[Ready]:
    """A server that is ready; it ends with the block."""
    paths = [str(ROOT / part) for part in ("", "kernels", "checkpoints")]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
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


def _address(process: subprocess.Popen[str], log: Any, deadline: float, arm: str) -> Ready:
    while time.monotonic() < deadline and process.poll() is None:
        log.seek(0)
        text = log.read()
        if found := re.search(r"is ready: \S+ at (http\S+)/v1", text):
            times = re.search(r"step times, .*", text)
            print(f"{arm}: {times[0] if times else 'ready'}", flush=True)
            return Ready(found[1], times[0] if times else "")
        time.sleep(0.25)
    log.seek(0)
    raise SystemExit(f"the server ({arm}) did not become ready:\n{log.read()[-4000:]}")


async def measure(
    urls: dict[str, str], args: argparse.Namespace
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """All points until the budget is spent, the cheapest first, and those of overload."""
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
        overload = [await overloaded(session, urls, name, args) for name in names if args.load]
    return points, overload


async def compare(
    session: aiohttp.ClientSession,
    urls: dict[str, str],
    name: str,
    clients: int,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """One point: the servers in turns, with the same requests in each round."""
    rounds: dict[str, list[Run]] = {arm: [] for arm in urls}
    ratio = None
    while ratio is None or (ratio.noise > args.precision and len(rounds["on"]) < args.pairs):
        number = len(rounds["on"])
        for arm in list(urls)[:: 1 if number % 2 == 0 else -1]:
            seed = f"{name}/{clients}/{number}"
            run = await drive(session, urls[arm], name, clients, args.seconds, args, seed=seed)
            rounds[arm].append(run)
        if number >= min(2, args.pairs - 1):
            ratio = ratio_of(pairs_of(rounds))
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
        "speedup": ratio._asdict(),
        "compared": len(pairs),
        "equal": sum(one == other for one, other in pairs) / max(len(pairs), 1),
    }


async def overloaded(
    session: aiohttp.ClientSession, urls: dict[str, str], name: str, args: argparse.Namespace
) -> dict[str, Any]:
    """Goodput of the servers in turns, with the same requests at the same times in each pair."""
    clients = max(args.clients)
    run = await drive(session, urls["off"], name, clients, args.seconds, args, seed="capacity")
    requests = args.load * rate([run]) / args.output_tokens
    found: dict[str, list[float]] = {arm: [] for arm in urls}
    ratio = None
    while ratio is None or (ratio.noise > args.precision and len(found["on"]) < args.pairs):
        number = len(found["on"])
        for arm in list(urls)[:: 1 if number % 2 == 0 else -1]:
            seed = f"{name}/overload/{number}"
            found[arm].append(await goodput(session, urls[arm], name, requests, args, seed=seed))
        if number >= min(2, args.pairs - 1) and min(found["off"]) > 0:
            ratio = ratio_of(list(zip(found["off"], found["on"], strict=True)))
        elif number >= args.pairs - 1:
            break
    point = {
        "workload": name,
        "requests_per_s": round(requests, 3),
        "ttft_s": args.ttft,
        "tpot_s": args.tpot,
        "goodput_tok_per_s": {
            arm: [round(each, 1) for each in runs] for arm, runs in found.items()
        },
        "ratio": ratio and ratio._asdict(),
    }
    print(f"{name:16} overload, {requests:.1f} requests/s: {point['ratio']}", flush=True)
    return point


def pairs_of(rounds: dict[str, list[Run]]) -> list[tuple[float, float]]:
    """Tokens per second of the two servers, pair by pair."""
    off, on = ([max(rate([run]), 1e-9) for run in rounds[arm]] for arm in ("off", "on"))
    return list(zip(off, on, strict=True))


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
        f"{on['output_tok_per_s']:8.0f} tok/s, {point['speedup']['median']:.3f} times "
        f"({point['speedup']['low']:.3f} to {point['speedup']['high']:.3f}); "
        f"{on['accepted_per_draft_row']:.2f} accepted a row of {on['draft_rows']:.0f}; "
        f"{point['equal']:.1%} of {point['compared']} equal"
        f"{'; ERRORS ' + on['errors'][0] if on['errors'] else ''}"
    )


if __name__ == "__main__":
    sys.exit(main())

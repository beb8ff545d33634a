"""Measures the gain and the cost of verifying drafts on a card. Each part is written when done.

    python scripts/bench_speculation.py --out speculation.json
    python scripts/bench_speculation.py --parts copies,fresh --clients 1,8,64,256 --budget 150
    python scripts/bench_speculation.py --model /models/Qwen3-4B --text --parts copies,fresh

| part | measures |
|---|---|
| `copies` | speedup (tokens per second with drafts over without), prompts that contain the answer |
| `fresh` | speedup where no draft helps, at 1, 8, 64 and 256 clients |
| `misleading` | speedup where the prompt suggests wrong drafts |
| `overload` | goodput with drafts over without, with more requests than can be served |
| `eagle3`, `dflash`, `dspark`, `draft` | step times with a random head over those without |
| `mtp` | step times with Qwen3.5's own head, with `--mtp-layers` of its layers |

The first four parts query one server over HTTP, whose drafts are switched off and on in turns
(`switched_server.py`). So both arms have the same programs, weights and step times. A server
without drafts would also have memory for a few more pages.

Each point is one closed loop. Drafts are switched every `--turn` seconds, each pair of turns in
random order. The server counts the tokens of each turn's steps, except for the first 0.1 s. So
differences between loops, such as the timing of prompts, affect both arms alike. A point ends when
the 95 % interval of the ratio is narrow enough (0.5 % on each side for fresh text, otherwise 2 %),
or after `--seconds`.

`speedup` is the centre of the ratios of neighbouring turns (`paired.py`). It compares tokens per
second. If no step of the loop verified drafts, it compares expected with actual times of decode
steps: the mix of steps depends on the timing of prompts, and would vary more between turns than the
arms may differ. The first answers have different lengths, so that clients do not run in lockstep.

A model is a shape with weights whose greedy output is known beforehand (`chain_weights.py`). Random
weights would fall into loops, which look like successful lookups. Prompts are synthetic, and
contain as much of the coming answer as prompts for edits or quotes do:

- `made-edit`: the prompt contains the answer, with one token in 24 changed, like a file to edit.
- `made-quotes`: the prompt contains the answer as passages of 32 tokens in another order, like
  documents to quote.
- `made-fresh`: no token of the prompt helps. It stands for chat, though real chat repeats itself at
  times.
- `made-misleading`: the prompt contains pieces of six tokens of the answer, each followed by
  something else.

With `--text` the model is a folder of real weights. The chats ask it to repeat files of this
repository with a name changed (`text-edit`), to quote its documentation (`text-quotes`), and to
write short essays (`text-chat`).

`equal` is the share of sampled answers that are the same without drafts, up to the shorter length.
Steps of other shapes round differently, so near ties may resolve differently.

Overload: requests arrive at random times, at `--load` times the rate that the server completes
without drafts at the largest number of clients. `goodput` counts the tokens of requests whose first
token came within `--ttft` seconds and whose other tokens took at most `--tpot` on average.

`step_times` in the result is a table for `lab.simulation.simulate_speculation`. Copied into a file
with a description, it gives the study and the figure measured verify steps.

For heads, no server starts (`head_costs.py`): the steps of one engine are timed without and with a
head. Their ratio is the cost of a head if nothing is accepted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.metadata
import itertools
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Generator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import chain_weights
from speculation_points import Bench, Point, compare, line, overloaded
from speculation_server import Server, environment, served
from speculation_workloads import MADE, TEXTS

from jaxserve.model_spec import ModelSpec
from jaxserve.models.registry import NAMED_MODELS, spec_of

ROOT = Path(__file__).parents[1]
PACKAGES = ("jaxserve", "jax", "jaxlib", "triton", "jax-cuda12-plugin", "jax-cuda13-plugin")


class Part(NamedTuple):
    """A part that measures tokens per second, at several points."""

    made: tuple[str, ...]
    """Workloads for made weights."""
    text: tuple[str, ...]
    """Workloads for real weights."""
    clients: tuple[int, ...]
    prompt_tokens: int
    precision: float
    """A point is done when half the width of the ratio's interval is at most this share of it."""


MANY = (1, 8, 64, 256)
LOOPS = {
    "copies": Part(("made-edit", "made-quotes"), ("text-edit", "text-quotes"), (1,), 512, 0.02),
    "fresh": Part(("made-fresh",), ("text-chat",), MANY, 128, 0.005),
    "misleading": Part(("made-misleading",), (), MANY, 512, 0.005),
}
STEP_PARTS = ("eagle3", "dflash", "dspark", "draft", "mtp")
PARTS = (*LOOPS, "overload", *STEP_PARTS)
FLAGS = "--decode-buckets 1,8,64,256 --prefill-buckets 64,512,2048 --max-model-len 2048"
"""Flags of the server: only the buckets that the clients need."""
HEAD_FLAGS = (
    "--decode-buckets 1,8 --prefill-buckets 128 --max-model-len 4096 "
    "--speculative-config '{\"num_speculative_tokens\": 3}'"
)
"""Flags of the engine whose steps are timed: few programs, and as many draft passes as EAGLE-3
heads make."""


def main() -> int:
    args = parse_args()
    wanted = args.parts.split(",")
    if unknown := set(wanted) - set(PARTS):
        raise SystemExit(f"no such part: {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}")
    report = Report(args.out, args.budget)
    report.found |= {**about(), "model": Path(args.model).name}
    if served_parts := [part for part in wanted if part not in STEP_PARTS]:
        with report.timed("server"):
            serve_and_measure(served_parts, args, report)
    for part in wanted:
        if part in STEP_PARTS and not report.is_late(part):
            heads = report.found.setdefault("heads", {})
            with report.timed(part):
                heads[part] = head_costs_of(part, args)
    return 1 if "errors" in report.found else 0


class Report:
    """The result, which is written after each part."""

    def __init__(self, file: Path | None, budget: float):
        """`budget`: seconds from now after which nothing new begins."""
        self._file, self._began, self._budget = file, time.monotonic(), budget
        self.found: dict[str, Any] = {}

    def write(self) -> None:
        if self._file is not None:
            self._file.write_text(json.dumps(self.found, indent=1) + "\n")

    def is_late(self, name: str) -> bool:
        """Whether the budget is spent; prints a note if so."""
        late = time.monotonic() > self._began + self._budget
        if late:
            print(f"the budget is spent: {name} is left out", flush=True)
            self.found.setdefault("left_out", []).append(name)
            self.write()
        return late

    @contextlib.contextmanager
    def timed(self, name: str) -> Generator[None]:
        """Context manager: records the part's duration or error, and writes the result. Errors do
        not end the script."""
        began = time.monotonic()
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.found.setdefault("errors", {})[name] = f"{type(error).__name__}: {error}"[:2000]
        took = round(time.monotonic() - began, 1)
        self.found.setdefault("seconds", {})[name] = took
        print(f"{name}: {took} s", flush=True)
        self.write()


def serve_and_measure(parts: list[str], args: argparse.Namespace, report: Report) -> None:
    """Runs the parts that need a server."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        model, flags = args.model, shlex.split(args.flags)
        if not args.text:
            model = str(Path(folder) / "shape")
            chain_weights.write_shape(shape(args.model), Path(model))
            flags += ["--load-format", "dummy"]
        began, times = time.monotonic(), Path(folder) / "step_times.json"
        server = stack.enter_context(served(model, flags, times, args))
        report.found |= {
            "start_s": round(time.monotonic() - began, 1),
            "weights": "real" if args.text else "made: the next token follows from the last",
            "flags": args.flags,
            "step_times": json.loads(times.read_text()),
        }
        report.write()
        asyncio.run(measure(server, parts, args, report))


def head_costs_of(part: str, args: argparse.Namespace) -> dict[str, Any]:
    """Runs `head_costs.py` in a child process, which frees the card's memory when it ends."""
    model = args.mtp_model if part == "mtp" else args.model
    command = [sys.executable, str(ROOT / "scripts" / "head_costs.py"), "--model", model]
    command += ["--head", part, "--memory", str(args.memory), "--flags", args.head_flags]
    if part == "mtp" and args.mtp_layers:
        command += ["--layers", str(args.mtp_layers)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}")
    found = json.loads(done.stdout.splitlines()[-1])
    for bucket, took in found["steps"]["verify"].items():
        print(f"{part:16} verify {bucket}: {took}", flush=True)
    return found


def parse_args() -> argparse.Namespace:
    def sizes(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--parts", default="copies,fresh,eagle3,mtp", help=f"some of {', '.join(PARTS)}")
    add("--model", default="qwen3-4b", help="a named shape, or a folder")
    add("--text", action="store_true", help="real weights, see above")
    add("--clients", type=sizes, help="numbers of clients in all parts; default: by part")
    add("--prompt-tokens", type=int, help="tokens per prompt in all parts; default: by part")
    add("--output-tokens", type=int, default=192)
    add("--seconds", type=float, default=40.0, help="most seconds of turns per point")
    add("--settle", type=float, default=2.0, help="seconds of each loop before its turns")
    add("--turn", type=float, default=0.3, help="seconds per turn")
    add("--budget", type=float, default=1500.0, help="begin no point after this many seconds")
    add("--load", type=float, default=1.5, help="overload, relative to the server's rate")
    add("--arrivals", type=float, default=2.5, help="overload: seconds in which requests arrive")
    add("--pairs", type=int, default=3, help="overload: pairs of runs")
    add("--ttft", type=float, default=2.0, help="seconds")
    add("--tpot", type=float, default=0.05, help="seconds")
    add("--memory", type=float, default=0.8, help="share of the card's memory")
    add("--start-timeout", type=float, default=600.0)
    add("--flags", default=FLAGS, help="more server flags, as one argument")
    add("--head-flags", default=HEAD_FLAGS, help="engine flags for parts with a head")
    add("--mtp-model", default="qwen3.5-27b", help="the model of `mtp`")
    add("--mtp-layers", type=int, default=8, help="number of its layers; 0: all")
    add("--out", type=Path, help="write the result as JSON")
    return parser.parse_args()


def shape(model: str) -> ModelSpec:
    """The shape of a named model, or of a folder with config.json."""
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


async def measure(
    server: Server, parts: list[str], args: argparse.Namespace, report: Report
) -> None:
    """Measures all points until the budget is spent."""
    timeout, connector = aiohttp.ClientTimeout(total=120), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        bench = Bench(server, session, args)
        first = next(iter(TEXTS)) if args.text else MADE[0]
        async with bench.loop(Point(first, 2, 96), "warm", "on"):
            await asyncio.sleep(0.5)  # skip one-time costs
        for part in parts:
            with report.timed(part):
                if part == "overload":
                    await overload(bench, args, report)
                else:
                    await loops(bench, LOOPS[part], args, report)


async def loops(bench: Bench, part: Part, args: argparse.Namespace, report: Report) -> None:
    """Measures tokens per second at a part's points."""
    names = part.text if args.text else part.made
    for clients, name in itertools.product(args.clients or part.clients, names):
        if report.is_late(f"{name} of {clients} clients"):
            continue
        asked = Point(name, clients, args.prompt_tokens or part.prompt_tokens)
        point = await compare(bench, asked, part.precision)
        print(line(point), flush=True)
        report.found.setdefault("points", []).append(point)
        report.write()


async def overload(bench: Bench, args: argparse.Namespace, report: Report) -> None:
    """Measures goodput of fresh text and of copies."""
    for part in (LOOPS["fresh"], LOOPS["copies"]):
        name = (part.text if args.text else part.made)[0]
        if not report.is_late(f"overload of {name}"):
            tokens = args.prompt_tokens or part.prompt_tokens
            point = Point(name, max(args.clients or MANY), tokens)
            report.found.setdefault("overload", []).append(await overloaded(bench, point, args))
            report.write()


if __name__ == "__main__":
    sys.exit(main())

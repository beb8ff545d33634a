"""Measures prefix cache hits of a model with recurrent layers in conversations of agents.

    python -m lab.studies.bench_hybrid_hits --out hits.json
    python -m lab.studies.bench_hybrid_hits --planned --out hits_by_snapshots.json

It runs a server on the CPU with random weights of a small Qwen3.5. Conversations take turns. A turn
adds the model's output and a tool's result to the context. An ideal cache would have the longest
prefix that any earlier request computed. Afterwards the prompts of the first conversation run
again, three times, each time with a new salt. This gives the time to the first token without the
cache, and shows whether its tokens are the same.

With --planned, only the scheduler plays a trace of longer contexts, with more and with fewer
snapshots than conversations. Hits do not depend on a model's numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from jaxserve.api import Request as EngineRequest
from jaxserve.api import SamplingParams
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.plan import Sampled
from jaxserve.runner.kv_cache import SNAPSHOT_STRIDE
from jaxserve.scheduler import Scheduler
from jaxserve_checkpoints import resolve
from scripts.working_tree import commit

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "max_position_embeddings": 8192,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


class Trace(NamedTuple):
    """Tokens in the parts of conversations. For a pair, a random number between the two."""

    systems: tuple[int, ...]
    """Instructions and tools of each kind of agent. Conversations use them in turn."""
    question: tuple[int, int]
    output: tuple[int, int]
    result: tuple[int, int]
    """Tokens of a tool's result and the text around it."""


TRACE = Trace(systems=(700, 1300), question=(20, 300), output=(20, 120), result=(60, 420))
LONG = Trace(systems=(2500, 3700), question=(50, 500), output=(50, 300), result=(200, 2500))
COLD_RUNS = 3
SNAPSHOTS = (8, 12, 16, 24, 32, 64, 128)

type Request = list[int]
type Ask = Callable[[Request, int], dict[str, Any]]
"""Returns the cached tokens of a prompt, and the given number of tokens that follow it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=10)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--cache", default="96Mi", help="--kv-cache-memory-bytes of the server")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--planned", action="store_true", help="see above")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = planned(options) if options.planned else served(options)
    print(json.dumps(found, indent=1))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


def served(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, server(Path(folder), options) as (url, log):
        warm = play(partial(ask, url), TRACE, options.conversations, options.turns)
        cold = [
            [
                ask(url, turn["prompt"], len(turn["tokens"]), salt=f"cold {turn['turn']} {number}")
                for number in range(COLD_RUNS)
            ]
            for turn in warm
            if turn["conversation"] == 0
        ]
    return report(warm, cold, options) | {"memory": log}


def planned(options: argparse.Namespace) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for snapshots in SNAPSHOTS:
        turns = play(Planner(snapshots), LONG, options.conversations, options.turns)
        row = {"snapshots": snapshots, **hits(turns)}
        rows.append(row)
    return {
        "what": "python -m lab.studies.bench_hybrid_hits --planned",
        "commit": commit(),
        "conversations": options.conversations,
        "turns": options.turns,
        **LONG._asdict(),
        "by_snapshots": rows,
    }


class Planner:
    """A scheduler whose plans are not computed. The tokens after a prompt are random."""

    def __init__(self, snapshots: int):
        config = SchedulerConfig(max_num_seqs=4, max_model_len=65_536, max_num_batched_tokens=2048)
        cache = CacheConfig(
            num_pages=8192,
            page_size=64,
            snapshots=snapshots,
            snapshot_stride=SNAPSHOT_STRIDE,
            state_block=64,
        )
        self._scheduler = Scheduler(config, cache)
        self._rng, self._number = random.Random(1), 0

    def __call__(self, prompt: Request, max_tokens: int) -> dict[str, Any]:
        self._number += 1
        params = SamplingParams(max_tokens=max_tokens)
        name = str(self._number)
        self._scheduler.add(EngineRequest(id=name, prompt=tuple(prompt), params=params))
        tokens: list[int] = []
        cached = 0
        while self._scheduler.has_work:
            plan = self._scheduler.plan()
            assert plan is not None
            sampled = [self._sampled() if row.samples else None for row in plan.rows]
            for event in self._scheduler.commit(plan, sampled):
                assert event.token is not None
                cached = max(cached, event.cached_tokens)
                tokens.append(event.token)
        return {"cached": cached, "tokens": tokens}

    def _sampled(self) -> Sampled:
        return Sampled(self._rng.randrange(100, 2000))


@contextmanager
def server(folder: Path, options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yields the server's address, and its log lines about state and snapshots."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(resolve.__file__).parent / "embedded" / name, folder / name)
    flags = ["--model", str(folder), "--load-format", "dummy", "--port", "0"]
    flags += ["--cache-dir", str(folder / "cache"), "--kv-cache-memory-bytes", options.cache]
    flags += ["--decode-buckets", "4", "--prefill-buckets", "256", "--max-model-len", "8192"]
    flags += ["--kv-cache-dtype", options.kv_cache_dtype]
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxserve", *flags],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        seen: list[str] = []
        ready = None
        for line in process.stdout:
            seen.append(line)
            if ready := re.search(r"is ready: \S+ at (http\S+)/v1", line):
                break
        if ready is None:
            raise SystemExit("".join(seen))
        state = re.search(r"recurrent layers keep .*", "".join(seen))
        yield ready[1], state[0] if state else ""
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()


def play(ask: Ask, trace: Trace, conversations: int, turns: int) -> list[dict[str, Any]]:
    """Returns all requests, with their cached tokens and those of an ideal cache."""
    rng = random.Random(0)

    def words(*bounds: int) -> Request:
        return [rng.randrange(100, 2000) for _ in range(rng.randint(bounds[0], bounds[-1]))]

    systems = [words(size) for size in trace.systems]
    histories = [
        systems[number % len(systems)] + words(*trace.question) for number in range(conversations)
    ]
    computed: list[Request] = []
    found: list[dict[str, Any]] = []
    for turn in range(turns):
        for number, prompt in enumerate(histories):
            ideal = max((common(prompt, each) for each in computed), default=0)
            answer = ask(prompt, rng.randint(*trace.output))
            whole = prompt + answer["tokens"]
            computed.append(whole[:-1])  # the last token is never computed
            found.append(answer | {"prompt": prompt, "conversation": number, "turn": turn})
            found[-1]["ideal"] = min(ideal, len(prompt) - 1)
            histories[number] = whole + words(*trace.result)
    return found


def hits(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the cached tokens, and their share of an ideal cache's."""
    cached, ideal = (sum(each[name] for each in turns) for name in ("cached", "ideal"))
    return {
        "prompt_tokens": sum(len(each["prompt"]) for each in turns),
        "ideal_tokens": ideal,
        "cached_tokens": cached,
        "cached_over_ideal": round(cached / ideal, 4),
    }


def common(one: Request, other: Request) -> int:
    """Returns the length of the common prefix."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))


def ask(url: str, prompt: Request, max_tokens: int, *, salt: str = "") -> dict[str, Any]:
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True, "stream": True}
    body |= {"stream_options": {"include_usage": True}} | ({"cache_salt": salt} if salt else {})
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    began, first, tokens, usage = time.perf_counter(), 0.0, list[int](), dict[str, Any]()
    with urllib.request.urlopen(request) as reply:
        for line in reply:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            for choice in event["choices"]:
                first = first or time.perf_counter() - began
                tokens += choice.get("token_ids") or []
            usage = event.get("usage") or usage
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {"cached": cached, "ttft_ms": first * 1e3, "tokens": tokens}


def report(
    warm: list[dict[str, Any]], cold: list[list[dict[str, Any]]], options: argparse.Namespace
) -> dict[str, Any]:
    turns = [[each for each in warm if each["turn"] == turn] for turn in range(options.turns)]
    first = [each["tokens"] for each in warm if each["conversation"] == 0]
    alike = all(
        run["tokens"] == tokens for tokens, runs in zip(first, cold, strict=True) for run in runs
    )
    return {
        "what": "python -m lab.studies.bench_hybrid_hits",
        "commit": commit(),
        "device": f"CPU, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "kv_cache_dtype": options.kv_cache_dtype,
        "conversations": options.conversations,
        **TRACE._asdict(),
        **hits(warm),
        "cold_tokens_are_warm_tokens": alike,
        "turns": [
            {
                "turn": turn,
                "prompt_tokens_median": median(len(each["prompt"]) for each in some),
                "cached_over_ideal": hits(some)["cached_over_ideal"],
                "ttft_ms_median": round(median(each["ttft_ms"] for each in some), 1),
                "ttft_ms_cold": round(median(run["ttft_ms"] for run in cold[turn]), 1),
            }
            for turn, some in enumerate(turns)
        ],
    }


if __name__ == "__main__":
    main()

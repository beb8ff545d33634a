"""How often the prefix cache of a model with recurrent layers hits in agents' conversations.

    python -m lab.studies.bench_hybrid_hits --out hits.json

A server on the CPU with random weights of a small Qwen3.5. Conversations take turns; a turn adds
the model's output and a tool's result to the context. An ideal cache has the longest prefix that
any request before has computed. Afterwards prompts of the first conversation run again, each with a
salt of its own: time to the first token without the cache.
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from jaxserve_checkpoints import resolve

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
SYSTEM, QUESTION, OUTPUT, RESULT = 640, 40, 48, (60, 420)
"""Tokens; a tool's result has a random number of them."""

type Request = list[int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=10)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--cache", default="96Mi", help="--kv-cache-memory-bytes of the server")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, server(Path(folder), options) as (url, log):
        warm = play(url, options.conversations, options.turns)
        cold = [
            ask(url, turn["prompt"], salt=f"cold {number}")["ttft_ms"]
            for number, turn in enumerate(warm)
            if turn["conversation"] == 0
        ]
    found = report(warm, cold, options) | {"memory": log}
    print(json.dumps(found, indent=1))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


@contextmanager
def server(folder: Path, options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Its address, and what its log says of state and snapshots."""
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


def play(url: str, conversations: int, turns: int) -> list[dict[str, Any]]:
    """All requests, with what was cached and what an ideal cache would have."""
    rng = random.Random(0)

    def words(count: int) -> Request:
        return [rng.randrange(100, 2000) for _ in range(count)]

    system = words(SYSTEM)
    histories = [system + words(QUESTION) for _ in range(conversations)]
    computed: list[Request] = []
    found: list[dict[str, Any]] = []
    for turn in range(turns):
        for number, prompt in enumerate(histories):
            ideal = max((common(prompt, each) for each in computed), default=0)
            answer = ask(url, prompt, max_tokens=OUTPUT)
            whole = prompt + answer["tokens"]
            computed.append(whole[:-1])  # the last token is never computed
            found.append(answer | {"prompt": prompt, "conversation": number, "turn": turn})
            found[-1]["ideal"] = min(ideal, len(prompt) - 1)
            histories[number] = whole + words(rng.randint(*RESULT))
    return found


def common(one: Request, other: Request) -> int:
    """Returns how many tokens both begin with."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))


def ask(url: str, prompt: Request, *, max_tokens: int = 1, salt: str = "") -> dict[str, Any]:
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
    warm: list[dict[str, Any]], cold: list[float], options: argparse.Namespace
) -> dict[str, Any]:
    cached, ideal = (sum(each[name] for each in warm) for name in ("cached", "ideal"))
    turns = [[each for each in warm if each["turn"] == turn] for turn in range(options.turns)]
    return {
        "what": "python -m lab.studies.bench_hybrid_hits",
        "device": f"CPU, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "kv_cache_dtype": options.kv_cache_dtype,
        "conversations": options.conversations,
        "prompt_tokens": sum(len(each["prompt"]) for each in warm),
        "ideal_tokens": ideal,
        "cached_tokens": cached,
        "cached_over_ideal": round(cached / ideal, 4),
        "turns": [
            {
                "turn": turn,
                "prompt_tokens_median": median(len(each["prompt"]) for each in some),
                "cached_over_ideal": round(
                    sum(each["cached"] for each in some) / sum(each["ideal"] for each in some), 4
                ),
                "ttft_ms_median": round(median(each["ttft_ms"] for each in some), 1),
                "ttft_ms_cold": round(cold[turn], 1),
            }
            for turn, some in enumerate(turns)
        ],
    }


if __name__ == "__main__":
    main()

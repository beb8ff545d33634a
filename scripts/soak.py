"""Soak test: sends thousands of mixed requests, with disconnects and malformed bodies.

    python scripts/soak.py --requests 10000

Starts a server with the embedded model (or uses --url and --pid), keeps --concurrency requests
running over all routes, and aborts some of them at a random moment. With --without-device the
server has a fake device (scripts/bench_http.py); everything else is real. The test fails if a
response is a 5xx other than 503, if a sequence or page is still held at the end, if the server's
memory grows after the first fifth of the requests, or if the server logs an error.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

WORDS = [
    "What",
    "is",
    "the",
    "capital",
    "of",
    "France?",
    "Spell",
    "garden.",
    "4",
    "+",
    "3",
    "é€😀",
    "<think>",
    "<|im_end|>",
    "key:",
    "value",
]
TOOL = {"name": "get_weather", "parameters": {"type": "object"}}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}
BUCKETS = ("--decode-buckets", "32", "--prefill-buckets", "16,64,256")
SERVER = ("-m", "jaxserve", "--port", "0", "--forbid-compiles", *BUCKETS)
WITHOUT_DEVICE = (str(Path(__file__).with_name("bench_http.py")), "--serve", "--clients", "64")
MALFORMED = (
    b"",
    b"{",
    b"[]",
    b"null",
    b'{"prompt": NaN}',
    b'{"prompt": "\xff"}',
    b'{"prompt": "a", "max_tokens": 1e400}',
    b'{"prompt": "a", "n": 100000000000000000000}',
    b'{"prompt": [99999999999999999999]}',
    b'{"messages": ' + b"[" * 500 + b"]" * 500 + b"}",
    b'{"messages": [{"role": "user", "content": {"a": ' + b"{}" + b"}}]}",
    json.dumps({"messages": [CALL, {"role": "tool"}]}).encode(),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-growth", type=float, default=24.0, help="MiB, after the first fifth")
    parser.add_argument("--without-device", action="store_true", help="use a fake device")
    parser.add_argument("--url", help="URL of a running server")
    parser.add_argument("--pid", type=int, help="process of the server at --url")
    args = parser.parse_args()
    if args.url:
        return asyncio.run(Soak(args, args.url, args.pid).run())
    with own_server(WITHOUT_DEVICE if args.without_device else SERVER) as (url, process, log):
        status = asyncio.run(Soak(args, url, process.pid).run())
        if args.without_device:
            assert process.stdin is not None
            process.stdin.close()
        else:
            process.send_signal(signal.SIGTERM)
        process.wait(60)
        logged = re.findall(r"^.*(?:ERROR|CRITICAL|Traceback).*$", log.read_text(), re.M)
        print(f"errors logged: {len(logged)}")
        if logged:
            lines = log.read_text().splitlines()
            first = next(at for at, line in enumerate(lines) if line.startswith(logged[0]))
            print(*lines[first : first + 60], sep="\n")
        return status or bool(logged) or process.returncode


@contextmanager
def own_server(command: Sequence[str]) -> Iterator[tuple[str, subprocess.Popen[bytes], Path]]:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu")},
            )
        try:
            while not (ready := re.search(r"is ready: \S+ at (http\S+)/v1", log.read_text())):
                if process.poll() is not None:
                    raise RuntimeError(f"the server ended:\n{log.read_text()}")
                time.sleep(0.1)
            yield ready[1], process, log
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


class Soak:
    def __init__(self, args: argparse.Namespace, url: str, pid: int | None):
        self._args = args
        self._url = url
        self._pid = pid
        self._random = random.Random(args.seed)
        self._outcomes: collections.Counter[str] = collections.Counter()
        self._wrong: list[str] = []
        self._left = args.requests

    async def run(self) -> int:
        """Runs the test. Returns the exit status."""
        timeout = aiohttp.ClientTimeout(total=300)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            self._session = session
            idle = await self._load()
            workers = [asyncio.create_task(self._worker()) for _ in range(self._args.concurrency)]
            started = reported = time.monotonic()
            early = None
            while any(not worker.done() for worker in workers):
                await asyncio.sleep(0.2)
                if time.monotonic() - reported > 60:
                    reported = time.monotonic()
                    print(f"{self._left} to go, {self._resident_mib():.0f} MiB", flush=True)
                if early is None and self._left <= self._args.requests * 4 // 5:
                    early = self._resident_mib()
            await asyncio.gather(*workers)
            seconds = time.monotonic() - started
            after = await self._settled()
            growth = self._resident_mib() - (early or 0)
        for outcome, count in sorted(self._outcomes.items()):
            print(f"{count:7} {outcome}")
        print(f"{seconds:.0f} s; memory after the first fifth: {growth:+.1f} MiB")
        print(f"load before {idle}, after {after}")
        if growth > self._args.max_growth:
            self._wrong.append(f"memory grew by {growth:.1f} MiB")
        if after != idle:
            self._wrong.append("sequences or pages are still held")
        print(*self._wrong[:20], sep="\n")
        return int(bool(self._wrong))

    async def _worker(self) -> None:
        while self._left > 0:
            self._left -= 1
            path, body = self._request()
            patience = self._random.choice((None, None, None, self._random.expovariate(5)))
            try:
                async with asyncio.timeout(patience):
                    outcome = await self._send(path, body)
            except TimeoutError:
                outcome = "gave up"
            except aiohttp.ClientError as error:
                outcome = type(error).__name__
                self._wrong.append(f"{path}: {error!r}")
            self._outcomes[outcome] += 1

    async def _send(self, path: str, body: bytes) -> str:
        headers = {"Content-Type": "application/json"}
        async with self._session.post(self._url + path, data=body, headers=headers) as reply:
            raw = await reply.read()
            if reply.status >= 500 and reply.status != 503:
                self._wrong.append(f"{path} {reply.status}: {raw[:200]!r} for {body[:200]!r}")
            if reply.status == 200 and b'"error":{' in raw:
                self._wrong.append(f"{path}: {raw[-300:]!r}")
            return f"{reply.status} {path}"

    def _request(self) -> tuple[str, bytes]:
        draw = self._random
        path = draw.choice(tuple(BODIES))
        if draw.random() < 0.1:
            return path, draw.choice(MALFORMED)
        body = BODIES[path](draw)
        if (
            not self._args.without_device and draw.random() < 0.1
        ):  # a fake device follows no grammar
            body["response_format"] = {"type": "json_object"}
        if draw.random() < 0.1:
            body[draw.choice(tuple(body))] = draw.choice((None, -1, "x", [], {}, 10**30, 0.5))
        raw = json.dumps(body).encode()
        return path, raw[: draw.randrange(len(raw))] if draw.random() < 0.05 else raw

    async def _load(self) -> Any:
        async with self._session.get(f"{self._url}/load") as reply:
            return await reply.json()

    async def _settled(self) -> Any:
        deadline = time.monotonic() + 60
        while (now := await self._load())["server_load"] and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        return now

    def _resident_mib(self) -> float:
        if self._pid is None:
            return 0.0
        status = Path(f"/proc/{self._pid}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) / 1024


def _text(draw: random.Random) -> str:
    return " ".join(draw.choices(WORDS, k=_length(draw)))


def _length(draw: random.Random) -> int:
    """A random length, mostly short: on a CPU a prompt token takes a millisecond or two."""
    return draw.choices((1, 5, 20, 300), (40, 40, 17, 3))[0]


def _sampling(draw: random.Random) -> dict[str, Any]:
    fields: dict[str, Any] = {"stream": draw.random() < 0.6}
    for name, values in (
        ("temperature", (0, 0.7, 1.0)),
        ("top_p", (0.9, 1)),
        ("top_k", (0, 5)),
    ):
        if draw.random() < 0.5:
            fields[name] = draw.choice(values)
    return fields


def _generation(draw: random.Random) -> dict[str, Any]:
    fields = _sampling(draw) | {"max_tokens": draw.choice((1, 8, 32))}
    for name, values in (
        ("n", (1, 2, 3)),
        ("seed", (1, 2)),
        ("stop", ("a", ["the", "é"])),
        ("ignore_eos", (True,)),
        ("min_tokens", (1,)),
        ("return_token_ids", (True,)),
        ("presence_penalty", (0.5,)),
        ("repetition_penalty", (1.1,)),
        ("logit_bias", ({"300": 2.0},)),
        ("bad_words", (["the", "a b"],)),
        ("thinking_token_budget", (0, 3)),
        ("prompt_logprobs", (0, 2)),
        ("stream_options", ({"include_usage": True},)),
    ):
        if draw.random() < 0.2:
            fields[name] = draw.choice(values)
    return fields


def _chat(draw: random.Random) -> dict[str, Any]:
    fields = _generation(draw) | {"messages": [{"role": "user", "content": _text(draw)}]}
    if draw.random() < 0.3:
        fields["tools"] = [{"type": "function", "function": TOOL}]
    if draw.random() < 0.3:
        fields |= {"logprobs": True, "top_logprobs": draw.choice((0, 5))}
    return fields


def _completion(draw: random.Random) -> dict[str, Any]:
    ids = [draw.randrange(500) for _ in range(_length(draw))]
    prompt = draw.choice((_text(draw), [_text(draw), "a"], ids, [ids, [5]]))
    return _generation(draw) | {"prompt": prompt, "echo": draw.random() < 0.2}


def _response(draw: random.Random) -> dict[str, Any]:
    return _sampling(draw) | {"input": _text(draw), "max_output_tokens": draw.choice((1, 24))}


def _message(draw: random.Random) -> dict[str, Any]:
    content = {"role": "user", "content": [{"type": "text", "text": _text(draw)}]}
    fields = {"model": "jaxserve-embedded", "max_tokens": draw.choice((1, 24))}
    return _sampling(draw) | fields | {"messages": [content]}


def _tokenization(draw: random.Random) -> dict[str, Any]:
    return {"prompt": _text(draw)}


BODIES = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
    "/v1/responses": _response,
    "/v1/messages": _message,
    "/tokenize": _tokenization,
}


if __name__ == "__main__":
    sys.exit(main())

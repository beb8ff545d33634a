"""Measures streamed tokens per second of the HTTP server and scheduler, with a fake device.

    python scripts/bench_http.py --clients 256 --tokens 200 --route chat
    python scripts/bench_http.py --clients 256 --step-ms 14
    python scripts/bench_http.py --clients 256 --step-ms 14 --watchers 2

The server runs in a separate process: engine thread, scheduler and HTTP as in production, with a
runner that returns tokens of the embedded model's vocabulary at once. With --step-ms, it returns
them that long after the previous step's, like a device with the next step queued. The script then
also shows the share of the device's step rate that the engine kept, over steps with unchanged
streams.

Clients are raw sockets in this process that count events. Their processor time is shown, since on
few cores they compete with the server. --watchers also reads the events of /ui/engine, like that
many open pages.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from jaxserve import logs
from jaxserve.api import EngineLimits, PromptLogprobs
from jaxserve.config import CacheConfig, SchedulerConfig, ServerConfig
from jaxserve.engine.engine import AsyncEngine, Progress
from jaxserve.engine.loop import Parts
from jaxserve.metrics.metrics import Metrics
from jaxserve.plan import Row, Sampled, StepPlan
from jaxserve.scheduler import Scheduler
from jaxserve.server import make_app, make_runner
from jaxserve.server.ui import EVENTS_ROUTE
from jaxserve.startup import heap
from jaxserve.tokenizer import HfTokenizer

ROOT = Path(__file__).parents[1]
EMBEDDED = ROOT / "checkpoints" / "jaxserve_checkpoints" / "embedded"
MAX_LENGTH = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200, help="per request")
    parser.add_argument("--rounds", type=int, default=3, help="requests per client")
    parser.add_argument("--route", choices=["chat", "completions"], default="chat")
    parser.add_argument("--step-ms", type=float, default=0.0, help="time of a step on the device")
    parser.add_argument("--watchers", type=int, default=0, help="open pages of /ui/engine")
    parser.add_argument("--serve", action="store_true", help="only the server, until stdin ends")
    args = parser.parse_args()
    uvloop.run(_serve(args) if args.serve else _measure(args))


class Pending(NamedTuple):
    plan: StepPlan
    done: float
    """`time.perf_counter()` at which the device is done with the step."""


class ListRunner:
    """A fake runner: every row that samples gets the next id of a fixed cycle of plain words."""

    def __init__(self, step_seconds: float, vocab: int):
        self._step_seconds = step_seconds
        self._next = count()
        self._vocab = vocab
        self._free_at = 0.0
        self._rows = 0
        self.steps = 0
        self.idle = 0.0
        """Number of steps with as many rows as the previous step, and the idle seconds before
        them."""

    def launch(self, plan: StepPlan) -> Pending:
        now = time.perf_counter()
        if len(plan.rows) == self._rows:
            self.steps += 1
            self.idle += max(0.0, now - self._free_at)
        self._rows = len(plan.rows)
        self._free_at = max(now, self._free_at) + self._step_seconds
        time.sleep(0)  # releases the interpreter's lock (GIL), like the call of an executable
        return Pending(plan, self._free_at)

    def is_done(self, pending: Pending) -> bool:
        return time.perf_counter() >= pending.done

    def collect(self, pending: Pending) -> list[Sampled | None]:
        if (left := pending.done - time.perf_counter()) > 0:
            time.sleep(left)
        base = 300 + next(self._next) % (self._vocab - 300)
        return [_sampled(row, base) for row in pending.plan.rows]

    def reset(self) -> None:
        pass


def _sampled(row: Row, token: int) -> Sampled | None:
    """A fake result: each prompt token is the most likely one, with no alternatives."""
    scored = row.scored.tokens if row.scored else ()
    if not row.samples and not scored:
        return None
    scores = tuple(PromptLogprobs(-1.0, 1, ((each, -1.0),)) for each in scored)
    return Sampled(token if row.samples else None, prompt_logprobs=scores)


async def _serve(args: argparse.Namespace) -> None:
    logs.configure("info", "text")
    tokenizer = HfTokenizer.from_folder(EMBEDDED)
    page_size = 64
    pages = 1 + args.clients * (MAX_LENGTH // page_size)

    device = ListRunner(args.step_ms / 1000, tokenizer.vocab_size)

    def build(progress: Progress) -> Parts[Pending]:
        scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=args.clients,
                max_model_len=MAX_LENGTH,
                max_num_batched_tokens=max(2048, args.clients),
            ),
            CacheConfig(num_pages=pages, page_size=page_size),
        )
        return Parts(scheduler, device)

    metrics = Metrics("bench")
    limits = EngineLimits(MAX_LENGTH, tokenizer.vocab_size)
    engine = AsyncEngine(build=build, limits=limits, metrics=metrics)
    config = ServerConfig(model_names=("jaxserve-embedded",), host="127.0.0.1", port=0)
    runner = make_runner(make_app(engine, tokenizer, config, metrics))
    await runner.setup()
    from aiohttp import web

    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    await engine.start()
    heap.settle()
    started = time.process_time()
    print(f"is ready: bench at http://127.0.0.1:{runner.addresses[0][1]}/v1", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await engine.stop()
    await runner.cleanup()
    cpu = time.process_time() - started
    print(json.dumps({"cpu": cpu, "steps": device.steps, "idle": device.idle}), flush=True)


class Watcher(asyncio.Protocol):
    """Reads the events of `/ui/engine`."""

    def __init__(self) -> None:
        self.events = 0

    def connection_made(self, transport: Any) -> None:
        transport.write(f"GET {EVENTS_ROUTE} HTTP/1.1\r\nHost: bench\r\n\r\n".encode())

    def data_received(self, data: bytes) -> None:
        self.events += data.count(b"data: ")


class Client(asyncio.Protocol):
    """Sends its request `rounds` times, and counts the events of the answers."""

    def __init__(self, request: bytes, rounds: int, done: asyncio.Future[None]):
        self._request = request
        self._left = rounds
        self._done = done
        self._tail = b""
        self.events = 0
        self.bytes = 0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.bytes += len(data)
        self.events += data.count(b"data: ")
        self._tail = (self._tail + data)[-32:]
        if b"[DONE]\n\n\r\n0\r\n\r\n" in self._tail:
            self._next()

    def _next(self) -> None:
        self._tail = b""
        self._left -= 1
        if self._left:
            self._transport.write(self._request)
        else:
            self._transport.close()
            self._done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(ConnectionError("the server closed the connection"))


async def _measure(args: argparse.Namespace) -> None:
    server = subprocess.Popen(
        [sys.executable, __file__, "--serve", *sys.argv[1:]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert server.stdin is not None and server.stdout is not None
    port = int(server.stdout.readline().rpartition(":")[2].partition("/")[0])
    loop = asyncio.get_running_loop()
    request = _request(args)
    started, cpu = time.perf_counter(), time.process_time()
    watchers = [
        await loop.create_connection(Watcher, "127.0.0.1", port) for _ in range(args.watchers)
    ]
    clients: list[Client] = []
    dones: list[asyncio.Future[None]] = []
    for _ in range(args.clients):
        done = loop.create_future()
        _, client = await loop.create_connection(
            lambda done=done: Client(request, args.rounds, done), "127.0.0.1", port
        )
        clients.append(client)
        dones.append(done)
    await asyncio.gather(*dones)
    seconds = time.perf_counter() - started
    own = time.process_time() - cpu
    for transport, _ in watchers:
        transport.close()
    output, _ = server.communicate("")
    tokens = args.clients * args.tokens * args.rounds
    server_side = json.loads(output.splitlines()[-1])
    kept = ""
    if args.step_ms:
        busy = server_side["steps"] * args.step_ms / 1000
        kept = f"{busy / (busy + server_side['idle']):.1%} of the device's step rate; "
    print(
        f"{args.route}, {args.clients} clients, step {args.step_ms:g} ms: "
        f"{tokens / seconds:,.0f} tokens/s, {sum(c.events for c in clients):,} events; "
        f"{kept}server {server_side['cpu'] / tokens * 1e6:.0f} us of CPU per token, "
        f"clients {own / tokens * 1e6:.0f}; "
        f"{sum(c.bytes for c in clients) / tokens:.0f} bytes per token"
        + (f"; {sum(w.events for _, w in watchers):,} events watched" if watchers else "")
    )


def _request(args: argparse.Namespace) -> bytes:
    body: dict[str, object] = {
        "max_tokens": args.tokens,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    if args.route == "chat":
        body["messages"] = [{"role": "user", "content": "Hello!"}]
    else:
        body["prompt"] = "Hello!"
    raw = json.dumps(body).encode()
    path = "/v1/chat/completions" if args.route == "chat" else "/v1/completions"
    return (
        f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(raw)}\r\n\r\n"
    ).encode() + raw


if __name__ == "__main__":
    main()

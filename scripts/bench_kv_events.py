"""Measures what KV cache events cost the engine's thread, without a device.

    python scripts/bench_kv_events.py --out events.json

A scheduler runs many decoding sequences, one step ahead; sequences that end are replaced by new
prompts, as on a server. Three kinds of runs take turns: without events, with events, and with a
subscriber that is stopped by a signal and never reads. The time is the processor time of the thread
that plans and commits, because wall time would include waits for other processes. The processor
time of the publisher's threads is shown beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from jaxserve.api import Request, SamplingParams
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.kv_events.config import KVEventsConfig
from jaxserve.kv_events.publisher import ZmqPublisher
from jaxserve.metrics.metrics import Metrics
from jaxserve.plan import Sampled, StepPlan
from jaxserve.scheduler import Scheduler

READER = """
import sys, zmq
socket = zmq.Context().socket(zmq.SUB)
socket.setsockopt_string(zmq.SUBSCRIBE, "")
socket.connect(sys.argv[1])
socket.recv_multipart()
print("reads", flush=True)
sys.stdin.read()
"""


class Turn(NamedTuple):
    """One run over the same requests."""

    step_us: float
    """Mean processor time of the engine's thread per step."""
    other_us: float
    """Mean processor time of all other threads of the process per step."""
    pages: int
    """Pages that were published."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--prompt", type=int, default=1024, help="tokens")
    parser.add_argument("--output", type=int, default=256, help="tokens")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--turns", type=int, default=7, help="turns of each kind")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    turns: dict[str, list[Turn]] = {"without": [], "with": [], "stopped subscriber": []}
    for _ in range(args.turns):
        turns["without"].append(_turn(args, None))
        turns["with"].append(_with_events(args, stopped=False))
        turns["stopped subscriber"].append(_with_events(args, stopped=True))
    result = _result(args, turns)
    print(json.dumps(result["summary"], indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _with_events(args: argparse.Namespace, *, stopped: bool) -> Turn:
    config = KVEventsConfig(
        enable_kv_cache_events=True,
        endpoint="tcp://127.0.0.1:*",
        replay_endpoint="tcp://127.0.0.1:*",
    )
    publisher = ZmqPublisher(config, Metrics("bench"))
    reader = _stopped_reader(publisher.config.endpoint) if stopped else None
    try:
        return _turn(args, publisher)
    finally:
        publisher.close()
        if reader is not None:
            reader.kill()
            reader.communicate()


def _stopped_reader(endpoint: str) -> subprocess.Popen[str]:
    """Starts a process that subscribes, and stops it by a signal."""
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, endpoint],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    time.sleep(2.0)
    reader.send_signal(signal.SIGSTOP)
    return reader


def _turn(args: argparse.Namespace, publisher: ZmqPublisher | None) -> Turn:
    scheduler = _scheduler(args, publisher)
    result, published = Sampled(7), 0
    submitted, in_flight = 0, None
    measured = others = 0.0
    for step in range(-args.output, args.steps):
        while scheduler.num_waiting + scheduler.num_running < args.sequences + 4:
            scheduler.add(_request(args, submitted))
            submitted += 1
        own, process = time.thread_time(), time.process_time()
        plan = scheduler.plan()
        if in_flight is not None:
            scheduler.commit(in_flight, _sampled(in_flight, result))
        own, process = time.thread_time() - own, time.process_time() - process
        in_flight = plan
        if step >= 0:  # negative steps fill the scheduler
            measured += own
            others += process - own
    if publisher is not None:
        published = publisher.num_pages
    return Turn(measured / args.steps * 1e6, others / args.steps * 1e6, published)


def _scheduler(args: argparse.Namespace, publisher: ZmqPublisher | None) -> Scheduler:
    """A scheduler with pages for all sequences, and half as many for cached prefixes."""
    length = args.prompt + args.output
    pages = args.sequences * -(-length // args.page_size) * 3 // 2
    return Scheduler(
        SchedulerConfig(
            max_num_seqs=args.sequences,
            max_model_len=length + 1,
            max_num_batched_tokens=2048,
        ),
        CacheConfig(num_pages=1 + pages, page_size=args.page_size),
        cache_events=None if publisher is None else publisher.publish,
    )


def _request(args: argparse.Namespace, number: int) -> Request:
    """All prompts differ. Sequences end one after the other."""
    short = 1 + number * args.output // args.sequences
    tokens = short if number < args.sequences else args.output
    prompt = (number, *range(args.prompt - 1))
    params = SamplingParams(max_tokens=tokens, stop_token_ids=frozenset({1, 2}))
    return Request(id=f"request-{number}", prompt=prompt, params=params)


def _sampled(plan: StepPlan, result: Sampled) -> list[Sampled | None]:
    return [result if row.samples else None for row in plan.rows]


def _result(args: argparse.Namespace, turns: dict[str, list[Turn]]) -> dict[str, Any]:
    summary: dict[str, dict[str, float]] = {}
    for name, each in turns.items():
        pairs = list(zip(each, turns["without"], strict=True))
        summary[name] = {
            "engine thread per step, us": _median(t.step_us for t in each),
            "more than without, us": _median(t.step_us - w.step_us for t, w in pairs),
            "other threads per step, us": _median(t.other_us for t in each),
        }
    return {
        "command": " ".join(["python", "scripts/bench_kv_events.py", *sys.argv[1:]]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, load {os.getloadavg()[0]:.1f}",
        "settings": {name: each for name, each in vars(args).items() if name != "out"},
        "summary": summary,
        "turns": {name: [turn._asdict() for turn in each] for name, each in turns.items()},
    }


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 1)


if __name__ == "__main__":
    main()

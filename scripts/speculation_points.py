"""Measures and evaluates single points of `bench_speculation.py`."""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from contextlib import AbstractAsyncContextManager
from itertools import batched
from statistics import quantiles
from typing import Any, NamedTuple

import aiohttp
from paired import ratio_of, ratio_of_turns
from speculation_load import Asked, Run, again, closed_loop, counters, goodput
from speculation_server import ARMS, Server


class Point(NamedTuple):
    """A point: its workload and number of clients."""

    workload: str
    clients: int
    prompt_tokens: int


_LEAST, _OFTEN = 8, 4
"""The least pairs of turns, and the pairs between two tests of the ratio's interval."""
_AGAIN = 8
"""Answers of each loop that are requested again without drafts."""


class Bench(NamedTuple):
    """Server, session and settings of the measurements."""

    server: Server
    session: aiohttp.ClientSession
    args: argparse.Namespace

    def loop(self, point: Point, seed: str, arm: str) -> AbstractAsyncContextManager[Run]:
        """A closed loop. Switch the server first."""
        return closed_loop(self.session, self.server.url, self.asked(point), seed, arm)

    async def turn(self, run: Run, arm: str, seconds: float) -> None:
        """Runs a turn with drafts on or off."""
        await self.server.switch(arm)
        run.arm = arm
        await asyncio.sleep(seconds)

    async def goodput(self, arm: str, point: Point, requests: float, seed: str) -> float:
        """Goodput of requests at random times, with drafts on or off."""
        await self.server.switch(arm)
        asked = self.asked(point)
        return await goodput(self.session, self.server.url, asked, requests, self.args, seed=seed)

    async def counters(self) -> dict[str, float]:
        return await counters(self.session, self.server.url)

    def asked(self, point: Point) -> Asked:
        """The load of a point. Each load has its own salt, so it never hits another's prefixes."""
        return Asked(*point, self.args.output_tokens, str(time.monotonic()))


async def compare(bench: Bench, point: Point, precision: float) -> dict[str, Any]:
    """Measures one point: pairs of turns in one running loop, with drafts on and off in random
    order."""
    args, seed = bench.args, f"{point.workload}/{point.clients}"
    order = random.Random(seed)  # a regular one would follow the waves in which answers end
    await bench.server.switch("on")
    async with bench.loop(point, seed, "on") as run:
        await bench.turn(run, "on", args.settle)
        before, known = await bench.counters(), len(bench.server.turns())
        began, turns, pairs = (
            time.perf_counter(),
            list[dict[str, Any]](),
            list[tuple[float, float]](),
        )
        while time.perf_counter() - began < args.seconds and len(run.errors) < 8:
            for _ in range(_OFTEN):
                for arm in order.sample(list(ARMS), 2):
                    await bench.turn(run, arm, args.turn)
            await bench.server.switch("off")  # ends the last turn
            turns = bench.server.turns()[known + 1 :]
            pairs = pairs_of(turns)
            if len(pairs) >= _LEAST and ratio_of_turns(pairs).noise <= precision:
                break
        after = await bench.counters()
    if len(pairs) < 2:
        raise RuntimeError(f"too few turns had steps, see --turn; errors: {run.errors}")
    return {
        **point._asdict(),
        "output_tokens": args.output_tokens,
        "temperature": 0,
        "turn_s": args.turn,
        "pairs": len(pairs),
        **{arm: _of_arm(arm, turns, run) for arm in ARMS},
        "loop": summary({key: value - before.get(key, 0.0) for key, value in after.items()}),
        "errors": run.errors[:3],
        "speedup": ratio_of_turns(pairs)._asdict(),
        **await _compared(bench, point, seed, run),
    }


async def _compared(bench: Bench, point: Point, seed: str, run: Run) -> dict[str, Any]:
    """Compares the last answers of a loop with those without drafts, up to the shorter length."""
    await bench.server.switch("off")
    whole = [number for number, text in sorted(run.texts.items()) if text]
    chosen = whole[-point.clients - _AGAIN :][:_AGAIN]
    asked = bench.asked(point)
    plain = await again(bench.session, bench.server.url, asked, seed, chosen)
    pairs = [(run.texts[number], plain[number]) for number in chosen if plain[number]]
    equal = sum(one[: len(other)] == other[: len(one)] for one, other in pairs)
    return {"compared": len(pairs), "equal": equal / max(len(pairs), 1)}


def pairs_of(turns: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """The speeds of neighbouring turns, (off, on).

    If no step verified, the speed is that of decode steps: expected seconds per second. Otherwise
    the arms run different steps, and it is tokens per second, which also depends on the number of
    prompts in a turn.
    """
    drafted = any(each["verify_steps"] for each in turns)
    done, seconds = ("tokens", "seconds") if drafted else ("expected_s", "decode_s")
    found: list[tuple[float, float]] = []
    for two in batched(turns, 2):
        work = {each["arm"]: each[done] for each in two}
        if len(work) == 2 and all(work.values()):
            speeds = {each["arm"]: work[each["arm"]] / each[seconds] for each in two}
            found.append((speeds["off"], speeds["on"]))
    return found


async def overloaded(bench: Bench, point: Point, args: argparse.Namespace) -> dict[str, Any]:
    """Goodput with drafts on and off in turns, with the same requests at the same times in a
    pair."""
    await bench.server.switch("off")
    async with bench.loop(point, "capacity", "off") as run:
        await bench.turn(run, "off", args.settle)
        await bench.turn(run, "off", args.arrivals)
        await bench.server.switch("off")
        await asyncio.sleep(0.05)
        measured = bench.server.turns()[-1]
    requests = args.load * measured["tokens"] / measured["seconds"] / args.output_tokens
    found: dict[str, list[float]] = {arm: [] for arm in ARMS}
    ratio = None
    while ratio is None or (ratio.noise > 0.01 and len(found["on"]) < args.pairs):
        number = len(found["on"])
        for arm in list(ARMS)[:: 1 if number % 2 == 0 else -1]:
            seed = f"{point.workload}/overload/{number}"
            found[arm].append(await bench.goodput(arm, point, requests, seed))
        if number >= min(2, args.pairs - 1) and min(found["off"]) > 0:
            ratio = ratio_of(list(zip(found["off"], found["on"], strict=True)))
        elif number >= args.pairs - 1:
            break
    result = {
        "workload": point.workload,
        "requests_per_s": round(requests, 3),
        "ttft_s": args.ttft,
        "tpot_s": args.tpot,
        "goodput_tok_per_s": {
            arm: [round(each, 1) for each in runs] for arm, runs in found.items()
        },
        "ratio": ratio and ratio._asdict(),
    }
    print(f"{point.workload:16} overload, {requests:.1f} requests/s: {result['ratio']}", flush=True)
    return result


def _of_arm(arm: str, turns: list[dict[str, Any]], run: Run) -> dict[str, Any]:
    own = [each for each in turns if each["arm"] == arm]
    seconds = sum(each["seconds"] for each in own)
    return {
        "output_tok_per_s": round(sum(each["tokens"] for each in own) / seconds, 1),
        "counted_s": round(seconds, 2),
        "verify_steps": sum(each["verify_steps"] for each in own),
        "step_ms": round(1e3 * seconds / sum(each["steps"] for each in own), 3),
        "ttft_ms": _percentiles(run.ttft[arm]),
        "event_gap_ms": _percentiles(run.gaps[arm]),
    }


def summary(found: dict[str, float]) -> dict[str, Any]:
    """Summarises the server's counters over a loop."""

    def total(name: str, label: str = "") -> float:
        return sum(
            value for key, value in found.items() if key.partition("{")[0] == name and label in key
        )

    prefix = "vllm:spec_decode_num_"
    rows, drafts = total(f"{prefix}drafts_total"), total(f"{prefix}draft_tokens_total")
    accepted = total(f"{prefix}accepted_tokens_total")
    per_place = [
        total(f"{prefix}accepted_tokens_per_pos_total", f'position="{n}"') for n in range(7)
    ]
    return {
        "steps": {kind: total("jaxserve_step_seconds_count", f'kind="{kind}"') for kind in STEPS},
        "late_steps": total("jaxserve_late_steps_total"),
        "draft_rows": rows,
        "accepted_per_draft_row": round(accepted / rows, 3) if rows else 0.0,
        "accepted_share": round(accepted / drafts, 3) if drafts else 0.0,
        "accepted_share_per_position": [round(n / rows, 3) for n in per_place] if rows else [],
        "compiles_while_serving": total("jaxserve_compiles_total", 'phase="serving"'),
    }


STEPS = ("decode", "mixed", "verify")


def _percentiles(seconds: list[float]) -> dict[str, float]:
    if len(seconds) < 2:
        return {}
    cuts = quantiles(seconds, n=100)
    return {name: round(1e3 * cuts[at - 1], 3) for name, at in (("p50", 50), ("p99", 99))}


def line(point: dict[str, Any]) -> str:
    off, on, loop = point["off"], point["on"], point["loop"]
    return (
        f"{point['workload']:16} {point['clients']:4} clients: {off['output_tok_per_s']:8.0f} -> "
        f"{on['output_tok_per_s']:8.0f} tok/s, {point['speedup']['median']:.4f} times "
        f"({point['speedup']['low']:.4f} to {point['speedup']['high']:.4f}, {point['pairs']} pairs)"
        f"; {loop['accepted_per_draft_row']:.2f} accepted a row of {loop['draft_rows']:.0f}; "
        f"{point['equal']:.1%} of {point['compared']} equal"
        f"{'; ERRORS ' + point['errors'][0] if point['errors'] else ''}"
    )

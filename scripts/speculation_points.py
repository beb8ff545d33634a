"""What `bench_speculation.py` measures at a point, and concludes from it."""

from __future__ import annotations

import argparse
import time
from statistics import median, quantiles
from typing import Any, NamedTuple

import aiohttp
from paired import ratio_of
from speculation_load import Asked, Run, drive, goodput
from speculation_server import ARMS, Server


class Point(NamedTuple):
    """What is asked, and by how many."""

    workload: str
    clients: int
    prompt_tokens: int


class Bench(NamedTuple):
    """What measures."""

    server: Server
    session: aiohttp.ClientSession
    args: argparse.Namespace

    async def loop(self, arm: str, point: Point, seconds: float, seed: str) -> Run:
        """A closed loop with drafts on or off."""
        await self.server.switch(arm)
        asked = self._asked(arm, point)
        return await drive(self.session, self.server.url, asked, seconds, seed=seed)

    async def goodput(self, arm: str, point: Point, requests: float, seed: str) -> float:
        """Of requests at random times, with drafts on or off."""
        await self.server.switch(arm)
        asked = self._asked(arm, point)
        return await goodput(self.session, self.server.url, asked, requests, self.args, seed=seed)

    def _asked(self, arm: str, point: Point) -> Asked:
        """No arm finds the other's prompts in the prefix cache."""
        salt = f"{arm} {time.monotonic()}"
        return Asked(*point, self.args.output_tokens, salt)


async def compare(bench: Bench, point: Point, args: argparse.Namespace) -> dict[str, Any]:
    """One point: on and off in turns, with the same requests in each pair."""
    rounds: dict[str, list[Run]] = {arm: [] for arm in ARMS}
    ratio = None
    seconds = args.seconds * (1 if point.clients < 64 else 2)
    while ratio is None or (ratio.noise > args.precision and len(rounds["on"]) < args.pairs):
        number = len(rounds["on"])
        for arm in list(ARMS)[:: 1 if number % 2 == 0 else -1]:
            seed = f"{point.workload}/{point.clients}/{number}"
            rounds[arm].append(await bench.loop(arm, point, seconds, seed))
        if number >= min(2, args.pairs - 1):
            ratio = ratio_of(pairs_of(rounds))
    answers = [
        {(number, key): text for number, run in enumerate(runs) for key, text in run.texts.items()}
        for runs in rounds.values()
    ]
    pairs = [(answers[0][key], answers[-1][key]) for key in answers[0].keys() & answers[-1].keys()]
    pairs = [(one[: len(other)], other[: len(one)]) for one, other in pairs if one and other]
    return {
        **point._asdict(),
        "output_tokens": args.output_tokens,
        "temperature": 0,
        **{arm: summary(runs) for arm, runs in rounds.items()},
        "speedup": ratio._asdict(),
        "compared": len(pairs),
        "equal": sum(one == other for one, other in pairs) / max(len(pairs), 1),
    }


async def overloaded(bench: Bench, point: Point, args: argparse.Namespace) -> dict[str, Any]:
    """Goodput on and off in turns, with the same requests at the same times in each pair."""
    run = await bench.loop("off", point, 2 * args.seconds, "capacity")
    if not rate([run]):
        raise RuntimeError(f"nothing was generated: {run.errors}")
    requests = args.load * rate([run]) / args.output_tokens
    found: dict[str, list[float]] = {arm: [] for arm in ARMS}
    ratio = None
    while ratio is None or (ratio.noise > args.precision and len(found["on"]) < args.pairs):
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

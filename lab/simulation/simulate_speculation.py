"""Drafts looked up over plain decoding, with the real scheduler on simulated time.

    python -m lab.simulation.simulate_speculation --output speculation_simulated.json
    python -m lab.simulation.simulate_speculation --times STEP_TIMES.json --texts fresh

Closed loops of 1 to 256 clients, and overload: requests come at random times, at several rates
around what plain decoding completes with all slots taken. Goodput counts the tokens of answers
whose first token came within `--ttft` seconds and the others within `--tpot` on average. Both arms
get the same requests at the same times; a ratio is that of the sums over `--seeds` seeds, and its
interval holds it in 95 of 100 draws of as many seeds (bootstrap).

Beside drafts that are looked up, those of heads, of which nothing was trained here: how many tokens
a row yields is what the DSpark paper publishes for Qwen3-4B (`PUBLISHED`), as if each draft were as
probable as the others, and what the head takes is arithmetic. So their points say what the
scheduler makes of such a head, and nothing of a head.

The device knows each answer. So drafts are right where the text says so, and times are those of the
table and nothing else: what looking up costs the host's thread is not in them.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from jaxserve.scheduler.speculation.head import HeadDrafts
from jaxserve.scheduler.speculation.lookup import Lookup
from jaxserve.scheduler.verify import Verification
from jaxserve.startup.buckets import GPU_VERIFY
from jaxserve.step_times import StepTimes, VerifyTime
from lab.simulation.text_device import Text, goodput, serve

MEASUREMENTS = Path(__file__).parents[1] / "measurements"
TIMES = MEASUREMENTS / "step_times_verify_h200.json"
"""Of Qwen3-4B on an H200, by the start of the server of `scripts/bench_speculation.py`."""
CLIENTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SLOTS = (8, 32, 64, 256)
LOADS = (0.9, 1.5, 3.0)
"""Requests over those that plain decoding completes."""
PROMPT, ANSWER = 250, 200
"""Tokens on average."""
_DRAWS = 2000


class Head(NamedTuple):
    """A draft head for Qwen3-4B."""

    name: str
    text: str
    """What it was measured with."""
    tokens: float
    """Of a row with seven drafts, on average, as published: deepseek-ai/DeepSpec, the paper's table
    1, at temperature 1."""
    seconds: float
    """Of its passes in a verify step, for weights that are read at 4.1 TB/s."""


PUBLISHED = (
    Head("eagle3", "MT-Bench", 2.39, 0.7e-3),
    Head("eagle3", "GSM8K", 5.14, 0.7e-3),
    Head("dspark", "MT-Bench", 3.64, 0.6e-3),
    Head("dspark", "GSM8K", 6.11, 0.6e-3),
)
_DRAFTS = 7


def acceptance(tokens: float, drafts: int = _DRAFTS) -> float:
    """Returns the probability of each draft after those before it, with which a row yields so many
    tokens: (1 - p^(drafts + 1)) / (1 - p)."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        found = sum(middle**place for place in range(drafts + 1))
        low, high = (middle, high) if found < tokens else (low, middle)
    return low


def _tokens(draw: random.Random, count: int, spread: float) -> list[int]:
    """`count` on average, from `1 - spread` to `1 + spread` of them."""
    count = round(count * (1 + draw.uniform(-spread, spread)))
    return [draw.randrange(10**5) for _ in range(count)]


def copying(draw: random.Random, every: int, spread: float = 0.0) -> Text:
    """An answer that the prompt holds, with one token of `every` changed."""
    answer = _tokens(draw, ANSWER, spread)
    shown = [-1 - n if n % every == every - 1 else token for n, token in enumerate(answer)]
    prompt = [*(abs(token) for token in shown), *(draw.randrange(10**5) for _ in range(60))]
    return (*prompt, answer[0]), tuple(answer[1:])


def fresh(draw: random.Random, spread: float = 0.0) -> Text:
    """An answer that no token of the prompt helps with."""
    return tuple(_tokens(draw, PROMPT, spread)), tuple(_tokens(draw, ANSWER, spread))


def misleading(draw: random.Random, spread: float = 0.0) -> Text:
    """The prompt has pieces of the answer, each followed by something else."""
    answer = _tokens(draw, ANSWER, spread)
    pieces = [answer[n : n + 5] for n in range(0, len(answer), 5)]
    draw.shuffle(pieces)
    prompt = [token for piece in pieces for token in (*piece, draw.randrange(10**5))]
    return tuple(prompt), tuple(answer)


def texts(spread: float = 0.0) -> dict[str, Callable[[random.Random], Text]]:
    """What draws requests of each kind. Without a spread of lengths, clients march in step."""
    return {
        "edits": lambda draw: copying(draw, 24, spread),
        "many edits": lambda draw: copying(draw, 8, spread),
        "fresh": lambda draw: fresh(draw, spread),
        "misleading": lambda draw: misleading(draw, spread),
        "any": lambda draw: draw.choice(
            [
                lambda draw: fresh(draw, spread),
                lambda draw: misleading(draw, spread),
                lambda draw: copying(draw, 16, spread),
            ]
        )(draw),
    }


def looking_up() -> Verification:
    """What a server does unless told otherwise."""
    return Verification(proposer=Lookup(drafts=7), buckets=GPU_VERIFY)


class Interval(NamedTuple):
    """A ratio of sums over seeds."""

    ratio: float
    low: float
    high: float


def ratio_of(pairs: Sequence[tuple[float, float]]) -> Interval:
    """Of the second values to the first; see the module's first lines."""

    def ratio(found: Sequence[tuple[float, float]]) -> float:
        return sum(on for _, on in found) / max(sum(off for off, _ in found), 1e-9)

    draw = random.Random(0)
    ratios = sorted(ratio(draw.choices(pairs, k=len(pairs))) for _ in range(_DRAWS))
    low, high = ratios[_DRAWS // 40], ratios[-_DRAWS // 40]
    return Interval(*(round(each, 4) for each in (ratio(pairs), low, high)))


def closed_loops(args: argparse.Namespace, times: StepTimes) -> list[dict[str, Any]]:
    """Tokens per second on over off, by text and clients."""
    points: list[dict[str, Any]] = []
    for name in args.texts:
        for clients in args.clients:
            pairs: list[tuple[float, float]] = []
            verify_steps = 0
            for seed in range(args.seeds):
                off, on = (
                    serve(
                        texts(args.spread)[name],
                        times,
                        arm,
                        clients=clients,
                        steps=args.steps,
                        seed=seed,
                    )
                    for arm in (None, looking_up())
                )
                pairs.append((off.rate, on.rate))
                verify_steps += on.verify_steps
            found = {"text": name, "clients": clients, **ratio_of(pairs)._asdict()}
            found["off_tok_per_s"] = round(sum(off for off, _ in pairs) / len(pairs), 1)
            found["verify_steps"] = round(verify_steps / (args.seeds * args.steps), 4)
            points.append(found)
            print(found, flush=True)
    return points


def overload(args: argparse.Namespace, times: StepTimes) -> list[dict[str, Any]]:
    """Goodput on over off, by text, slots and load."""
    points: list[dict[str, Any]] = []
    for name in args.texts:
        for slots in args.slots:
            plain = serve(
                texts(args.spread)[name], times, None, clients=slots, steps=args.steps, seed=0
            )
            for load in args.loads:
                requests = load * plain.rate / ANSWER

                def good(
                    verification: Verification | None,
                    seed: int,
                    name: str = name,
                    slots: int = slots,
                    requests: float = requests,
                ) -> float:
                    return goodput(
                        *(texts(args.spread)[name], times, verification),
                        slots=slots,
                        requests_per_s=requests,
                        seconds=args.seconds,
                        ttft=args.ttft,
                        tpot=args.tpot,
                        seed=seed,
                    )[0]

                pairs = [(good(None, seed), good(looking_up(), seed)) for seed in range(args.seeds)]
                found = {"text": name, "slots": slots, "load": load, **ratio_of(pairs)._asdict()}
                found["requests_per_s"] = round(requests, 2)
                found["off_tok_per_s"] = round(sum(off for off, _ in pairs) / len(pairs), 1)
                points.append(found)
                print(found, flush=True)
    return points


def heads(args: argparse.Namespace, times: StepTimes) -> list[dict[str, Any]]:
    """Tokens per second of fresh text with a head over those without."""
    points: list[dict[str, Any]] = []
    for head in PUBLISHED:
        verify = {
            shape: VerifyTime(time.seconds + head.seconds, time.per_context)
            for shape, time in times.verify.items()
        }
        slower, right = replace(times, verify=verify), acceptance(head.tokens)
        for clients in args.clients:
            pairs: list[tuple[float, float]] = []
            for seed in range(args.seeds):
                own = (texts(args.spread)["fresh"], clients, args.steps, seed)
                drafting = HeadDrafts(drafts=_DRAFTS)
                arm = Verification(
                    proposer=drafting, buckets=GPU_VERIFY, observe=drafting.observe, room=_DRAFTS
                )
                on = _loop(*own, slower, arm, right)
                pairs.append((_loop(*own, times, None, 0.0), on))
            found = {"head": head.name, "text": head.text, "tokens_published": head.tokens}
            points.append({**found, "clients": clients, **ratio_of(pairs)._asdict()})
            print(points[-1], flush=True)
    return points


def _loop(
    text: Callable[[random.Random], Text],
    clients: int,
    steps: int,
    seed: int,
    times: StepTimes,
    verification: Verification | None,
    accepted: float,
) -> float:
    """Tokens per second of a closed loop."""
    own = serve(
        text, times, verification, clients=clients, steps=steps, seed=seed, accepted=accepted
    )
    return own.rate


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    def of[T](kind: Callable[[str], T]) -> Callable[[str], list[T]]:
        return lambda text: [kind(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--times", type=Path, default=TIMES, help="a table of step times, with verify steps")
    add("--parts", type=of(str), default=["closed_loops", "heads", "overload"])
    add("--texts", type=of(str), default=["edits", "fresh", "misleading", "any"])
    add("--clients", type=of(int), default=list(CLIENTS))
    add("--slots", type=of(int), default=list(SLOTS))
    add("--loads", type=of(float), default=list(LOADS))
    add("--steps", type=int, default=1000, help="of each closed loop")
    add("--seconds", type=float, default=8.0, help="of each overload")
    add("--spread", type=float, default=0.5, help="of lengths, as a share")
    add("--seeds", type=int, default=5)
    add("--ttft", type=float, default=3.0, help="seconds")
    add("--tpot", type=float, default=0.03, help="seconds")
    add("--output", type=Path, help="write JSON")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    began, times = time.process_time(), StepTimes.load(args.times)
    table = json.loads(args.times.read_text())
    result: dict[str, Any] = {
        "simulated": True,
        "card": table.get("card"),
        "model": table.get("model"),
        "step_times": args.times.name,
        "note": table.get("note"),
        **{
            name: getattr(args, name)
            for name in ("steps", "seconds", "seeds", "spread", "ttft", "tpot")
        },
    }
    for part in args.parts:
        result[part] = {"closed_loops": closed_loops, "heads": heads, "overload": overload}[part](
            args, times
        )
    result["cpu_s"] = round(time.process_time() - began, 1)
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

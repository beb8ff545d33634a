"""The traffic of a published study of one GPU under mixed load, and who of it was served well.

Short and long prompts with short and long answers (`datavorous/to-fa`). Prompts are unique, or
`replayed` as the study's were.
"""

from __future__ import annotations

import dataclasses
import math
import random

from jaxserve.api import Request, SamplingParams
from lab.simulation.simulator import STOP, Arrival, Outcome

PATIENCE = 180.0
"""Seconds after which a client leaves."""

CLASSES = {
    # share, prompt tokens, output tokens, max_tokens: the ranges that the study observed and asked
    "siso": (0.414, (44, 101), (30, 120), (128, 512)),
    "silo": (0.103, (137, 157), (800, 1500), (2048, 3072)),
    "liso": (0.276, (481, 4594), (40, 250), (64, 256)),
    "lilo": (0.207, (555, 4665), (900, 2000), (1024, 2048)),
}

SHORT_ANSWERS = ("siso", "liso")

LONG_PROMPTS = ("liso", "lilo")

FILES = (420, 1240, 2070, 2890, 3720, 4530)
"""Tokens of the study's six source files. It tells the shortest and the longest prompt; that the
others lie evenly between them is chosen."""
TASKS = 8
SYSTEM_TOKENS, TASK_TOKENS = 40, 22


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """What is sent, and to what."""

    rate: float
    count: int
    seed: int
    slo: str
    """study or strict."""
    diurnal: bool = False
    """The rate is the mean of a day that begins at midnight; 1.8 times as much at 4 in the
    afternoon, a fifth at 4 at night."""
    replayed: bool = False
    """Long prompts are one of FILES with one of TASKS after it: 48 for each class."""


def traffic(load: Load, *, deadlines: bool) -> list[Arrival]:
    """Poisson arrivals. `deadlines`: they tell their limits, as by `x-slo-ttft-ms` and
    `x-slo-e2e-ms`; nothing else depends on it."""
    rng = random.Random(load.seed)
    names, weights = list(CLASSES), [shape[0] for shape in CLASSES.values()]
    arrivals: list[Arrival] = []
    now = 0.0
    for number in range(load.count):
        now += rng.expovariate(load.rate * (_time_of_day(now) if load.diurnal else 1.0))
        kind = rng.choices(names, weights)[0]
        _, prompt, output, most = CLASSES[kind]
        asked = rng.randint(*most)
        params = SamplingParams(max_tokens=asked, stop_token_ids=frozenset({STOP}))
        request = Request(
            id=f"{kind}-{number}",
            prompt=_replayed(kind, rng)
            if load.replayed and kind in LONG_PROMPTS
            else (number,) * rng.randint(*prompt),
            params=params,
            priority=0 if kind in SHORT_ANSWERS else 1,
            ttft_slo=ttft_limit(kind, load.slo) if deadlines else None,
            e2e_slo=PATIENCE if deadlines else None,
        )
        length = min(rng.randint(*output), asked)
        arrivals.append(
            Arrival(at=now, request=request, output=length, kind=kind, patience=PATIENCE)
        )
    return arrivals


def _replayed(kind: str, rng: random.Random) -> tuple[int, ...]:
    """The class's system prompt, a file and a task. Negative: no prompt's own token is."""
    file, task = rng.randrange(len(FILES)), rng.randrange(TASKS)
    system = (-1 - LONG_PROMPTS.index(kind),) * SYSTEM_TOKENS
    return system + (-10 - file,) * FILES[file] + (-20 - task,) * TASK_TOKENS


def _time_of_day(seconds: float) -> float:
    """The rate over its mean."""
    return 1 - 0.8 * math.cos(2 * math.pi * (seconds / 3600 - 4) / 24)


def ttft_limit(kind: str, slo: str) -> float | None:
    """Seconds."""
    if slo == "strict":
        return 0.5
    return 5.0 if kind in SHORT_ANSWERS else None


def is_good(outcome: Outcome, slo: str) -> bool:
    if not outcome.finished or outcome.ttft is None:
        return False
    limit = ttft_limit(outcome.arrival.kind, slo)
    if limit is not None and outcome.ttft > limit:
        return False
    if slo == "strict":
        return outcome.tpot is None or outcome.tpot <= 0.05
    if outcome.arrival.kind in SHORT_ANSWERS:
        return True
    gaps = sorted(b - a for a, b in zip(outcome.tokens, outcome.tokens[1:], strict=False))
    return not gaps or gaps[int(0.95 * (len(gaps) - 1))] <= 0.25

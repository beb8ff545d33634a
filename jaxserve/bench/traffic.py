"""The content of requests: classes of prompt and output lengths, and the prompts themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Range = tuple[float, float]
"""A range that includes both ends."""


@dataclass(frozen=True, kw_only=True)
class Slo:
    """Limits for a class of requests, in seconds, inclusive; None: no limit."""

    ttft: float | None = None
    itl_p95: float | None = None
    """95th percentile of one request's inter-token times."""
    tpot: float | None = None


STRICT = Slo(ttft=0.5, tpot=0.05)
"""Strict limits, the same for every class: TTFT 500 ms, TPOT 50 ms."""


@dataclass(frozen=True, kw_only=True)
class TrafficClass:
    """Requests of one kind. Lengths are tokens, drawn uniformly."""

    name: str
    share: float
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    temperature: Range
    slo: Slo


STUDY = (
    TrafficClass(
        name="siso",
        share=300,
        prompt_tokens=(44, 101),
        output_tokens=(128, 512),
        temperature=(0.5, 1.0),
        slo=Slo(ttft=5.0),
    ),
    TrafficClass(
        name="silo",
        share=75,
        prompt_tokens=(137, 157),
        output_tokens=(2048, 3072),
        temperature=(0.1, 0.4),
        slo=Slo(itl_p95=0.25),
    ),
    TrafficClass(
        name="liso",
        share=200,
        prompt_tokens=(481, 4594),
        output_tokens=(64, 256),
        temperature=(0.2, 0.2),
        slo=Slo(ttft=5.0),
    ),
    TrafficClass(
        name="lilo",
        share=150,
        prompt_tokens=(555, 4665),
        output_tokens=(1024, 2048),
        temperature=(0.2, 0.2),
        slo=Slo(itl_p95=0.25),
    ),
)
"""Short or long prompts with short or long outputs: chat, code from a brief, review, refactoring.

Shares, prompt lengths and `max_tokens` are those of the mixed-traffic study
(github.com/datavorous/to-fa); `share` is its number of requests. That study's prompts repeated a
few files; these are all different.
"""


def fixed(prompt_tokens: int, output_tokens: int) -> TrafficClass:
    """Returns one class of equal requests with greedy sampling."""
    return TrafficClass(
        name="fixed",
        share=1,
        prompt_tokens=(prompt_tokens, prompt_tokens),
        output_tokens=(output_tokens, output_tokens),
        temperature=(0.0, 0.0),
        slo=STRICT,
    )


def scaled(kind: TrafficClass, factor: float) -> TrafficClass:
    """Returns the class with prompts and answers scaled by `factor`."""

    def times(lengths: tuple[int, int]) -> tuple[int, int]:
        shortest, longest = (max(1, int(length * factor)) for length in lengths)
        return shortest, longest

    return replace(
        kind, prompt_tokens=times(kind.prompt_tokens), output_tokens=times(kind.output_tokens)
    )


class Prompt(NamedTuple):
    """The content of a request. `prompt` is text, or token ids for the completions endpoint."""

    traffic_class: str
    prompt: str | list[int]
    prompt_tokens: int
    """The requested length. For text, the server's count is authoritative."""
    output_tokens: int
    temperature: float


class TraceEntry(NamedTuple):
    """One line of a trace: a time and a request."""

    time: float
    prompt: Prompt


@dataclass(frozen=True, kw_only=True)
class Content:
    """How to make prompts."""

    kind: str = "tokens"
    """`tokens`: random ids; `text`: random words."""
    max_token_id: int = 150_000
    shared_prefix_tokens: int = 0
    shared_prefix_share: float = 1.0
    """Share of requests that begin with the common prefix of their class, if it has one."""


def generate(classes: Sequence[TrafficClass], content: Content, seed: int) -> Iterator[Prompt]:
    """Yields requests without end. Equal seeds give equal requests; different seeds share no
    prompt."""
    rng = np.random.default_rng(seed)
    total = sum(each.share for each in classes)
    weights = [each.share / total for each in classes]
    prefixes = {
        each.name: rng.integers(0, content.max_token_id, content.shared_prefix_tokens).tolist()
        for each in classes
    }
    while True:
        kind = classes[int(rng.choice(len(classes), p=weights))]
        count = int(rng.integers(*kind.prompt_tokens, endpoint=True))
        shared = prefixes[kind.name] if rng.random() < content.shared_prefix_share else []
        ids = [*shared, *rng.integers(0, content.max_token_id, count).tolist()]
        yield Prompt(
            traffic_class=kind.name,
            prompt=ids if content.kind == "tokens" else words(ids),
            prompt_tokens=len(ids),
            output_tokens=int(rng.integers(*kind.output_tokens, endpoint=True)),
            temperature=round(float(rng.uniform(*kind.temperature)), 2),
        )


_SYLLABLES = ("ka", "lo", "mi", "ren", "tas", "vo", "shi", "dar", "el", "un")


def words(numbers: Sequence[int]) -> str:
    """Returns a text of one made-up word per number. A word has one or two tokens in most
    tokenizers."""
    return " ".join(_SYLLABLES[number % 10] + _SYLLABLES[number // 10 % 10] for number in numbers)


def read_trace(path: Path, content: Content, seed: int) -> list[TraceEntry]:
    """Reads a JSONL trace with one object per request. Returns it sorted by time.

    Keys: `time` (seconds from the start), `prompt_tokens` or `prompt`, `output_tokens`, and
    optionally `class` and `temperature`. If a line has no `prompt`, a prompt is made up.

    Raises:
      ValueError: the file is empty, or a line is not such an object; the message names it.
    """
    rng = np.random.default_rng(seed)
    entries: list[TraceEntry] = []
    for number, line in enumerate(path.read_text().split("\n"), start=1):
        if not line.strip():
            continue
        try:
            entries.append(_trace_entry(json.loads(line), content, rng))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path}, line {number}: {error!r}; each line needs time, output_tokens and "
                "prompt_tokens or prompt"
            ) from error
    if not entries:
        raise ValueError(f"{path} holds no requests")
    return sorted(entries, key=lambda entry: entry.time)


def _trace_entry(line: dict[str, Any], content: Content, rng: np.random.Generator) -> TraceEntry:
    prompt = line.get("prompt")
    if prompt is None:
        ids = rng.integers(0, content.max_token_id, int(line["prompt_tokens"])).tolist()
        prompt = ids if content.kind == "tokens" else words(ids)
    count = line.get("prompt_tokens") or (len(prompt) if isinstance(prompt, list) else 0)
    return TraceEntry(
        float(line["time"]),
        Prompt(
            traffic_class=str(line.get("class", "trace")),
            prompt=prompt,
            prompt_tokens=int(count),
            output_tokens=int(line["output_tokens"]),
            temperature=float(line.get("temperature", 0.0)),
        ),
    )


def with_slo(classes: Sequence[TrafficClass], slo_set: str) -> tuple[TrafficClass, ...]:
    """Returns the classes with their own limits ("study") or the strict ones ("strict")."""
    if slo_set == "strict":
        return tuple(replace(each, slo=STRICT) for each in classes)
    return tuple(classes)

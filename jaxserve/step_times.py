"""How long a step takes: what the scheduler weighs its choices by.

Measured on the card that serves (`startup/measure.py`), or read from a file for the simulator.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxserve.plan import StepPlan


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds of a step, as a sum: its bucket, what its rows are, and what attention reads."""

    decode: Mapping[int, float]
    """Of each decode bucket, by rows, with next to no context."""
    mixed: Mapping[int, float]
    """Of each mixed bucket, by tokens, full of one chunk without context before it."""
    decode_context: float = 0.0
    """Of a decode step, per token of context of all its rows together."""
    mixed_row: float = 0.0
    """Of a mixed step, per decode row."""
    mixed_context: float = 0.0
    """Of a mixed step, per token of context of its decode rows together."""
    chunk_pair: float = 0.0
    """Of a mixed step, per token of a chunk and token of context before that chunk."""
    chunk_depth: float = 0.0
    """Of a mixed step, per token of context before its deepest chunk, where that is more: the
    part of attention that is done one after the other, however few tokens the chunk has."""

    def of_decode(self, rows: int, context: int) -> float:
        """A step of `rows` decode rows that have `context` tokens together."""
        base, per_token = self.decode_line(rows)
        return base + context * per_token

    def decode_line(self, rows: int) -> tuple[float, float]:
        """Of a step of `rows` decode rows: without context, and per token of context."""
        return self.decode[_bucket(self._decode_sizes, rows)], self.decode_context

    def of_mixed(
        self, tokens: int, rows: int = 0, context: int = 0, pairs: int = 0, depth: int = 0
    ) -> float:
        """A step of `tokens` tokens, `rows` of which are decode rows with `context` tokens.

        `pairs`: over its chunks, the sum of tokens computed times tokens before the chunk;
        `depth`: the most tokens before any of them.
        """
        bucket = self.mixed[_bucket(self._mixed_sizes, tokens)]
        return bucket + self.beyond_bucket(rows, context, pairs, depth)

    def beyond_bucket(self, rows: int, context: int, pairs: int, depth: int) -> float:
        """What a mixed step of any bucket takes for its decode rows and for its context."""
        return (
            rows * self.mixed_row
            + context * self.mixed_context
            + max(pairs * self.chunk_pair, depth * self.chunk_depth)
        )

    @cached_property
    def _decode_sizes(self) -> list[int]:
        return list(self.decode)

    @cached_property
    def _mixed_sizes(self) -> list[int]:
        return list(self.mixed)

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second, of the best bucket without context."""
        return max(size / seconds for size, seconds in self.mixed.items())

    def of(self, plan: StepPlan) -> float:
        """A planned step."""
        chunks = [row for row in plan.rows if row.tokens]
        context = sum(row.start for row in plan.rows if not row.tokens)
        if not chunks:
            return self.of_decode(len(plan.rows), context)
        pairs = sum(row.start * row.num_tokens for row in chunks)
        depth = max(row.start for row in chunks)
        rows = len(plan.rows) - len(chunks)
        return self.of_mixed(plan.num_tokens, rows, context, pairs, depth)

    def described(self) -> str:
        """What decides about chunks, in a line."""

        def by_size(times: Mapping[int, float]) -> str:
            return ", ".join(f"{size}: {1e3 * seconds:.2f}" for size, seconds in times.items())

        row = self.mixed_row + 1024 * self.mixed_context
        return (
            f"decode {by_size(self.decode)} ms; mixed {by_size(self.mixed)} ms; 1,024 tokens of a "
            f"decode row's context {1024e6 * self.decode_context:.1f} µs, such a row in a mixed "
            f"step {1e6 * row:.1f} µs, {1e6 * self.mixed_row:.1f} of them without context"
        )

    def save(self, path: Path, **described: Any) -> None:
        """As JSON, with whatever says where it comes from."""
        path.write_text(json.dumps({**described, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> StepTimes:
        data = json.loads(path.read_text())
        rest = ("decode_context", "mixed_row", "mixed_context", "chunk_pair", "chunk_depth")
        return cls(
            decode={int(size): float(seconds) for size, seconds in data["decode"].items()},
            mixed={int(size): float(seconds) for size, seconds in data["mixed"].items()},
            **{name: float(data[name]) for name in rest},
        )


def _bucket(sizes: list[int], need: int) -> int:
    """The smallest of the (increasing) sizes that holds `need`; the largest if none does."""
    return sizes[min(bisect_left(sizes, need), len(sizes) - 1)]

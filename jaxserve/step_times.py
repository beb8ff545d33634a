"""Step times: the seconds of a step by its bucket, rows and context.

`startup/measure.py` measures them on the GPU that serves. The simulator reads them from a file.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from jaxserve.plan import StepPlan


class VerifyTime(NamedTuple):
    """The time of the steps in a verify bucket."""

    seconds: float
    """Seconds of a step with almost no context."""
    per_context: float
    """Seconds per token of context, summed over its rows."""


type VerifyShape = tuple[int, int]
"""Rows of a verify bucket, and positions per row."""


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Predicts the seconds of a step as a sum: the bucket, the decode rows and the context read."""

    decode: Mapping[int, float]
    """Seconds of each decode bucket with almost no context, by rows."""
    mixed: Mapping[int, float]
    """Seconds of each mixed bucket, by tokens. One chunk without earlier context fills the
    bucket."""
    verify: Mapping[VerifyShape, VerifyTime] = field(default_factory=dict[VerifyShape, VerifyTime])
    """The time of each verify bucket."""
    decode_context: float = 0.0
    """Seconds of a decode step per token of context, summed over its rows."""
    mixed_row: float = 0.0
    """Seconds of a mixed step per decode row."""
    mixed_context: float = 0.0
    """Seconds of a mixed step per token of context of its decode rows."""
    chunk_pair: float = 0.0
    """Seconds of a mixed step per pair of a chunk's token and a token of context before it."""
    chunk_depth: float = 0.0
    """Seconds of a mixed step per token of context before its deepest chunk. It applies where it
    exceeds the `chunk_pair` term. It is the serial part of attention and does not depend on chunk
    size."""

    def of_decode(self, rows: int, context: int) -> float:
        """Returns the seconds of `rows` decode rows with `context` tokens of context together."""
        base, per_token = self.decode_line(rows)
        return base + context * per_token

    def decode_line(self, rows: int) -> tuple[float, float]:
        """Returns the seconds of `rows` decode rows: without context, and per token of context."""
        return self.decode[_bucket(self._decode_sizes, rows)], self.decode_context

    def of_mixed(
        self, tokens: int, rows: int = 0, context: int = 0, pairs: int = 0, depth: int = 0
    ) -> float:
        """Returns the seconds of a mixed step.

        Args:
          tokens: all tokens of the step.
          rows: decode rows among them.
          context: tokens of context of all decode rows together.
          pairs: sum over the chunks of tokens computed times tokens before the chunk.
          depth: the most tokens before any chunk.
        """
        bucket = self.mixed[_bucket(self._mixed_sizes, tokens)]
        return bucket + self.beyond_bucket(rows, context, pairs, depth)

    def beyond_bucket(self, rows: int, context: int, pairs: int, depth: int) -> float:
        """Returns the seconds that decode rows and context add to a mixed bucket."""
        return (
            rows * self.mixed_row
            + context * self.mixed_context
            + max(pairs * self.chunk_pair, depth * self.chunk_depth)
        )

    def verify_shape(self, rows: int, positions: int) -> VerifyShape | None:
        """Returns the verify bucket that the runner uses for these rows and positions: the one with
        the fewest positions in total. None if no bucket is large enough."""
        return next((s for s in self._verify_shapes if rows <= s[0] and positions <= s[1]), None)

    @cached_property
    def _verify_shapes(self) -> list[VerifyShape]:
        return sorted(self.verify, key=lambda shape: (shape[0] * shape[1], shape[0]))

    @cached_property
    def _decode_sizes(self) -> list[int]:
        return list(self.decode)

    @cached_property
    def _mixed_sizes(self) -> list[int]:
        return list(self.mixed)

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second in the fastest bucket, without context."""
        return max(size / seconds for size, seconds in self.mixed.items())

    def of(self, plan: StepPlan) -> float:
        """Returns the predicted seconds of a plan."""
        context = sum(row.start for row in plan.rows if not row.tokens)
        if plan.verify:
            time = self.verify[self.shape_of(plan)]
            return time.seconds + context * time.per_context
        chunks = [row for row in plan.rows if row.tokens]
        if not chunks:
            return self.of_decode(len(plan.rows), context)
        pairs = sum(row.start * row.num_tokens for row in chunks)
        depth = max(row.start for row in chunks)
        rows = len(plan.rows) - len(chunks)
        return self.of_mixed(plan.num_tokens, rows, context, pairs, depth)

    def shape_of(self, plan: StepPlan) -> VerifyShape:
        """Returns the bucket of a verify plan."""
        shape = self.verify_shape(len(plan.rows), max(row.num_tokens for row in plan.rows))
        assert shape is not None, "a plan that no bucket holds was launched"
        return shape

    def described(self) -> str:
        """Returns the times that decide chunk sizes, as one line for the log."""

        def by_size(times: Mapping[Any, float]) -> str:
            return ", ".join(f"{size}: {1e3 * seconds:.2f}" for size, seconds in times.items())

        row = self.mixed_row + 1024 * self.mixed_context
        verify = by_size({_name(shape): time.seconds for shape, time in self.verify.items()})
        parts = [
            f"decode step by rows: {by_size(self.decode)} ms",
            f"mixed step by tokens: {by_size(self.mixed)} ms",
            *([f"verify step by rows and positions: {verify} ms"] if verify else []),
            f"1,024 tokens of a row's context add {1024e6 * self.decode_context:.1f} µs to a "
            f"decode step; a decode row in a mixed step adds {1e6 * self.mixed_row:.1f} µs, with "
            f"1,024 tokens {1e6 * row:.1f} µs",
        ]
        return "; ".join(parts)

    def save(self, path: Path, **described: Any) -> None:
        """Writes JSON. `described` says where the times come from."""
        verify = {_name(shape): time for shape, time in self.verify.items()}
        content = {**described, **asdict(self), "verify": verify}
        path.write_text(json.dumps(content, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> StepTimes:
        data = json.loads(path.read_text())
        verify: dict[str, list[float]] = data.get("verify", {})
        rest = ("decode_context", "mixed_row", "mixed_context", "chunk_pair", "chunk_depth")
        return cls(
            decode={int(size): float(seconds) for size, seconds in data["decode"].items()},
            mixed={int(size): float(seconds) for size, seconds in data["mixed"].items()},
            verify={_shape(name): _verify_time(time) for name, time in verify.items()},
            **{name: float(data[name]) for name in rest},
        )


def _bucket(sizes: list[int], need: int) -> int:
    """Returns the smallest of the increasing sizes that holds `need`, or the largest size."""
    return sizes[min(bisect_left(sizes, need), len(sizes) - 1)]


def _name(shape: VerifyShape) -> str:
    return "{}x{}".format(*shape)


def _shape(name: str) -> VerifyShape:
    rows, _, positions = name.partition("x")
    return int(rows), int(positions)


def _verify_time(numbers: list[float]) -> VerifyTime:
    seconds, per_context = numbers
    return VerifyTime(float(seconds), float(per_context))

"""Records of requests and their outcomes. Times are seconds from the start of the run."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from enum import StrEnum

from jaxserve.bench.traffic import Slo


class Outcome(StrEnum):
    """How a request ended. Every outcome except COMPLETED is a miss in every percentage."""

    COMPLETED = "completed"
    SHED = "shed"
    """The server refused the request: 429 or 503."""
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    UNFINISHED = "unfinished"
    """The request was still running when the run ended."""


@dataclass(kw_only=True)
class Record:
    """One request."""

    id: int
    traffic_class: str
    intended: float
    """Intended send time. Latencies count from here."""
    prompt_tokens: int
    max_tokens: int
    sent: float | None = None
    token_times: list[float] = field(default_factory=list)
    """Arrival of each chunk that carries output."""
    output_tokens: int = 0
    cached_tokens: int = 0
    outcome: Outcome = Outcome.UNFINISHED
    error: str | None = None

    @property
    def send_lag(self) -> float | None:
        """Seconds from the intended to the real send time; None if nothing was sent."""
        return None if self.sent is None else self.sent - self.intended

    @property
    def ttft(self) -> float | None:
        """Seconds from the intended send time to the first token; None without one."""
        return self.token_times[0] - self.intended if self.token_times else None

    @property
    def e2e(self) -> float | None:
        """Seconds from the intended send time to the last token; None without one."""
        return self.token_times[-1] - self.intended if self.token_times else None

    @property
    def tpot(self) -> float | None:
        """Mean time per output token after the first; None for fewer than two tokens."""
        if self.output_tokens < 2 or len(self.token_times) < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Inter-token times: gaps between chunks."""
        times = self.token_times
        return [after - before for before, after in itertools.pairwise(times)]

    def meets(self, slo: Slo) -> bool:
        """Whether it completed within all limits. One token has no inter-token time."""
        if self.outcome is not Outcome.COMPLETED or self.ttft is None:
            return False
        gaps = sorted(self.gaps)
        p95 = gaps[-(-95 * len(gaps) // 100) - 1] if gaps else None  # 95 % are not above it
        measured = ((self.ttft, slo.ttft), (p95, slo.itl_p95), (self.tpot, slo.tpot))
        return all(value is None or limit is None or value <= limit for value, limit in measured)

"""The thread that computes masks."""

from __future__ import annotations

from typing import Any

from jaxserve.api import FinishReason, GuideError
from jaxserve.structured.worker import Job, MaskWorker


class Panic(BaseException):
    """As those of Rust's extensions are: no Exception."""


class Sequence:
    ready = False
    error: GuideError | None = None

    def finish(self, mask: bytes, error: GuideError | None) -> None:
        self.ready, self.error = True, error


def test_a_panic_ends_a_sequence_and_not_the_thread() -> None:
    worker = MaskWorker(words=1, threads=1)

    def panics(jobs: Any) -> None:
        raise Panic

    worker._compute = panics  # type: ignore[method-assign]
    for _ in range(2):
        sequence = Sequence()
        matcher: Any = None
        worker.submit(Job(sequence, matcher, 0))
        assert worker.wait_for(sequence, timeout=10)
        assert sequence.error is not None
        assert sequence.error.finish is FinishReason.ERROR  # no fault of the grammars

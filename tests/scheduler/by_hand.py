"""Small schedulers, taken through their steps by hand."""

from __future__ import annotations

from dataclasses import replace

from jaxserve.api import (
    Request,
    SamplingParams,
    TokenEvent,
)
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.plan import Sampled, StepPlan
from jaxserve.scheduler import Scheduler
from tests.scheduler.loop import Optimist

PLAIN, STOP = 0, 9
"""Tokens that the scheduler is told were sampled: an ordinary one and a stop token."""


def scheduler(
    *,
    seqs: int = 4,
    tokens: int = 16,
    model_len: int = 64,
    pages: int = 64,
    page_size: int = 2,
    queued: int = 1024,
    prefix_caching: bool = False,
    chunk_context: int | None = None,
    own_tokens: int = 0,
    identity: str = "",
) -> Scheduler:
    config = SchedulerConfig(
        max_num_seqs=seqs,
        max_model_len=model_len,
        max_num_batched_tokens=tokens,
        max_queued=queued,
        prefix_caching=prefix_caching,
        max_chunk_context=chunk_context,
    )
    cache = CacheConfig(
        num_pages=pages + 1, page_size=page_size, own_tokens=own_tokens, identity=identity
    )
    return Scheduler(config, cache, lengths=Optimist(), clock=lambda: 1.0)


def request(name: str, prompt: int = 3, *, max_tokens: int = 8, min_tokens: int = 0) -> Request:
    params = SamplingParams(
        max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=frozenset({STOP})
    )
    return Request(id=name, prompt=tuple(range(1, prompt + 1)), params=params)


def planned(sched: Scheduler) -> StepPlan:
    plan = sched.plan()
    sched.check()
    assert plan is not None
    return plan


def commit(sched: Scheduler, plan: StepPlan, *tokens: int) -> list[TokenEvent]:
    """Commit a plan whose sampling rows yielded these tokens (all PLAIN if none is given)."""
    results = iter(tokens or [PLAIN] * len(plan.rows))
    sampled = [Sampled(next(results)) if row.samples else None for row in plan.rows]
    events = sched.commit(plan, sampled)
    sched.check()
    return [event._replace(start=None) for event in events]


def shape(plan: StepPlan) -> list[tuple[int, int, int]]:
    """(sequence, start, tokens) of each row."""
    return [(row.seq_id, row.start, row.num_tokens) for row in plan.rows]


def assert_empty(sched: Scheduler, pages: int = 64) -> None:
    sched.check()
    assert not sched.has_work and sched.plan() is None
    assert (sched.num_running, sched.num_waiting, sched.pages.num_free) == (0, 0, pages)


def preempted_in_flight(*, prefix_caching: bool = False) -> tuple[Scheduler, StepPlan]:
    """`old` took the last page from `young`, one token of which is in the returned plan."""
    sched = scheduler(pages=6, prefix_caching=prefix_caching)
    sched.add(replace(request("old"), cache_salt="of its own"))
    sched.add(request("young"))
    for _ in range(3):
        commit(sched, planned(sched))
    in_flight = planned(sched)
    assert shape(in_flight) == [(0, 5, 1), (1, 5, 1)] and sched.pages.num_free == 0
    squeezed = planned(sched)
    assert shape(squeezed) == [(0, 6, 1)]
    assert (sched.num_preemptions, sched.num_running, sched.num_waiting) == (1, 1, 1)
    return sched, in_flight

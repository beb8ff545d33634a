"""Routers that people run, as far as they decide which replica gets a request.

Written from their sources, with their defaults; not copied. None of them is ours.

- prefixaware: vllm-project/production-stack a6c01db, src/vllm_router/routers/routing_logic.py and
  prefix/hashtrie.py
- cache_aware: lightseekorg/smg 73da68c, model_gateway/src/policies/cache_aware.rs, text tree
- llm-d: llm-d/llm-d-router ebab687, pkg/epp/framework/plugins/scheduling: scorer/queuedepth,
  scorer/kvcacheutilization, scorer/prefix and filter/prefixcacheaffinity
- Dynamo: ai-dynamo 1.6.1, the cost function in the documentation of its KV router

Chunks of text are pages of tokens here: the tries match whole pages. Equal replicas are chosen from
at random.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from lab.simulation.fleet import Query, Replica, Router


class Random:
    """Any replica."""

    def __init__(self, rng: random.Random):
        self._rng = rng

    def choose(self, query: Query, replicas: Sequence[Replica]) -> int:
        return self._rng.randrange(len(replicas))


class LeastLoaded:
    """The replica with the fewest requests in flight."""

    def __init__(self, rng: random.Random):
        self._rng = rng

    def choose(self, query: Query, replicas: Sequence[Replica]) -> int:
        return lowest([len(replica.open) for replica in replicas], self._rng)


class PrefixAware:
    """The longest prefix that was ever sent somewhere. Forgets nothing, looks at no load."""

    def __init__(self, rng: random.Random):
        self._rng = rng
        self._sent: dict[bytes, set[int]] = {}
        """Replicas that were sent a page, by its hash, which covers all pages before it."""

    def choose(self, query: Query, replicas: Sequence[Replica]) -> int:
        candidates = set(range(len(replicas)))
        for content in query.hashes:
            known = self._sent.get(content, set()) & candidates
            if not known:
                break
            candidates = known
        chosen = self._rng.choice(sorted(candidates))
        for content in query.hashes:
            self._sent.setdefault(content, set()).add(chosen)
        return chosen


class CacheAware:
    """The replica that was sent the longest prefix last, unless the loads are far apart."""

    def __init__(
        self,
        rng: random.Random,
        *,
        threshold: float = 0.3,
        absolute: int = 64,
        relative: float = 1.5,
    ):
        """The bound: more than `absolute` requests between the most and the fewest in flight, and
        more than `relative` times as many. `threshold` is the share of the prompt that must match.
        """
        self._rng = rng
        self._threshold, self._absolute, self._relative = threshold, absolute, relative
        self._last: dict[bytes, int] = {}

    def choose(self, query: Query, replicas: Sequence[Replica]) -> int:
        loads = [len(replica.open) for replica in replicas]
        chosen = lowest(loads, self._rng)
        apart = max(loads) - min(loads) > self._absolute
        if not (apart and max(loads) > self._relative * min(loads)):
            matched, owner = 0, chosen
            for content in query.hashes:
                if content not in self._last:
                    break
                matched, owner = matched + query.page_size, self._last[content]
            if matched > self._threshold * query.tokens:
                chosen = owner
        for content in query.hashes:
            self._last[content] = chosen
        return chosen


class LlmD:
    """Scores of queue, KV usage and prefix, 2 : 2 : 3, of metrics and of pages by KV events."""

    def __init__(
        self,
        rng: random.Random,
        prefill_rate: float,
        *,
        weights: tuple[float, float, float] = (2.0, 2.0, 3.0),
        affinity: float = 0.8,
        penalty: float = 18.0,
    ):
        """The filter: with `affinity` of the prompt in some replica's cache, only such replicas,
        unless the best of them would take `penalty` seconds longer to the first token than the best
        other. `prefill_rate`: tokens per second, by which it guesses that.
        """
        self._rng, self._rate = rng, prefill_rate
        self._weights, self._affinity, self._penalty = weights, affinity, penalty

    def choose(self, query: Query, replicas: Sequence[Replica]) -> int:
        shares = [replica.matched(query) // query.page_size for replica in replicas]
        total = max(1, len(query.hashes))
        match = [share / total for share in shares]
        kept = self._filtered(match, replicas)
        queues = [replicas[each].metrics.waiting for each in kept]
        spread = max(queues) - min(queues)
        scores: list[float] = []
        for each, queue in zip(kept, queues, strict=True):
            parts = (
                (max(queues) - queue) / spread if spread else 1.0,
                1 - replicas[each].metrics.usage,
                match[each],
            )
            scores.append(sum(w * part for w, part in zip(self._weights, parts, strict=True)))
        return kept[lowest([-score for score in scores], self._rng)]

    def _filtered(self, match: list[float], replicas: Sequence[Replica]) -> list[int]:
        every = list(range(len(replicas)))
        warm = [each for each in every if match[each] >= self._affinity]
        cold = [each for each in every if match[each] < self._affinity]
        if not warm or not cold:
            return every
        waits = [replica.prefilling / self._rate for replica in replicas]
        late = min(waits[each] for each in warm) - min(waits[each] for each in cold)
        return every if late > self._penalty else warm


class Dynamo:
    """The lowest cost: pages to prefill, those of requests in the queue included, plus pages of
    prompts that would then be active, shared ones once. Pages that are in the cache by KV events
    need no prefill."""

    def __init__(self, rng: random.Random, *, scale: float = 1.0):
        self._rng, self._scale = rng, scale

    def choose(self, query: Query, replicas: Sequence[Replica]) -> int:
        costs: list[float] = []
        for replica in replicas:
            new = max(query.tokens - replica.matched(query), 0)
            prefill = (replica.prefilling + new) / query.page_size
            decode = len(replica.held) + sum(each not in replica.held for each in query.hashes)
            costs.append(self._scale * prefill + decode)
        return lowest(costs, self._rng)


def lowest(values: Sequence[float], rng: random.Random) -> int:
    """Returns where the lowest value is; any of them, if several are."""
    least = min(values)
    return rng.choice([place for place, value in enumerate(values) if value == least])


def routers(prefill_rate: float) -> dict[str, Callable[[random.Random], Router]]:
    """Returns how to make each router, by name."""
    return {
        "random": Random,
        "least loaded": LeastLoaded,
        "prefixaware": PrefixAware,
        "cache_aware": CacheAware,
        "llm-d": lambda rng: LlmD(rng, prefill_rate),
        "Dynamo": Dynamo,
    }


def variants(prefill_rate: float) -> dict[str, Callable[[random.Random], Router]]:
    """Returns routers with other settings than their defaults."""
    return {
        "llm-d, 1 s": lambda rng: LlmD(rng, prefill_rate, penalty=1.0),
        "llm-d, no filter": lambda rng: LlmD(rng, prefill_rate, affinity=2.0),
        "llm-d, no filter, prefix 1": lambda rng: LlmD(
            rng, prefill_rate, affinity=2.0, weights=(2.0, 2.0, 1.0)
        ),
    }

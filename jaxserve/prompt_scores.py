"""Logprobs of prompt tokens, from what a prefill leaves: programs of their own beside the steps.

A step that carries prompt chunks returns its hidden states. If a prompt's logprobs are wanted, a
small program takes the positions in question out of them, and one more, the same for all steps,
computes their scores; so many at a time that the scores need no more memory than those of a decode
step. A step whose rows are not scored pays nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxserve.api import MAX_LOGPROBS, PromptLogprobs
from jaxserve.models import qwen3
from jaxserve.plan import StepPlan
from jaxserve_kernels.sampler import score

_COLUMNS = 2 + 2 * MAX_LOGPROBS
"""Logprob, rank, ids and logprobs of the alternatives."""


def compute(params: qwen3.Params, taken: Array, targets: Array, *, sampled_vocab: int) -> Array:
    """Scores of `targets` [rows] after hidden states [rows, embed].

    Returns:
      int32 [rows, _COLUMNS], floats as their bits.
    """

    def bits(x: Array) -> Array:
        return lax.bitcast_convert_type(x, jnp.int32)

    logits = qwen3.logits(params, taken)
    scores = score(logits, targets, vocab=sampled_vocab, alternatives=MAX_LOGPROBS)
    columns = [
        bits(scores.logprob)[:, None],
        scores.rank[:, None],
        scores.top_ids,
        bits(scores.top),
    ]
    return jnp.concatenate(columns, axis=1)


class PromptScorer:
    """The compiled programs; made once, before serving."""

    def __init__(
        self, params: qwen3.Params, hidden: dict[int, Any], *, rows: int, sampled_vocab: int
    ):
        """Args:
        params: may be abstract.
        hidden: abstract hidden states of each step that carries prompt chunks, by its tokens.
        rows: positions that one call scores.
        """
        self._rows = rows
        indices = jax.ShapeDtypeStruct((rows,), jnp.int32)

        def take(hidden: Array, indices: Array) -> Array:
            return hidden[indices]

        def prompt_scores(params: qwen3.Params, taken: Array, targets: Array) -> Array:
            return compute(params, taken, targets, sampled_vocab=sampled_vocab)

        self._take = {
            tokens: jax.jit(take).lower(states, indices).compile()
            for tokens, states in hidden.items()
        }
        embed, dtype = next((x.shape[1], x.dtype) for x in hidden.values())
        taken = jax.ShapeDtypeStruct((rows, embed), dtype)
        self._score = jax.jit(prompt_scores).lower(params, taken, indices).compile()

    def launch(self, params: qwen3.Params, hidden: Array, plan: StepPlan) -> list[Array]:
        """Start what the plan's rows want scored; nothing if they want nothing."""
        wanted = list(_wanted(plan))
        return [
            self._call(params, hidden, wanted[first : first + self._rows])
            for first in range(0, len(wanted), self._rows)
        ]

    def warm(self, params: qwen3.Params, hidden: Array) -> None:
        """Run the programs for hidden states of this shape once."""
        self._call(params, hidden, []).block_until_ready()

    def _call(self, params: qwen3.Params, hidden: Array, wanted: list[tuple[int, int]]) -> Array:
        packed = np.zeros((2, self._rows), np.int32)
        if wanted:
            packed[:, : len(wanted)] = np.asarray(wanted, np.int32).T
        taken = self._take[hidden.shape[0]](hidden, packed[0])
        scores: Array = self._score(params, taken, packed[1])
        scores.copy_to_host_async()
        return scores


def _wanted(plan: StepPlan) -> Iterator[tuple[int, int]]:
    """(position among the step's tokens, token that follows it)."""
    first = 0
    for row in plan.rows:
        if row.scored is not None:
            yield from enumerate(row.scored.tokens, first + row.scored.offset)
        first += row.num_tokens


def read(plan: StepPlan, scores: list[Array]) -> dict[int, tuple[PromptLogprobs, ...]]:
    """What `launch` started, by index of the row; waits for the device."""
    if not scores:
        return {}
    found = np.concatenate([np.asarray(part) for part in scores])
    result: dict[int, tuple[PromptLogprobs, ...]] = {}
    first = 0
    for index, row in enumerate(plan.rows):
        if row.scored is not None:
            end = first + len(row.scored.tokens)
            result[index] = tuple(_decoded(found[first:end], row.scored.alternatives))
            first = end
    return result


def _decoded(found: np.ndarray, alternatives: int) -> Iterator[PromptLogprobs]:
    floats = found.view(np.float32)
    logprobs, ranks = floats[:, 0].tolist(), found[:, 1].tolist()
    ids = found[:, 2 : 2 + alternatives].tolist()
    first = 2 + MAX_LOGPROBS
    tops = floats[:, first : first + alternatives].tolist()
    for logprob, rank, token_ids, top in zip(logprobs, ranks, ids, tops, strict=True):
        yield PromptLogprobs(logprob, rank, tuple(zip(token_ids, top, strict=True)))

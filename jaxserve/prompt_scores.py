"""Logprobs of prompt tokens, from what a prefill leaves: programs of their own beside the steps.

A step that carries prompt chunks returns its tokens as the last layer's attention left them. If a
prompt's logprobs are wanted, a small program takes the positions in question out of them, and one
more, the same for all steps, does what is left of the last layer and computes their scores; so many
at a time that the scores need no more memory than those of a decode step. A step whose rows are not
scored pays nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from jaxserve.api import MAX_LOGPROBS, PromptLogprobs
from jaxserve.config import ModelSpec
from jaxserve.executable_cache import Executable, Program
from jaxserve.models import qwen3
from jaxserve.plan import StepPlan
from jaxserve_kernels.sampler import score

_SCORE, _TAKE = "prompt_scores", "prompt_rows_"
"""Names of the programs; the second with the tokens of the step that it takes rows from."""

_COLUMNS = 2 + 2 * MAX_LOGPROBS
"""Logprob, rank, ids and logprobs of the alternatives."""


def compute(
    params: qwen3.Params,
    taken: qwen3.Attended,
    targets: Array,
    *,
    spec: ModelSpec,
    sampled_vocab: int,
) -> Array:
    """Scores of `targets` [rows] after so many tokens.

    Returns:
      int32 [rows, _COLUMNS], floats as their bits.
    """

    def bits(x: Array) -> Array:
        return lax.bitcast_convert_type(x, jnp.int32)

    logits = qwen3.logits(params, qwen3.finish(params, taken, spec))
    scores = score(logits, targets, vocab=sampled_vocab, alternatives=MAX_LOGPROBS)
    columns = [
        bits(scores.logprob)[:, None],
        scores.rank[:, None],
        scores.top_ids,
        bits(scores.top),
    ]
    return jnp.concatenate(columns, axis=1)


def programs(
    params: Any,
    steps: Iterable[int],
    *,
    spec: ModelSpec,
    dtype: DTypeLike,
    rows: int,
    sampled_vocab: int,
) -> list[Program]:
    """What `PromptScorer` executes.

    Args:
      params: abstract.
      steps: tokens of each step that carries prompt chunks.
      rows: positions that one call scores.
    """

    def abstract(tokens: int) -> qwen3.Attended:
        return qwen3.abstract_attended(spec, dtype, tokens)

    indices = jax.ShapeDtypeStruct((rows,), jnp.int32)
    score_all = functools.partial(compute, spec=spec, sampled_vocab=sampled_vocab)
    return [
        Program(name=_SCORE, function=score_all, arguments=(params, abstract(rows), indices)),
        *(
            Program(
                name=f"{_TAKE}{tokens}",
                function=qwen3.Attended.of,
                arguments=(abstract(tokens), indices),
            )
            for tokens in steps
        ),
    ]


class PromptScorer:
    """Scores by compiled programs, made before serving."""

    def __init__(self, executables: Mapping[str, Executable], *, rows: int):
        """`executables` hold those of `programs` for so many `rows`, by name."""
        self._rows = rows
        self._score = executables[_SCORE]
        self._take = {
            int(name.removeprefix(_TAKE)): executable
            for name, executable in executables.items()
            if name.startswith(_TAKE)
        }

    def launch(self, params: qwen3.Params, attended: qwen3.Attended, plan: StepPlan) -> list[Array]:
        """Start what the plan's rows want scored; nothing if they want nothing."""
        wanted = list(_wanted(plan))
        return [
            self._call(params, attended, wanted[first : first + self._rows])
            for first in range(0, len(wanted), self._rows)
        ]

    def warm(self, params: qwen3.Params, attended: qwen3.Attended) -> Array:
        """Run the programs for so many tokens once; returns before they have run."""
        return self._call(params, attended, [])

    def _call(
        self, params: qwen3.Params, attended: qwen3.Attended, wanted: list[tuple[int, int]]
    ) -> Array:
        packed = np.zeros((2, self._rows), np.int32)
        if wanted:
            packed[:, : len(wanted)] = np.asarray(wanted, np.int32).T
        taken = self._take[attended.x.shape[0]](attended, packed[0])
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

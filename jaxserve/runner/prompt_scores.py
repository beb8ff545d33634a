"""Logprobs of prompt tokens, computed by a separate program after a step.

A mixed step leaves its last layer's pre-MLP hidden states on the device. If a prompt's logprobs are
requested, a small program finishes the last layer for those positions and scores them. It takes as
many at a time as a decode step has rows, so it needs no more memory. Steps without scored rows pay
nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxserve.api import MAX_LOGPROBS, PromptLogprobs
from jaxserve.model_spec import ModelSpec
from jaxserve.models import decoder
from jaxserve.plan import StepPlan
from jaxserve.programs.executable_cache import Executable, Program
from jaxserve_kernels.sampler import score
from jaxserve_kernels.target import Target

SCORE = "prompt_scores"
"""The program's name."""

_COLUMNS = 2 + 2 * MAX_LOGPROBS
"""Columns of a result: logprob, rank, ids and logprobs of the alternatives."""


def compute(
    params: decoder.Params,
    pre_mlp: decoder.PreMLP,
    wanted: Array,
    *,
    spec: ModelSpec,
    sampled_vocab: int,
    target: Target,
) -> Array:
    """Scores of tokens after those of a step.

    Args:
      pre_mlp: all of the step.
      wanted: int32 [2, rows], positions among them and the tokens that follow these.

    Returns:
      int32 [rows, _COLUMNS], floats as their bits.
    """

    def bits(x: Array) -> Array:
        return lax.bitcast_convert_type(x, jnp.int32)

    logits = decoder.logits(
        params, decoder.finish(params, pre_mlp.of(wanted[0]), spec, target=target), target=target
    )
    scores = score(logits, wanted[1], vocab=sampled_vocab, alternatives=MAX_LOGPROBS, target=target)
    columns = [
        bits(scores.logprob)[:, None],
        scores.rank[:, None],
        scores.top_ids,
        bits(scores.top),
    ]
    return jnp.concatenate(columns, axis=1)


def program(
    params: Any,
    pre_mlp: decoder.PreMLP,
    *,
    spec: ModelSpec,
    rows: int,
    sampled_vocab: int,
    target: Target,
) -> Program:
    """Returns the program of `PromptScorer`.

    Args:
      params: abstract, as `pre_mlp` is.
      rows: positions that one call scores.
    """
    return Program(
        name=SCORE,
        function=functools.partial(compute, spec=spec, sampled_vocab=sampled_vocab, target=target),
        arguments=(params, pre_mlp, jax.ShapeDtypeStruct((2, rows), jnp.int32)),
    )


class PromptScorer:
    """Scores prompt tokens with a program that was compiled before serving."""

    def __init__(self, executables: Mapping[str, Executable], *, rows: int):
        """`executables`: by name, with that of `program` for `rows` rows."""
        self._rows = rows
        self._score = executables[SCORE]

    def launch(
        self, params: decoder.Params, pre_mlp: decoder.PreMLP, plan: StepPlan
    ) -> list[Array]:
        """Launch the scoring of the plan's rows. Returns one array per call; none if nothing is
        scored."""
        wanted = list(_wanted(plan))
        return [
            self._call(params, pre_mlp, wanted[first : first + self._rows])
            for first in range(0, len(wanted), self._rows)
        ]

    def warm(self, params: decoder.Params, pre_mlp: decoder.PreMLP) -> Array:
        """Run the program once. Returns before it has run."""
        return self._call(params, pre_mlp, [])

    def _call(
        self, params: decoder.Params, pre_mlp: decoder.PreMLP, wanted: list[tuple[int, int]]
    ) -> Array:
        packed = np.zeros((2, self._rows), np.int32)
        if wanted:
            packed[:, : len(wanted)] = np.asarray(wanted, np.int32).T
        scores: Array = self._score(params, pre_mlp, packed)
        scores.copy_to_host_async()
        return scores


def _wanted(plan: StepPlan) -> Iterator[tuple[int, int]]:
    """Yields (position among the step's tokens, the prompt token that follows it)."""
    first = 0
    for row in plan.rows:
        if row.scored is not None:
            yield from enumerate(row.scored.tokens, first + row.scored.offset)
        first += row.num_tokens


def read(plan: StepPlan, scores: list[Array]) -> dict[int, tuple[PromptLogprobs, ...]]:
    """Returns the logprobs that `launch` started, by row index. Waits for the device."""
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

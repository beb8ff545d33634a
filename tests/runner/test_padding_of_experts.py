"""Padding of a step's bucket reads no expert's weights."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from jaxserve.layer_spec import ExpertsSpec
from jaxserve.models import layer
from tests.runner.driver import OTHER, PROMPT, Placed, step
from tests.tiny_model import make_config, make_runner, tiny_spec

SPEC = tiny_spec(
    ffn=ExpertsSpec(num_experts=6, top_k=2, width=24, normalize=True),
    architecture="Qwen3MoeForCausalLM",
)


def test_only_a_steps_tokens_have_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode steps of two rows of four, and prompts of fewer tokens than their bucket."""
    counts: list[int] = []
    routed = layer.routed_experts

    def counting(*args: Any, active: Any, **options: Any) -> Any:
        if active is not None:  # None: the last tokens of a step's rows
            jax.debug.callback(lambda used: counts.append(int(used)), active.sum())
        return routed(*args, active=active, **options)

    monkeypatch.setattr(layer, "routed_experts", counting)
    runner = make_runner(make_config(spec=SPEC, decode=(4,), prefill=(32,)))
    sequences = [Placed(), Placed(slot=1, pages=(11, 12, 13))]
    rows = [each.chunk(prompt) for each, prompt in zip(sequences, (PROMPT, OTHER), strict=True)]
    for chosen, tokens in (
        (rows, len(PROMPT) + len(OTHER)),
        ([each.decode(len(p)) for each, p in zip(sequences, (PROMPT, OTHER), strict=True)], 2),
    ):
        jax.effects_barrier()
        counts.clear()
        step(runner, chosen, sequences if chosen is rows else [])
        jax.effects_barrier()
        assert counts and set(counts) == {tokens}

"""Timed decode steps: their rows read pages of their own, and the floor of a model with experts
counts those that the rows had."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.layer_spec import ExpertsSpec
from jaxserve.models.hf_config import with_windows
from scripts.decode_steps import decode_plans, fits, weight_bytes
from scripts.touched_experts import touched_experts
from tests.tiny_model import make_config, make_params, make_runner, tiny_spec

EXPERTS, K, WIDTH, EMBED, LAYERS, WARM = 16, 2, 24, 32, 2, 1
SPEC = tiny_spec(
    ffn=ExpertsSpec(num_experts=EXPERTS, top_k=K, width=WIDTH, normalize=True),
    embed=EMBED,
    num_layers=LAYERS,
)


@pytest.mark.slow
def test_experts_of_rows_are_counted_as_they_run() -> None:
    """Greedy rows are alike in an empty cache; with a temperature each has experts of its own.
    Padding has none."""
    config = make_config(spec=SPEC, decode=(8,), max_num_seqs=8, prefill=(8,))
    runs = [decode_plans(config, 4, 4, WARM + 2, temperature) for temperature in (0.0, 1.0)]
    alike, differing = touched_experts(config, make_params(SPEC), runs, WARM)
    assert alike == K
    assert K < differing <= 4 * K


def test_an_expert_more_is_its_bytes_in_each_layer() -> None:
    params = make_params(SPEC)
    counts = [weight_bytes(params, SPEC, 4, touched) for touched in (EXPERTS - 1, EXPERTS)]
    assert counts[1] - counts[0] == LAYERS * 3 * WIDTH * EMBED * 4
    assert weight_bytes(params, SPEC, 1) == weight_bytes(params, SPEC, 1, K)


WINDOW = 6
WINDOWED = with_windows(SPEC, [WINDOW, None])


@given(batch=st.integers(1, 5), context=st.integers(1, 60), steps=st.integers(1, 20))
def test_rows_have_pages_of_their_own_in_each_group(batch: int, context: int, steps: int) -> None:
    """For all that they see and write; the padding page is nobody's."""
    config = make_config(spec=WINDOWED, max_model_len=128, num_pages=5 * 20 + 1)
    size = config.cache.page_size
    plans = decode_plans(config, batch, context, steps, 0.0)
    entries = [entry for plan in plans for entry in plan.pages]
    owners = Counter((entry.group, entry.page) for entry in entries)
    assert max(owners.values()) == 1 and all(page for _, page in owners)
    tables = {(each.group, each.slot, each.position): each.page for each in entries}
    for position in (row.start for plan in plans for row in plan.rows):
        for group, paged in enumerate(config.cache.groups):
            first = max(0, position + 1 - (paged.window or position + 1))
            for slot in range(batch):
                seen = range(first // size, position // size + 1)
                assert all((group, slot, place) in tables for place in seen)
    pages = [{page for at, page in owners if at == group} for group in (0, 1)]
    pairs = zip(pages, config.cache.groups, strict=True)
    held = all(len(own) <= each.usable_pages for own, each in pairs)
    assert fits(config, batch, context, steps) == held


@pytest.mark.slow
def test_what_padding_left_is_not_read() -> None:
    """Not in layers with a window either: NaN there would give all rows the same experts."""
    config = make_config(spec=WINDOWED, max_model_len=32, decode=(4,), prefill=(8,))
    runner = make_runner(config, make_params(WINDOWED))
    state = runner._state
    poisoned = [each.at[:, 0].set(jnp.nan) for each in jax.tree.leaves(state.kv)]
    kv = jax.tree.unflatten(jax.tree.structure(state.kv), poisoned)
    runner._state = state._replace(kv=kv)
    for plan in decode_plans(config, 4, 11, 3, 1.0):
        rows = runner.collect(runner.launch(plan))
        assert all(row is not None and row.token is not None for row in rows)

"""Whole steps of hybrid models as they are packed for the device, with kernels on the emulator,
which finds what reads or writes outside of its arrays."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jaxserve.layer_spec import (
    AttentionSpec,
    DeltaNetSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LayerSpec,
    Rope,
)
from jaxserve.model_spec import ModelSpec
from jaxserve.models import decoder
from jaxserve.plan import Admission, StepPlan
from jaxserve.runner import batch
from jaxserve.runner.batch import Updates
from jaxserve.runner.programs import programs
from jaxserve.runner.step import DeviceState, run_step
from jaxserve_checkpoints.dummy import dummy_params
from jaxserve_kernels import pdl
from jaxserve_kernels.recurrent_state import RecurrentState
from jaxserve_kernels.target import REFERENCE, Target
from tests.emulated.errors import relative_error
from tests.emulator.targets import HOPPER, with_pdl
from tests.runner.driver import GREEDY, Placed
from tests.tiny_model import make_config

PAGE, PAGES = 64, 16
DELTA_NET = DeltaNetSpec(
    key_heads=1, value_heads=2, key_dim=64, value_dim=64, conv_width=4, block=64
)
FULL = AttentionSpec(
    q_heads=4, kv_heads=2, head_dim=64, rope=Rope(theta=10_000.0, fraction=0.25), qk_norm=True,
    gated=True,
)  # fmt: skip
MLP = FeedForwardSpec(width=128)
EXPERTS = ExpertsSpec(num_experts=8, top_k=2, width=64, normalize=True, shared_width=64)


def hybrid(feed_forward: FeedForwardSpec | ExpertsSpec) -> ModelSpec:
    """A recurrent layer, then one of full attention."""
    return ModelSpec(
        architecture="Qwen3_5ForCausalLM", vocab_size=256, embed=128,
        layers=(
            LayerSpec(delta_net=DELTA_NET, feed_forward=feed_forward),
            LayerSpec(attention=FULL, feed_forward=feed_forward),
        ),
        max_position=2048, tie_embeddings=True, zero_centred_norms=True,
    )  # fmt: skip


def sequence(slot: int, length: int) -> tuple[Placed, Admission]:
    """A sequence with a prompt of so many tokens, and pages for one token more."""
    first = 1 + slot * PAGES
    pages = tuple(range(first, first + length // PAGE + 1))
    return Placed(slot=slot, pages=pages), Admission(slot, GREEDY, (3,) * length, length)


def rule_state(state: DeviceState) -> jax.Array:
    """That of the three sequences; the next slot is padding's."""
    recurrent = state.kv[-1]
    assert isinstance(recurrent, RecurrentState)
    return recurrent.delta[:, :3]


@pytest.mark.parametrize("feed_forward", [MLP, EXPERTS], ids=["dense", "experts"])
def test_rows_far_into_their_prompts_beside_padding(
    feed_forward: FeedForwardSpec | ExpertsSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last chunk of a long prompt, a short prompt, and padding; another prompt beside both as
    they decode, without padding; then all decode."""
    monkeypatch.setattr(pdl, "call", with_pdl)
    spec = hybrid(feed_forward)
    config = make_config(
        spec=spec, max_model_len=PAGES * PAGE, num_pages=3 * PAGES + 1, page_size=PAGE,
        decode=(4,), prefill=(96,),
    )  # fmt: skip
    cache = replace(config.cache, snapshots=2, snapshot_stride=64, state_block=64)
    config = replace(config, dtype=jnp.bfloat16, cache=cache)
    params = dummy_params(decoder.abstract(spec, jnp.bfloat16), 0)
    (zero,) = (each.function for each in programs(config, params) if each.name == "state")
    state = zero()

    def step(state: DeviceState, plan: StepPlan, target: Target) -> DeviceState:
        buckets = (each for each in config.all_buckets() if isinstance(each, batch.Bucket))
        (bucket,) = (each for each in buckets if each.kind == plan.kind)
        updates = Updates.of(plan, config.sequences_shape[1], config.num_groups)
        packed = jnp.asarray(batch.pack(plan, updates, bucket, config.padding_slot))
        return run_step(
            params, state, packed, spec=spec, bucket=bucket, sampled_vocab=spec.vocab_size,
            target=target,
        )  # fmt: skip

    (long, first), (short, second), (last, third) = (
        sequence(slot, length) for slot, length in enumerate((769, 5, 94))
    )
    for plan in (
        StepPlan(
            rows=(long.chunk([7] * 65, 704), short.chunk([9] * 5)),
            admissions=(first, second),
            pages=(*long.entries, *short.entries),
        ),
        StepPlan(  # fills its bucket
            rows=(long.decode(769), last.chunk([5] * 94), short.decode(5)),
            admissions=(third,),
            pages=last.entries,
        ),
        StepPlan(rows=(long.decode(770), short.decode(6), last.decode(94))),
    ):
        expected = step(state, plan, REFERENCE)
        found = step(state, plan, HOPPER)
        pairs = [(rule_state(found), rule_state(expected))]
        if plan.kind == "mixed":
            tokens = slice(plan.num_tokens)
            both = (jax.tree.leaves(each.pre_mlp) for each in (found, expected))
            pairs += [(one[tokens], other[tokens]) for one, other in zip(*both, strict=True)]
        for one, other in pairs:
            assert relative_error(one, other) < 0.02
        state = expected

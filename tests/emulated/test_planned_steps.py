"""Whole steps as they are packed for the device, with kernels on the emulator, which finds what
reads or writes outside of its arrays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
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
from jaxserve.models.quantization import Quantization
from jaxserve.plan import Admission, Sampled, StepPlan
from jaxserve.runner import batch, verify
from jaxserve.runner.batch import Updates
from jaxserve.runner.programs import RunnerConfig, programs
from jaxserve.runner.step import DeviceState, run_step
from jaxserve.runner.verify import VerifyBucket
from jaxserve.runner.verify_step import run_verify_step
from jaxserve_checkpoints.dummy import dummy_params
from jaxserve_kernels import pdl
from jaxserve_kernels.kv_format import KVFormat, named
from jaxserve_kernels.target import REFERENCE, Target
from tests.emulator.targets import HOPPER, joined, with_pdl
from tests.runner.driver import GREEDY, Placed, certain
from tests.tiny_model import make_config, tiny_spec

CONTEXT = 1024
DELTA_NET = DeltaNetSpec(
    key_heads=1, value_heads=2, key_dim=64, value_dim=64, conv_width=4, block=64
)
FULL = AttentionSpec(
    q_heads=4, kv_heads=2, head_dim=64, rope=Rope(theta=10_000.0, fraction=0.25), qk_norm=True,
    gated=True,
)  # fmt: skip
MLP = FeedForwardSpec(width=128)
EXPERTS = ExpertsSpec(num_experts=8, top_k=2, width=64, normalize=True, shared_width=64)
OSS = ExpertsSpec(
    num_experts=8, top_k=2, width=128, normalize=True, activation="swiglu_oss", bias=True,
    router_bias=True,
)  # fmt: skip
INT4 = Quantization(layers="int4", head="int8")


def hybrid(feed_forward: FeedForwardSpec | ExpertsSpec) -> ModelSpec:
    """A recurrent layer, then one of full attention."""
    return ModelSpec(
        architecture="Qwen3_5ForCausalLM", vocab_size=256, embed=128,
        layers=(
            LayerSpec(delta_net=DELTA_NET, feed_forward=feed_forward),
            LayerSpec(attention=FULL, feed_forward=feed_forward),
        ),
        max_position=CONTEXT, tie_embeddings=True, zero_centred_norms=True,
    )  # fmt: skip


def with_sinks() -> ModelSpec:
    """A layer with a window, then one of full attention."""
    attention = AttentionSpec(q_heads=4, kv_heads=2, head_dim=64, sinks=True)
    layers = (
        LayerSpec(attention=replace(attention, window=window), feed_forward=OSS)
        for window in (64, None)
    )
    return ModelSpec(
        architecture="GptOssForCausalLM", vocab_size=256, embed=128, layers=tuple(layers),
        max_position=CONTEXT, tie_embeddings=False,
    )  # fmt: skip


DENSE = tiny_spec(vocab_size=256, embed=256, ffn=384, num_layers=1, head_dim=128)


class Case(NamedTuple):
    spec: ModelSpec
    quantization: Quantization = Quantization()
    kv_format: KVFormat = named("auto")
    page: int = 64
    bound: float = 0.05
    """Of differences of logprobs."""

    def config(self) -> RunnerConfig:
        pages = 3 * CONTEXT // self.page + 1
        config = make_config(
            spec=self.spec, max_model_len=CONTEXT, num_pages=pages, page_size=self.page,
            decode=(4,), prefill=(96,), verify=((4, 4),),
        )  # fmt: skip
        cache = replace(config.cache, own_tokens=self.kv_format.own_tokens)
        if self.spec.state is not None:
            cache = replace(cache, snapshots=2, snapshot_stride=64, state_block=64)
        return replace(config, dtype=jnp.bfloat16, cache=cache, kv_format=self.kv_format)

    def sequence(self, slot: int, length: int) -> tuple[Placed, Admission]:
        """A sequence with a prompt of so many tokens, and pages for one token more."""
        first = 1 + slot * (CONTEXT // self.page)
        pages = tuple(range(first, first + length // self.page + 1))
        placed = Placed(slot=slot, pages=pages, groups=len(self.spec.cache_groups))
        return placed, Admission(slot, GREEDY, (3,) * length, length)


CASES = {
    "hybrid": Case(hybrid(MLP)),
    "hybrid with experts": Case(hybrid(EXPERTS)),
    "hybrid in int4": Case(hybrid(MLP), INT4, bound=0.5),  # tokens of a chunk become e4m3
    "sinks, windows and experts": Case(with_sinks(), Quantization(experts="mxfp4"), bound=0.5),
    "KVarN": Case(DENSE, kv_format=named("kvarn_k4v4_g128"), page=128),
    "fp8 cache": Case(DENSE, kv_format=named("fp8_e4m3")),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_far_into_their_prompts_beside_padding(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last chunk of a long prompt, a short prompt, and padding; another prompt beside both as
    they decode, without padding; then all decode, with drafts at last."""
    monkeypatch.setattr(pdl, "call", with_pdl)
    monkeypatch.setattr(pdl, "join", joined)
    case = CASES[name]
    spec, config = case.spec, case.config()
    abstract = decoder.abstract(spec, jnp.bfloat16)
    params = dummy_params(abstract, 0, case.quantization.encoder(spec))
    made = {each.name: each.function for each in programs(config, params)}
    state, drafted = made["state"](), made[verify.EMPTY]()
    options = {"spec": spec, "sampled_vocab": spec.vocab_size}

    def step(plan: StepPlan, target: Target) -> tuple[DeviceState, list[Sampled | None]]:
        (bucket,) = (each for each in config.all_buckets() if each.kind == plan.kind)
        updates = Updates.of(plan, config.sequences_shape[1], config.num_groups)
        own: Any = {"bucket": bucket, "target": target, **options}
        if isinstance(bucket, VerifyBucket):
            packed = jnp.asarray(verify.pack(plan, updates, bucket, config.padding_slot))
            after, _ = run_verify_step(params, state, drafted, packed, **own)
            return after, verify.unpack_results(plan, np.asarray(after.results), bucket)
        packed = jnp.asarray(batch.pack(plan, updates, bucket, config.padding_slot))
        after = run_step(params, state, packed, **own)
        return after, batch.unpack_results(plan, np.asarray(after.results), {})

    (long, first), (short, second), (last, third) = (
        case.sequence(slot, length) for slot, length in enumerate((769, 5, 94))
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
        StepPlan(
            rows=(long.verify(771, (1, 2)), short.verify(7, (3,)), last.decode(95)), verify=True
        ),
    ):
        _, found = step(plan, HOPPER)
        state, expected = step(plan, REFERENCE)
        for one, other in zip(found, expected, strict=True):
            difference = np.subtract(logprobs(one), logprobs(other))
            assert np.abs(difference).max() < case.bound


def logprobs(result: Sampled | None) -> list[float]:
    """The largest ones."""
    found = certain(result).logprobs
    assert found is not None
    return [value for _, value in found.top]

"""With defaults a model that fits serves: sequences and context follow the memory beside it."""

from __future__ import annotations

import logging
import re

import jax.numpy as jnp
import pytest

from jaxserve.config import ConfigError
from jaxserve.runner import kv_cache
from jaxserve.startup.buckets import GPU_DECODE, GPU_PREFILL
from jaxserve.startup.engine_plan import EnginePlan
from tests.startup.pretended import (
    H100,
    H200,
    L4,
    RTX_3060,
    RTX_3090,
    RTX_4080,
    RTX_4090,
    Card,
    planned_on,
)

GIB = 2**30


class Planner:
    """Plans for named models with random weights, and keeps what the log says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
        self._monkeypatch, self._caplog = monkeypatch, caplog
        caplog.set_level(logging.INFO, "jaxserve.startup")

    def __call__(self, card: Card, line: str) -> EnginePlan:
        self._caplog.clear()
        flags = ("--load-format", "dummy", "--model", *line.split())
        return planned_on(card, self._monkeypatch, *flags)

    @property
    def warnings(self) -> list[str]:
        """Of the last plan, about the engine."""
        found = (r for r in self._caplog.records if r.name.startswith("jaxserve.startup"))
        return [record.message for record in found if record.levelno >= logging.WARNING]

    @property
    def said(self) -> str:
        return self._caplog.text


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Planner:
    return Planner(monkeypatch, caplog)


KVARN = "--kv-cache-dtype kvarn_k4v4_g128"
INT4 = "--quantization int4"


@pytest.mark.parametrize(
    ("card", "line", "sequences", "context", "scratch"),
    [
        (RTX_3090, "qwen3-8b", 64, 34_496, 169),
        (RTX_4090, "qwen3-8b", 64, 34_496, 169),
        (L4, "qwen3-8b", 32, 25_408, 169),
        (RTX_3060, f"qwen3-8b {INT4}", 32, 27_200, 371),
        (RTX_4080, "qwen3-4b", 64, 38_144, 121),
        (RTX_3090, f"qwen3-32b {INT4}", 8, 7_104, 778),
        (RTX_4090, f"qwen3-32b {INT4}", 16, 9_152, 400),
        (RTX_3060, f"qwen3-8b {INT4} {KVARN}", 32, 40_960, 371),
        (RTX_4080, f"qwen3-4b {KVARN}", 64, 40_960, 368),
        (RTX_3090, f"qwen3-32b {INT4} {KVARN}", 8, 13_824, 778),
    ],
)
def test_a_model_serves_where_its_full_context_does_not_fit(
    card: Card, line: str, sequences: int, context: int, scratch: int, plan: Planner
) -> None:
    """`scratch`: megabytes of the largest step with so many sequences, as XLA compiles it for such
    a GPU (`scripts/inspect_steps.py`)."""
    found = plan(card, line)
    scheduler, cache = found.config.scheduler, found.config.cache
    assert (scheduler.max_num_seqs, scheduler.max_model_len) == (sequences, context)
    assert cache.usable_tokens >= context
    assert found.config.buckets.decode == GPU_DECODE[: GPU_DECODE.index(sequences) + 1]
    assert found.config.buckets.prefill == GPU_PREFILL
    memory = found.memory(scratch * 10**6)
    assert memory.headroom > 0.9 * GIB, "the reserve is left, whatever the estimate was"
    assert f"at most {sequences} sequences run at once" in plan.said
    assert len(plan.warnings) == (context < 40_960)
    if context < 40_960:
        assert f"the context is {context:,} tokens, not the model's 40,960" in plan.warnings[0]
        assert f"--max-model-len {context} silences this warning" in plan.warnings[0]


def test_what_is_kept_for_each_sequence_takes_half_of_the_cache_at_most(plan: Planner) -> None:
    """9 GiB at 256 sequences of Qwen3-4B."""
    for card, line in ((RTX_4080, "qwen3-4b"), (RTX_3060, f"qwen3-8b {INT4}"), (H100, "qwen3-32b")):
        config = plan(card, f"{line} {KVARN}").config
        kept = config.kv_format.fixed_bytes(config.kv_shapes[0], jnp.bfloat16)
        total = kv_cache.total_bytes(config.layouts, config.kv_shapes, jnp.bfloat16)
        assert 0 < kept < total / 2
        assert config.cache.usable_tokens >= 512 * config.scheduler.max_num_seqs


@pytest.mark.parametrize("card", [H100, H200])
@pytest.mark.parametrize("kv_format", ["auto", "int8", "kvarn_k4v4_g128"])
@pytest.mark.parametrize("line", ["qwen3-0.6b", "qwen3-8b", "qwen3-14b", f"qwen3-32b {INT4}"])
def test_a_large_card_runs_256_sequences_of_full_length(
    card: Card, kv_format: str, line: str, plan: Planner
) -> None:
    config = plan(card, f"{line} --kv-cache-dtype {kv_format}").config
    assert (config.scheduler.max_num_seqs, config.scheduler.max_model_len) == (256, 40_960)
    assert (config.buckets.decode, config.buckets.prefill) == (GPU_DECODE, GPU_PREFILL)
    assert not plan.warnings and "run at once" not in plan.said


def test_a_length_that_a_flag_says_is_kept_or_refused(plan: Planner) -> None:
    found = plan(RTX_3090, "qwen3-8b --max-model-len 32k").config
    assert found.scheduler.max_model_len == 32_768
    assert not plan.warnings
    with pytest.raises(ConfigError) as refusal:
        plan(RTX_3090, "qwen3-8b --max-model-len 40k")
    assert "one sequence of max_model_len 40960 needs 5,7" in str(refusal.value)


def test_a_length_that_a_flag_says_may_cost_sequences(plan: Planner) -> None:
    short, long = (
        plan(RTX_3090, f"qwen3-32b {INT4} {KVARN} --max-model-len {length}").config.scheduler
        for length in ("8k", "16k")
    )
    assert (short.max_num_seqs, long.max_num_seqs) == (8, 4)


def test_a_number_of_sequences_that_a_flag_says_is_kept(plan: Planner) -> None:
    for flags in ("--max-num-seqs 256", "--decode-buckets 1,16,256"):
        found = plan(RTX_3090, f"qwen3-8b {flags}").config.scheduler
        assert (found.max_num_seqs, found.max_model_len) == (256, 30_848)
        assert "run at once" not in plan.said


def test_a_cache_that_a_flag_sizes_decides_as_memory_does(plan: Planner) -> None:
    found = plan(H200, "qwen3-4b --kv-cache-memory-bytes 1Gi").config.scheduler
    assert (found.max_num_seqs, found.max_model_len) == (8, 7_168)
    assert "More fits with more --kv-cache-memory-bytes, --kv-cache-dtype int8" in plan.warnings[0]


def test_the_flags_that_are_named_give_more(plan: Planner) -> None:
    """Each of those that the warning names."""
    before = plan(RTX_3090, "qwen3-8b").config.scheduler.max_model_len
    named = plan.warnings[0]
    for flag in (
        "--gpu-memory-utilization 0.95",
        "--max-num-batched-tokens 512",
        "--kv-cache-dtype int8",
        "--quantization int4",
    ):
        assert re.sub(r" [\d.]+$", "", flag) in named
        assert plan(RTX_3090, f"qwen3-8b {flag}").config.scheduler.max_model_len > before
    plan(RTX_3090, f"qwen3-32b {INT4} {KVARN}")
    assert "--kv-cache-dtype" not in plan.warnings[0] and "--quantization" not in plan.warnings[0]


def test_the_context_of_a_long_model_is_the_longest_that_fits(plan: Planner) -> None:
    """A quantised cache expands a step's contexts, which takes more for a longer one."""
    for card, line in ((RTX_3060, "qwen3-4b"), (RTX_4080, f"qwen3-14b {INT4}")):
        for kv_format in ("auto", "int8", "kvarn_k4v2_g128"):
            config = plan(card, f"{line} --kv-cache-dtype {kv_format}").config
            context, size = config.scheduler.max_model_len, config.cache.page_size
            if context == 40_960:
                continue
            same = f"--kv-cache-dtype {kv_format} --max-num-seqs {config.scheduler.max_num_seqs}"
            plan(card, f"{line} {same} --max-model-len {context}")
            with pytest.raises(ConfigError, match="too little memory"):
                plan(card, f"{line} {same} --max-model-len {context + size}")


def test_a_model_that_leaves_no_room_is_refused_with_numbers(plan: Planner) -> None:
    with pytest.raises(ConfigError, match=r"the weights take 27\.5 GiB, this process may take 21"):
        plan(RTX_3090, "qwen3-14b")
    with pytest.raises(ConfigError, match=r"leave nothing of 8\.4 GiB for keys and values; use"):
        plan(RTX_3060, "qwen3-4b --gpu-memory-utilization 0.7")

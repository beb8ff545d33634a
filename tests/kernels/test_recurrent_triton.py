"""The kernels of recurrent layers against their definition, on a GPU, in the models' shapes."""

from __future__ import annotations

import pytest

from jaxserve_kernels.gated_delta_rule import Heads, RuleConfig
from jaxserve_kernels.target import Target
from tests.kernels.recurrent_cases import (
    SLOTS,
    Bounds,
    Mix,
    Run,
    check_conv,
    check_conv_and_gates,
    check_drafts,
    check_rule,
    decode_rows,
    in_a_chain,
    in_a_program,
)
from tests.kernels.recurrent_steps import Part

pytestmark = pytest.mark.gpu

MODELS = {
    "small": RuleConfig(Heads(2, 6, 16, 64), block=16, eps=1e-6),
    "35b_a3b": RuleConfig(Heads(16, 32, 128, 128), block=64, eps=1e-6),
    "27b": RuleConfig(Heads(16, 48, 128, 128), block=64, eps=1e-6),
}

ONE_ROW, ROWS = decode_rows(100), decode_rows(40, 0, 2)
PROMPTS = (300, 1000, 200, 0, 0)
"""Tokens of each slot's prompt. Slot 2 holds no numbers before, so its rows begin at 0."""
MIXES = {
    "a_prompt": Mix([Part(2, 0, 128)], 128, PROMPTS),
    "chunks_and_a_decode": Mix([Part(0, 300, 1), Part(1, 512, 192), Part(2, 0, 72)], 300, PROMPTS),
    "a_state_within_a_row": Mix([Part(1, 512, 192, 128, kept_in=4)], 200, PROMPTS),
    "the_rest_of_a_prompt": Mix([Part(0, 256, 44), Part(1, 1000, 1)], 64, PROMPTS),
    "short_blocks": Mix([Part(0, 300, 1), Part(1, 960, 40), Part(2, 0, 200)], 256, PROMPTS),
    "a_step_of_few_tokens": Mix([Part(0, 300, 1), Part(1, 960, 40)], 44, PROMPTS),
}
# Rounded to 8 bits an output differs by 2e-3; sums of products of halves of numbers by 2e-5.
BOUNDS = {"float32": Bounds(1e-5, 1e-5), "bfloat16": Bounds(6e-3, 1e-4)}
OF_SUMS = {"float32": Bounds(2e-6, 1e-6), "bfloat16": Bounds(4e-3, 1e-3)}
"""Of the convolution: sums of three parts may be taken in another order."""

of_models = pytest.mark.parametrize("model", MODELS)
of_dtypes = pytest.mark.parametrize("dtype", BOUNDS)


@of_models
@of_dtypes
@pytest.mark.parametrize("mix", [ONE_ROW, ROWS], ids=["one_row", "three_rows"])
@pytest.mark.parametrize("launch", [in_a_program, in_a_chain])
@pytest.mark.parametrize("many_heads", [1, 768])
def test_decode_rows(
    mix: Mix,
    launch: Run,
    dtype: str,
    model: str,
    many_heads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Programs of few columns, and of more, as where there are many heads."""
    name = "jaxserve_kernels.gated_delta_rule.triton._MANY_HEADS"
    monkeypatch.setattr(name, many_heads)
    check_rule(mix, MODELS[model], dtype, launch, Target.here(), BOUNDS[dtype])


@of_models
@of_dtypes
@pytest.mark.parametrize("mix", MIXES)
def test_prompts_in_blocks(mix: str, dtype: str, model: str) -> None:
    check_rule(MIXES[mix], MODELS[model], dtype, in_a_program, Target.here(), BOUNDS[dtype])


@of_models
@of_dtypes
@pytest.mark.parametrize("mix", MIXES)
def test_the_convolution(mix: str, dtype: str, model: str) -> None:
    channels = channels_of(model)
    check_conv(MIXES[mix], channels, dtype, in_a_program, Target.here(), OF_SUMS[dtype])


@of_models
@of_dtypes
@pytest.mark.parametrize("mix", [ONE_ROW, ROWS], ids=["one_row", "three_rows"])
@pytest.mark.parametrize("launch", [in_a_program, in_a_chain])
def test_the_convolution_of_decode_rows(mix: Mix, launch: Run, dtype: str, model: str) -> None:
    check_conv(mix, channels_of(model), dtype, launch, Target.here(), OF_SUMS[dtype])


@pytest.mark.parametrize(("model", "embed"), [("27b", 5120), ("35b_a3b", 2048), ("small", 384)])
@pytest.mark.parametrize("mix", [ONE_ROW, ROWS], ids=["one_row", "three_rows"])
def test_the_convolution_and_the_gates_of_decode_rows(mix: Mix, model: str, embed: int) -> None:
    rows, channels = 2 * MODELS[model].heads.value_heads, channels_of(model)
    own = (in_a_chain, Target.here(), OF_SUMS["bfloat16"])
    check_conv_and_gates(mix, embed, rows, channels, *own)
    check_conv_and_gates(Mix(mix.parts, 60), embed, rows, channels, *own)


@of_models
@of_dtypes
def test_what_is_rejected_leaves_no_trace(dtype: str, model: str) -> None:
    check_drafts(MODELS[model], dtype, in_a_program, Target.here(), BOUNDS[dtype])


def test_rows_of_fewer_tokens_than_the_convolution_sees() -> None:
    mix = Mix([Part(1, 7, 1), Part(2, 0, 2), Part(0, 3, 37)], 42, (0,) * SLOTS)
    check_conv(mix, 72, "bfloat16", in_a_program, Target.here(), OF_SUMS["bfloat16"])


def channels_of(model: str) -> int:
    heads = MODELS[model].heads
    return 2 * heads.keys + heads.values

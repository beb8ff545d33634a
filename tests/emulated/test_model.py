"""Steps of a whole model with kernels on the emulator, against the definition."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.model_spec import ModelSpec
from jaxserve.models import decoder
from jaxserve.models.layer import StepTokens
from jaxserve.models.quantization import Quantization
from jaxserve_checkpoints.dummy import dummy_params
from jaxserve_kernels import pdl
from jaxserve_kernels.paged_attention import tile_tokens
from jaxserve_kernels.target import REFERENCE, Target
from tests.emulated.errors import relative_error
from tests.emulator.targets import HOPPER, joined, with_pdl
from tests.kernels.kv_steps import AS_WRITTEN, Sequences
from tests.tiny_model import tiny_spec

SIZES = {"vocab_size": 256, "embed": 256, "ffn": 384, "num_layers": 2, "head_dim": 64}
QWEN3 = tiny_spec(**SIZES)
QWEN2, LLAMA = (tiny_spec(**SIZES, qk_norm=False, qkv_bias=biased) for biased in (True, False))
PADDING = 3
INT4 = Quantization(layers="int4", head="int8")
STARTS = (0, 1, 63, 64, 130)
ONE_EACH, MIXED = (1, 1, 1, 1, 1), (40, 1, 1, 29, 2)


@pytest.mark.parametrize(
    ("model", "quantization", "counts", "bound"),
    [
        (QWEN3, Quantization(), ONE_EACH, 0.02),
        (QWEN3, Quantization(), MIXED, 0.02),
        (QWEN3, INT4, ONE_EACH, 0.02),
        (QWEN3, INT4, MIXED, 0.15),  # more than 64 tokens, which become e4m3
        (QWEN2, Quantization(), ONE_EACH, 0.02),
        (QWEN2, Quantization(), MIXED, 0.02),
        (LLAMA, INT4, ONE_EACH, 0.02),
        (LLAMA, Quantization(), MIXED, 0.02),
    ],
    ids=[
        *("bfloat16-decode", "bfloat16-mixed", "int4-decode", "int4-mixed"),
        *("biased-decode", "biased-mixed", "plain-int4-decode", "plain-mixed"),
    ],
)
def test_a_step(
    model: ModelSpec,
    quantization: Quantization,
    counts: tuple[int, ...],
    bound: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Scores of each sequence's next token; a decode step is launched by PDL."""
    decodes = counts == ONE_EACH
    tile_size = 1 if decodes else tile_tokens(model.q_heads // model.kv_heads)
    sequences = Sequences(
        lengths=tuple(start + count for start, count in zip(STARTS, counts, strict=True)),
        page_size=64, dtype="bfloat16",
        q_heads=model.q_heads, kv_heads=model.kv_heads, head_dim=model.head_dim,
    )  # fmt: skip
    places = sequences.step(STARTS, counts, tile_size, PADDING, apart=not decodes)
    rng = np.random.default_rng(1)
    ids = jnp.asarray(rng.integers(0, model.vocab_size, places.slots.shape), jnp.int32)
    cache = (model.num_layers, sequences.num_pages, model.kv_heads, 2, 64, model.head_dim)
    kv = (jnp.asarray(rng.standard_normal(cache), jnp.bfloat16),)
    abstract = decoder.abstract(model, jnp.bfloat16, stacked=True)
    params = dummy_params(abstract, 3, quantization.encoder(model))
    last = jnp.asarray(np.cumsum(counts) - 1)

    def step(params: decoder.Params, kv: Any, tokens: StepTokens, target: Target) -> Any:
        if decodes:
            hidden, kv = decoder.decode(params, kv, tokens, model, target=target)
            hidden = hidden[last]
        else:
            pre_mlp, kv = decoder.forward(
                params, kv, tokens, model, tile_size=tile_size, target=target
            )
            hidden = decoder.finish(params, pre_mlp.of(last), model, target=target)
        return decoder.logits(params, hidden, target=target), kv

    inputs = (params, kv, StepTokens(ids, (places,)))
    expected, left = jax.jit(step, static_argnums=3, compiler_options=AS_WRITTEN)(
        *inputs, REFERENCE
    )
    monkeypatch.setattr(pdl, "call", with_pdl)
    monkeypatch.setattr(pdl, "join", joined)
    scores, written = step(*inputs, HOPPER)
    assert relative_error(scores, expected) < bound
    for index in range(model.num_layers):  # page 0 is padding's
        keys_and_values = (each[index, 1:].astype(jnp.float32) for each in (written[0], left[0]))
        assert relative_error(*keys_and_values) < bound

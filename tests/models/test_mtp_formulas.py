"""Multi-token prediction: its tensors, and what they compute against the formulas in NumPy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.layer_spec import ExpertsSpec
from jaxserve.models import registry
from jaxserve.models.drafts import mtp
from jaxserve.models.drafts.mtp import MtpParams
from jaxserve.models.drafts.spec import MtpDraft
from jaxserve_checkpoints.load import load_params
from jaxserve_checkpoints.quantized import QuantizedCheckpoint, detect
from jaxserve_checkpoints.reader import CheckpointError, open_checkpoint
from jaxserve_kernels.kv_format import CacheShape, Dense
from jaxserve_kernels.target import CPU
from jaxserve_kernels.weights import is_quantized
from tests.checkpoints import quantized_files as files
from tests.models.test_draft_heads import PAGE, PAGES_PER_SEQ, SLOTS, chunk
from tests.models.test_hybrid_loading import quantizable
from tests.mtp_files import mtp_passes, mtp_tensors
from tests.runner.test_recurrent_models import FULL, RECURRENT, hybrid

EXPERTS = ExpertsSpec(num_experts=8, top_k=3, width=24, normalize=True, shared_width=40)
SPARSE = hybrid(*(replace(each, feed_forward=EXPERTS) for each in (RECURRENT, FULL)))
SPECS = {
    "dense": hybrid(RECURRENT, FULL),
    "experts": replace(SPARSE, architecture="Qwen3_5MoeForCausalLM"),
}
TOLERANCE = 2e-5
"""Of states of about 1 to 3 in float32; 3e-6 is the worst measured."""
RNG = np.random.default_rng(7)
EMBEDDING = RNG.standard_normal((97, 32)).astype(np.float32)
STATES = RNG.standard_normal((20, 32)).astype(np.float32)
IDS = RNG.integers(0, 97, 20).tolist()


def loaded(folder: Path, spec: Any, tensors: dict[str, Any]) -> tuple[MtpDraft, MtpParams]:
    """Beside tensors of the model, which are left out."""
    others = {"model.embed_tokens.weight": EMBEDDING, "lm_head.weight": EMBEDDING}
    save_file(tensors | others, folder / "model.safetensors")
    body = registry.mtp_body(spec)
    assert body is not None
    draft = MtpDraft(body=body)
    rules, abstract = registry.mtp_rules(spec), mtp.abstract(draft, jnp.float32)
    return draft, load_params(open_checkpoint(folder), rules, abstract)


def cache_of(spec: Any) -> jax.Array:
    shape = CacheShape(
        layers=1,
        pages=1 + SLOTS * PAGES_PER_SEQ,
        kv_heads=spec.kv_heads,
        page_size=PAGE,
        head_dim=spec.head_dim,
        slots=SLOTS + 1,
    )
    return Dense().allocate(shape, jnp.float32).at[:, 1:].set(jnp.nan)


@pytest.mark.parametrize("name", SPECS)
def test_entries_and_passes_are_those_of_the_formulas(name: str, tmp_path: Path) -> None:
    """Entries that are stored, a chunk of them, and passes that go on with the head's own state."""
    spec = SPECS[name]
    tensors = mtp_tensors(spec)
    draft, params = loaded(tmp_path, spec, tensors)

    @jax.jit
    def passes(params: MtpParams, states: jax.Array) -> jax.Array:
        own = (params, draft, jnp.asarray(EMBEDDING))
        where: dict[str, Any] = {"target": CPU}
        kv = mtp.store(*own, cache_of(spec), chunk(1, 0, IDS[:9]), states[:9], **where)
        tokens = chunk(1, 9, IDS[9:14])
        hidden, again, kv = mtp.extend(*own, kv, tokens, states[9:14], tile_size=5, **where)
        found = [again[-1:]]
        for number, token in enumerate(IDS[14:17]):
            tokens = chunk(1, 14 + number, [token])
            hidden, again, kv = mtp.extend(*own, kv, tokens, found[-1], tile_size=1, **where)
            found.append(again)
        assert hidden is again
        return jnp.concatenate(found)

    expected = mtp_passes(spec, tensors, EMBEDDING, STATES[:14], IDS[:14], IDS[14:17])
    found = passes(params, jnp.asarray(STATES))
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    tensors = mtp_tensors(SPECS["dense"])
    tensors["mtp.layers.1.input_layernorm.weight"] = tensors["mtp.norm.weight"]
    del tensors["mtp.fc.weight"]
    with pytest.raises(CheckpointError, match=r"(?s)mtp\.fc\.weight.*mtp\.layers\.1\.input"):
        loaded(tmp_path, SPECS["dense"], tensors)


def test_a_layer_that_is_quantised_is_read_as_it_is(tmp_path: Path) -> None:
    """Beside an `fc` that is not, as in files of ModelOpt."""
    spec = quantizable(sparse=False)
    every = mtp_tensors(spec)
    names = [name for name in every if name.endswith("_proj.weight")]
    modules = {name.removesuffix(".weight"): every.pop(name).shape for name in names}
    weights = files.save(tmp_path, files.KINDS["fp8-blocks"], modules, 1, **every)
    found, body = detect(tmp_path), registry.mtp_body(spec)
    assert found is not None and body is not None
    abstract = mtp.abstract(MtpDraft(body=body), jnp.float32)
    checkpoint = QuantizedCheckpoint(open_checkpoint(tmp_path), found)
    params = load_params(checkpoint, registry.mtp_rules(spec), abstract)
    np.testing.assert_array_equal(params.fc, every["mtp.fc.weight"])
    down = params.layers[0].down
    assert down is not None and is_quantized(down)
    np.testing.assert_array_equal(down.dequantize(), weights["mtp.layers.0.mlp.down_proj"])


def test_only_families_that_have_it_predict_several_tokens() -> None:
    assert registry.mtp_body(replace(SPECS["dense"], architecture="Qwen3ForCausalLM")) is None

"""Which models may draft for a model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from jaxserve.cli.options import parse_args
from jaxserve.config import ConfigError
from jaxserve.models import registry
from jaxserve.models.drafts.spec import ModelDraft
from jaxserve.startup.draft_head import is_model, plan_head
from jaxserve.weights.loading import plan_weights
from jaxserve.weights.model_source import ModelSource, find_model
from jaxserve_checkpoints.resolve import EMBEDDED_NAME, resolve_model
from jaxserve_kernels.kv_format import NAMES
from tests import draft_files
from tests.startup.pretended import H200, planned_on
from tests.tiny_model import tiny_spec

FOLDER = resolve_model(EMBEDDED_NAME)


@pytest.fixture(scope="module")
def source() -> ModelSource:
    return find_model(parse_args([]))


def planned(source: ModelSource, folder: Path) -> Any:
    chosen = json.dumps({"model": str(folder), "num_speculative_tokens": 3})
    return planned_by(chosen, source)


def planned_by(chosen: str, source: ModelSource) -> Any:
    parsed, dtype = parse_args(["--speculative-config", chosen]), jnp.float32
    weights = plan_weights(parsed, source, dtype, Path("nowhere"), stacked=False)
    return plan_head(parsed, source, weights, dtype, stacked=False)


def test_a_model_of_the_same_tokens_drafts(source: ModelSource) -> None:
    head = planned(source, FOLDER)
    assert head.spec == ModelDraft(body=source.spec, num_drafts=3)
    assert head.num_bytes > 1_000_000


def test_a_model_of_other_tokens_is_refused(source: ModelSource, tmp_path: Path) -> None:
    for file in FOLDER.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tokens = json.loads((tmp_path / "tokenizer.json").read_text())
    vocab = tokens["model"]["vocab"]
    one, other = list(vocab)[40:42]
    vocab[one], vocab[other] = vocab[other], vocab[one]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokens))
    with pytest.raises(ConfigError, match=r"token \d+ is .*needs the same vocabulary"):
        planned(source, tmp_path)


def test_a_model_of_fewer_tokens_is_refused(source: ModelSource) -> None:
    more = replace(source.spec, vocab_size=10**6)
    with pytest.raises(ConfigError, match="the model 1000000; a draft model needs the same"):
        planned(replace(source, spec=more, folder=None), FOLDER)


@pytest.mark.parametrize("name", NAMES)
def test_the_keys_and_values_of_what_drafts_take_their_part_of_the_memory(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 16 bits, in the pages of the model, whatever its format is; also of a tier on the host."""
    flags = ("--model", "qwen3.5-27b", "--load-format", "dummy", "--kv-cache-dtype", name)
    flags += ("--kv-offload-size", "64Gi")
    plain = planned_on(H200, monkeypatch, *flags)
    drafted = planned_on(H200, monkeypatch, *flags, "--speculative-config", '{"method": "mtp"}')
    config, parts = drafted.config, drafted.memory(0)
    (shape,), (layout,) = config.kv_shapes, config.layouts
    token = 2 * 2 * shape.kv_heads * shape.head_dim
    page = config.kv_format.page_bytes(shape, jnp.bfloat16) + token * shape.page_size
    assert shape.layers == 16 and layout.page_bytes(shape, jnp.bfloat16) == page
    fixed = config.kv_format.fixed_bytes(shape, jnp.bfloat16)
    assert parts.kv_cache == config.cache.num_pages * page + fixed
    assert parts.weights + parts.kv_cache + parts.state < parts.limit
    assert config.cache.num_pages < plain.config.cache.num_pages
    assert config.draft_kv.shape[:2] == (1, config.cache.num_pages)
    assert config.draft_kv.dtype == jnp.bfloat16
    assert drafted.host is not None and drafted.host.page_bytes[0] == page


def test_heads_are_no_models() -> None:
    spec = tiny_spec(num_layers=8)
    for config in (draft_files.eagle3(spec), draft_files.dflash(spec), draft_files.dspark(spec)):
        assert not is_model(config)
        assert not is_model(config | {"architectures": ["GPT2LMHeadModel"]})
    assert is_model(draft_files.sizes(spec, layers=2) | {"architectures": ["LlamaForCausalLM"]})


def test_weights_for_multi_token_prediction_must_be_there(source: ModelSource) -> None:
    mtp = '{"method": "mtp"}'
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM has no weights for multi-token"):
        planned_by(mtp, source)
    golden = Path(__file__).parents[1] / "golden" / "hybrid"
    spec = registry.spec_of(json.loads((golden / "config.json").read_text()))
    with pytest.raises(ConfigError, match=r"has no tensors mtp\.\*"):
        planned_by(mtp, replace(source, spec=spec, folder=golden))

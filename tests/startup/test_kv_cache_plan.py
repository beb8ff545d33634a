"""What a start makes of the KV cache's flags: its plan, and the scales of a cache in fp8."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from jaxserve.cli.options import Options, parse_args
from jaxserve.config import ConfigError
from jaxserve.models import decoder, registry
from jaxserve.startup import build
from jaxserve.startup.engine_plan import EnginePlan, plan_engine
from jaxserve.weights.model_source import ModelSource, find_model
from jaxserve_checkpoints.load import load_params
from jaxserve_checkpoints.reader import open_checkpoint
from tests.e2e.process import small_model


@pytest.fixture(autouse=True)
def prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `environment.prepare` leaves it, as far as a plan on a CPU looks at it."""
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.9")


def planned(*flags: str) -> tuple[Options, ModelSource, EnginePlan]:
    options = parse_args([*flags])
    source = find_model(options)
    return options, source, plan_engine(options, source)


@pytest.mark.parametrize(
    ("name", "page_size", "own_tokens", "chunk_context"),
    [
        ("auto", 16, 0, None),
        ("bf16", 16, 0, None),
        ("fp8_e4m3", 16, 0, 65_536),
        ("int8", 16, 0, 65_536),
        ("kvarn_k4v4_g128", 128, 128, 65_536),
        ("kvarn_k4v2_g128", 128, 128, 65_536),
    ],
)
def test_a_format_brings_its_pages_and_its_limits(
    name: str, page_size: int, own_tokens: int, chunk_context: int | None
) -> None:
    _, _, plan = planned("--kv-cache-dtype", name, "--kv-cache-memory-bytes", "200Mi")
    config = plan.config
    assert config.kv_format.name == name
    assert (config.cache.page_size, config.cache.own_tokens) == (page_size, own_tokens)
    assert config.scheduler.max_chunk_context == chunk_context
    assert plan.memory(temporaries=0).kv_cache <= 200 * 2**20
    other = planned("--kv-cache-memory-bytes", "200Mi")[2].config.cache.identity
    assert (config.cache.identity == other) == (name == "auto"), "what a page holds differs"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--kv-cache-dtype", "kvarn_k4v2_g128", "--block-size", "64"),
            "--block-size is 64, but pages of --kv-cache-dtype kvarn_k4v2_g128 have 128 tokens",
        ),
        (
            ("--kv-cache-dtype", "int8", "--calculate-kv-scales"),
            "--calculate-kv-scales is for --kv-cache-dtype fp8_e4m3, not for int8",
        ),
        (
            ("--kv-cache-dtype", "fp8_e4m3", "--calibration", "text"),
            "--calibration needs --calculate-kv-scales",
        ),
        (
            ("--kv-cache-dtype", "fp8_e4m3", "--calculate-kv-scales", "--calibration", "/nowhere"),
            "--calibration /nowhere: cannot be read: No such file",
        ),
        (
            ("--kv-cache-dtype", "kvarn_k4v4_g128", "--max-num-seqs", "3000"),
            "beside the pages); lower --max-num-seqs, or give it more: --kv-cache-memory-bytes",
        ),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        planned(*flags)
    assert message in str(refusal.value)


class StubRunner:
    """Notes the scales that it is given; its keys reach 100, its values 0.02."""

    def __init__(self) -> None:
        self.scales: NDArray[np.float32] | None = None
        self.steps = 0
        self.results = self

    def use_kv_scales(self, scales: NDArray[np.float32]) -> None:
        self.scales = scales

    def launch(self, plan: object) -> StubRunner:
        self.steps += 1
        return self

    def block_until_ready(self) -> None:
        pass

    def largest_magnitudes(self) -> NDArray[np.float32]:
        assert self.scales is not None
        return np.broadcast_to(np.array([100, 0.02], np.float32), self.scales.shape).copy()


def set_scales(*flags: str) -> StubRunner:
    runner: Any = StubRunner()
    build._set_kv_scales(*planned(*flags), runner)  # pyright: ignore[reportPrivateUsage]
    return runner


def with_stored_scales(folder: Path) -> Path:
    """A checkpoint of two layers whose keys have scales of 0.5, whose values of 0.25."""
    model = small_model(folder)
    path = model / "model.safetensors"
    scales = {
        f"model.layers.{layer}.self_attn.{kind}_proj.{kind}_scale": np.array([scale], np.float32)
        for layer in range(2)
        for kind, scale in (("k", 0.5), ("v", 0.25))
    }
    save_file(load_file(path) | scales, path)
    return model


def test_scales_are_1_unless_something_says_otherwise(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        runner = set_scales("--kv-cache-dtype", "fp8_e4m3")
    assert runner.scales is None and not runner.steps, "an empty cache has scales of 1"
    assert "scales of the KV cache: 1, so keys and values beyond 448 are clipped" in caplog.text


def test_scales_found_by_a_text_hold_twice_of_what_was_seen(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        runner = set_scales("--kv-cache-dtype", "fp8_e4m3", "--calculate-kv-scales")
    assert runner.steps > 0 and runner.scales is not None
    assert np.unique(runner.scales[..., 0]).tolist() == [0.5]
    assert 0.04 <= 448 * runner.scales[..., 1].max() < 0.08
    assert "keys end at 224 to 224" in caplog.text


def test_other_formats_have_no_scales_to_set() -> None:
    assert set_scales("--kv-cache-dtype", "int8").scales is None


@pytest.mark.parametrize(
    "quantization",
    [
        None,
        {
            "quant_method": "compressed-tensors",
            "config_groups": {},
            "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"},
        },
        {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
    ],
    ids=["unquantised", "compressed-tensors", "modelopt"],
)
def test_scales_of_the_checkpoint_are_used(
    quantization: dict[str, Any] | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whose weights are not quantised: where they are, these tensors are left over."""
    model = with_stored_scales(tmp_path)
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps(settings | ({"quantization_config": quantization} if quantization else {}))
    )
    flags = ("--model", str(model), "--kv-cache-dtype", "fp8_e4m3")
    with caplog.at_level(logging.INFO):
        runner = set_scales(*flags)
    assert runner.scales is not None
    assert np.unique(runner.scales[..., 0]).tolist() == [0.5]
    assert np.unique(runner.scales[..., 1]).tolist() == [0.25]
    assert "from the checkpoint, keys end at 224 to 224, values at 112 to 112" in caplog.text
    spec = planned(*flags)[2].config.spec
    load_params(open_checkpoint(model), registry.rules(spec), decoder.abstract(spec, jnp.float32))

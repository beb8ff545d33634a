"""What makes a start impossible is said with names and numbers; `serve` prints it as one line."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxserve import host_memory
from jaxserve.cli.options import parse_args
from jaxserve.config import CacheConfig, ConfigError, HostTierConfig
from jaxserve.metrics.metrics import Metrics
from jaxserve.startup import build, host_tier_plan
from jaxserve.startup.engine_plan import plan_engine
from jaxserve.startup.timeline import Timeline
from jaxserve.weights.model_source import find_model
from jaxserve_checkpoints.reader import CheckpointError
from tests.e2e.process import small_model


@pytest.fixture(autouse=True)
def prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `environment.prepare` leaves it, as far as a plan on a CPU looks at it."""
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.9")


def refused(*flags: str) -> str:
    """Why no engine can be planned for these flags."""
    options = parse_args([*flags])
    with pytest.raises((ConfigError, CheckpointError)) as error:
        plan_engine(options, find_model(options))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_folders_without_a_model_are_named(tmp_path: Path) -> None:
    assert refused("--model", str(tmp_path / "nothing")).endswith("nothing: no such folder")
    assert refused("--model", str(tmp_path)).endswith("the folder holds no config.json")


def test_another_architecture_is_named(tmp_path: Path) -> None:
    model = small_model(tmp_path)
    config = json.loads((model / "config.json").read_text())
    config["architectures"] = ["MambaForCausalLM"]
    (model / "config.json").write_text(json.dumps(config))
    assert "MambaForCausalLM" in refused("--model", str(model))


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    (small_model(tmp_path) / "tokenizer.json").unlink()
    assert "tokenizer.json" in refused("--model", str(tmp_path))


def test_a_cache_too_small_for_one_sequence_is_refused_with_numbers() -> None:
    message = refused("--kv-cache-memory-bytes", "1M", "--max-model-len", "4096")
    assert "holds 96 tokens, but one sequence of max_model_len 4096 needs" in message
    message = refused("--kv-cache-memory-bytes", "1M")
    assert "holds 96 tokens, but one sequence of max_model_len 512 needs" in message


def test_a_copy_of_weights_that_have_no_4_bits_is_refused() -> None:
    assert "none of the weights has 4 bits" in refused("--fp8-copy", "on")
    assert "none of the weights" in refused("--fp8-copy", "on", "--quantization", "fp8")


def test_more_sequences_than_pages_are_refused() -> None:
    message = refused("--max-num-seqs", "100000")
    assert "is 100000, but the KV cache has 4095 pages" in message


def test_a_model_too_large_for_the_machine_is_refused_with_numbers() -> None:
    message = refused("--model", "qwen3-32b", "--load-format", "dummy")
    assert "too little memory: weights 122 GiB" in message


def test_a_length_beyond_the_model_is_refused() -> None:
    assert "4096" in refused("--max-model-len", "5000")


def windowed(tmp_path: Path) -> Path:
    """A model whose last layers see 96 tokens."""
    model = small_model(tmp_path)
    config = json.loads((model / "config.json").read_text())
    config |= {"use_sliding_window": True, "sliding_window": 96, "max_window_layers": 1}
    config["layer_types"] = None
    (model / "config.json").write_text(json.dumps(config))
    return model


def planned(*flags: str) -> CacheConfig:
    options = parse_args([*flags, "--block-size", "16"])
    return plan_engine(options, find_model(options)).config.cache


def test_layers_with_a_window_get_pages_of_their_own(tmp_path: Path) -> None:
    model = str(windowed(tmp_path))
    cache = planned("--model", model)
    assert [group.window for group in cache.groups] == [None, 96]
    full, window = cache.groups
    assert full.num_pages > window.num_pages, "the window cannot use more"
    assert planned("--model", model, "--max-model-len", "96").window is None
    assert len(planned("--model", model, "--max-model-len", "96").groups) == 1


def test_kvarn_with_a_window_is_refused_on_a_gpu_with_what_is_served(tmp_path: Path) -> None:
    flags = ("--model", str(windowed(tmp_path)), "--kv-cache-dtype", "kvarn_k4v4_g128")
    options = parse_args([*flags])
    device = SimpleNamespace(platform="gpu", device_kind="H100")
    with pytest.raises(ConfigError) as error:
        plan_engine(options, find_model(options), device)
    message = str(error.value)
    assert "the last 96 tokens only (sliding_window)" in message
    assert "--kv-cache-dtype fp8_e4m3 or int8, or --max-model-len 96" in message


def test_an_empty_text_to_calibrate_with_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").touch()
    flags = ("--kv-cache-dtype", "fp8_e4m3", "--calculate-kv-scales", "--calibration")
    assert "text is empty" in refused(*flags, str(tmp_path / "text"))


@pytest.mark.parametrize(
    "flags",
    [
        ["--kv-offload-path", "/tmp/pages"],
        ["--kv-offload-verify"],
        ["--kv-offload-load-rate", "10G"],
    ],
    ids=lambda flags: flags[0],
)
def test_flags_of_the_host_tier_need_the_tier(flags: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"^{flags[0]} needs --kv-offload-size"):
        host_tier_plan.check_flags(parse_args(flags))
    host_tier_plan.check_flags(parse_args([*flags, "--kv-offload-size", "1G"]))


@pytest.mark.parametrize("rate", ["0", "-1G", "fast"])
def test_a_load_rate_is_above_0(rate: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--kv-offload-size", "1G", f"--kv-offload-load-rate={rate}"])
    assert "must be a size such as" in capsys.readouterr().err


def test_a_host_tier_beyond_the_machine_is_refused_before_weights_are_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(*_: object) -> None:
        raise AssertionError("weights are loaded")

    monkeypatch.setattr(build, "weight_loader", load)
    monkeypatch.setattr(host_memory, "available", lambda: 6 << 30)

    def start(size: str) -> str:
        options = parse_args(["--kv-offload-size", size, "--max-model-len", "64"])
        with pytest.raises(ConfigError) as error:
            build.build_parts(
                options, find_model(options), Metrics("m"), lambda *_: None, Timeline()
            )
        return str(error.value)

    message = start("5Gi")
    assert "--kv-offload-size 5.0 GiB is more than this machine can give: 6.0 GiB are" in message
    assert "1.0 GiB stay free; ask for at most " in message
    most = message.split("at most ")[1].split(",")[0]
    with pytest.raises(AssertionError, match="weights are loaded"):
        start(most)
    assert "holds 0 pages of " in start("1k")
    tier = HostTierConfig(slots=9, page_bytes=(100,), store_ring=4, load_ring=4, lookahead=2)
    monkeypatch.setattr(host_memory, "available", lambda: 1 << 30)
    with pytest.raises(ConfigError, match=r"stay free; leave it out$"):
        host_tier_plan.check_memory(tier, beside=0)

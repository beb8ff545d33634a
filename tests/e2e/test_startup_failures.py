"""A server that cannot start says why in one line and ends."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest

from tests.e2e.process import ROOT, finish, start

GOLDEN = ROOT / "tests" / "golden" / "tied"


def fails_with(*flags: str, environment: dict[str, str] | None = None) -> str:
    """The error line of a start that must fail."""
    status, output = finish(start(*flags, environment=environment))
    assert status == 1, output
    assert "Traceback" not in output
    last = output.strip().splitlines()[-1]
    assert last.startswith("jaxserve: error: "), output
    return last


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A whole small model, to be damaged."""
    embedded = ROOT / "checkpoints" / "jaxserve_checkpoints" / "embedded"
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded / name, folder / name)
    return folder


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    assert "no such folder" in fails_with("--model", str(tmp_path / "nothing"))


def test_a_folder_without_a_configuration_is_named(tmp_path: Path) -> None:
    assert "config.json" in fails_with("--model", str(tmp_path))


def test_another_architecture_is_named(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps({**config, "architectures": ["LlamaForCausalLM"]})
    )
    assert "LlamaForCausalLM" in fails_with("--model", str(model))


def test_a_truncated_checkpoint_is_told_with_its_sizes(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    message = fails_with("--model", str(model))
    assert "model.safetensors" in message
    assert str(weights.stat().st_size) in message.replace(",", "")


def test_a_missing_tokenizer_is_named(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    assert "tokenizer.json" in fails_with("--model", str(model))


def test_a_port_in_use_is_known_before_anything_slow() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = fails_with("--port", str(port))
    assert f"port {port}" in message
    assert "--port" in message


def test_a_cache_too_small_for_one_sequence_is_refused_with_numbers() -> None:
    message = fails_with("--kv-cache-memory-bytes", "1M")
    assert "too little memory" in message
    assert "4096" in message


def test_a_model_too_large_for_the_machine_is_refused_with_numbers() -> None:
    message = fails_with("--model", "qwen3-32b", "--load-format", "dummy")
    assert "too little memory: weights 122 GiB" in message


def test_a_length_beyond_the_model_is_refused() -> None:
    assert "4096" in fails_with("--max-model-len", "5000")


def test_a_model_of_the_hub_is_looked_for_and_the_folder_named_when_offline() -> None:
    message = fails_with("--model", "qwen3-4b", environment={"HF_HUB_OFFLINE": "1"})
    assert "Qwen/Qwen3-4B" in message
    assert "--load-format dummy" in message


def test_flags_that_do_not_exist_end_with_the_usage() -> None:
    status, output = finish(start("--no-such-flag"))
    assert status == 2
    assert "--no-such-flag" in output

"""A server that cannot start says why in one line and ends: more reasons are in
`tests/startup/test_refused_starts.py`."""

from __future__ import annotations

import socket
from pathlib import Path

from tests.e2e.process import finish, small_model, start


def fails_with(*flags: str, environment: dict[str, str] | None = None) -> str:
    """The error line of a start that must fail."""
    status, output = finish(start(*flags, environment=environment))
    assert status == 1, output
    assert "Traceback" not in output
    last = output.strip().splitlines()[-1]
    assert last.startswith("jaxserve: error: "), output
    return last


def test_a_truncated_checkpoint_is_told_with_its_sizes(tmp_path: Path) -> None:
    model = small_model(tmp_path / "model")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    message = fails_with("--model", str(model))
    assert "model.safetensors" in message
    assert str(weights.stat().st_size) in message.replace(",", "")


def test_a_port_in_use_is_known_before_anything_slow() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = fails_with("--port", str(port))
    assert f"port {port}" in message
    assert "--port" in message


def test_a_model_of_the_hub_is_looked_for_and_the_folder_named_when_offline() -> None:
    message = fails_with("--model", "qwen3-4b", environment={"HF_HUB_OFFLINE": "1"})
    assert "Qwen/Qwen3-4B" in message
    assert "--load-format dummy" in message


def test_flags_that_do_not_exist_end_with_the_usage() -> None:
    status, output = finish(start("--no-such-flag"))
    assert status == 2
    assert "--no-such-flag" in output

"""A server that cannot start says why in one line and ends: more reasons are in
`tests/startup/test_refused_starts.py`."""

from __future__ import annotations

import socket
from pathlib import Path

from tests.e2e.process import OBEY_PERMISSIONS, finish, run, small_model, start


def fails_with(
    *flags: str, environment: dict[str, str] | None = None, as_anybody: bool = False
) -> str:
    """The error line of a start that must fail; files' modes count for root, too, `as_anybody`."""
    before = OBEY_PERMISSIONS if as_anybody else ""
    process = run("-m", "jaxserve", "--port", "0", *flags, environment=environment, before=before)
    status, output = finish(process)
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


def test_weights_that_may_not_be_read_are_named(tmp_path: Path) -> None:
    model = small_model(tmp_path / "model")
    (model / "model.safetensors").chmod(0)
    message = fails_with("--model", str(model), as_anybody=True)
    assert "Permission denied" in message
    assert str(model / "model.safetensors") in message


def test_a_model_s_folder_that_may_not_be_entered_is_named(tmp_path: Path) -> None:
    model = small_model(tmp_path / "model")
    model.chmod(0)
    try:
        message = fails_with("--model", str(model), as_anybody=True)
    finally:
        model.chmod(0o700)
    assert "Permission denied" in message
    assert str(model) in message


def test_a_host_that_is_no_name_is_told() -> None:
    assert "--host a..b" in fails_with("--host", "a..b")


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

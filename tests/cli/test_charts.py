"""Command lines that charts for vLLM run: each parses, or is refused with a reason that names the
flag. Written down from the templates of vLLM's production-stack, KServe and llm-d."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from jaxserve import __version__
from jaxserve.__main__ import main

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"

PARSES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "production-stack": (
        [
            *("serve", "Qwen/Qwen3-8B", "--host", "0.0.0.0", "--port", "8000"),
            *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
            *("--no-enable-chunked-prefill", "--enable-prefix-caching", "--max-model-len", "16384"),
            *("--dtype", "bfloat16", "--tensor-parallel-size", "1", "--max-num-seqs", "64"),
            *("--gpu_memory_utilization", "0.8", "--max_loras", "4", "--enforce-eager"),
        ],
        {
            "model": "Qwen/Qwen3-8B",
            "host": "0.0.0.0",
            "max_model_len": 16384,
            "gpu_memory_utilization": 0.8,
            "tool_call_parser": "hermes",
        },
    ),
    "production-stack, sleep mode and a second name": (
        [
            *("serve", "Qwen/Qwen3-8B", "--host", "0.0.0.0", "--port", "8000"),
            *("--no-enable-prefix-caching", "--max_num_batched_tokens", "2048"),
            *("--served-model-name", "Qwen/Qwen3-8B", "qwen3", "--enable-sleep-mode"),
            *("--gpu-memory-utilization", "0.8", "--runner", "generate", "--convert", "none"),
        ],
        {
            "enable_prefix_caching": False,
            "max_num_batched_tokens": 2048,
            "served_model_name": ["Qwen/Qwen3-8B", "qwen3"],
        },
    ),
    "production-stack, operator": (
        [
            *("serve", "Qwen/Qwen3-8B", "--port", "8000", "--enable-chunked-prefill"),
            *("--tensor-parallel-size", "1", "--pipeline-parallel-size", "1"),
            *("--max-num-seqs", "32", "--trust-remote-code", "--revision", "main"),
        ],
        {"revision": "main", "max_num_seqs": 32},
    ),
    "KServe with vLLM of now": (
        [
            *("serve", "/mnt/models", "--served-model-name", "qwen3"),
            *("publishers/team/models/qwen3", "--port", "8000"),
            *("--disable-access-log-for-endpoints", "/health,/metrics,/ping"),
            *("--shutdown-timeout", "15", "--tensor-parallel-size", "1", "--enable-ssl-refresh"),
            *("--ssl-certfile", "/var/run/kserve/tls/tls.crt"),
            *("--ssl-keyfile", "/var/run/kserve/tls/tls.key"),
            *("--max-model-len=32768", "--gpu-memory-utilization=0.95"),
        ],
        {
            "served_model_name": ["qwen3", "publishers/team/models/qwen3"],
            "shutdown_timeout": 15.0,
            "ssl_certfile": Path("/var/run/kserve/tls/tls.crt"),
            "max_model_len": 32768,
        },
    ),
    "KServe with a version before 0.16, as it takes ours for": (
        [
            *("serve", "/mnt/models", "--served-model-name", "qwen3"),
            *("publishers/team/models/qwen3", "--port", "8000", "--disable-uvicorn-access-log"),
        ],
        {"model": "/mnt/models"},
    ),
    "llm-d": (
        [
            *("serve", "Qwen/Qwen3-32B", "--tensor-parallel-size=1", "--block-size=64"),
            "--disable-access-log-for-endpoints=/health,/metrics,/v1/models",
            "--no-enable-log-requests",
            *("--shutdown-timeout", "45", "--otlp-traces-endpoint=http://otel-collector:4317"),
            "--collect-detailed-traces=all",
        ],
        {"block_size": 64, "shutdown_timeout": 45.0},
    ),
    "llm-d, precise prefixes": (
        [
            *("serve", "Qwen/Qwen3-32B", "--block-size=64", "--kv-events-config"),
            '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557",'
            '"topic":"kv@10.0.0.1:8000@Qwen/Qwen3-32B"}',
        ],
        {"block_size": 64},
    ),
}

REFUSED: dict[str, tuple[list[str], str]] = {
    "production-stack with LMCache": (
        ["serve", "m", "--kv-transfer-config", '{"kv_connector":"LMCacheConnectorV1"}'],
        "--kv-transfer-config: leave it out: each server computes its prompts itself",
    ),
    "KServe, prefill and decode apart": (
        ["serve", "/mnt/models", "--kv_transfer_config", '{"kv_connector":"NixlConnector"}'],
        "--kv-transfer-config: leave it out: each server computes its prompts itself",
    ),
    "KServe with data parallelism": (
        ["serve", "/mnt/models", "--data-parallel-size-local", "2", "--headless"],
        "--data-parallel-size-local: one process serves one GPU",
    ),
    "KServe with ciphers of its own": (
        ["serve", "/mnt/models", "--ssl-ciphers", "ECDHE-RSA-AES128-GCM-SHA256"],
        "--ssl-ciphers: leave it out: Python's TLS",
    ),
    "KServe with adapters": (
        ["serve", "/mnt/models", "--enable-lora", "--max-loras", "2", "--lora-modules", "{}"],
        "--enable-lora: LoRA adapters are not served",
    ),
    "KServe's tokenizer": (
        ["launch", "render", "/mnt/models/base", "--port=8000"],
        "launch: every server answers /v1/chat/completions/render",
    ),
    "production-stack, embeddings": (
        ["serve", "m", "--runner", "pooling"],
        "--runner pooling: not supported; jaxserve only generates text",
    ),
    "llm-d on two GPUs": (
        ["serve", "Qwen/Qwen3-32B", "--tensor-parallel-size=2"],
        "--tensor-parallel-size 2: one process serves one GPU",
    ),
}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The options of servers that would have been started."""
    options: list[Any] = []
    monkeypatch.setattr(
        "jaxserve.commands.serve.serve", lambda given, *_: options.append(given) or 0
    )
    monkeypatch.setattr("jaxserve.startup.heap.import_freely", lambda: None)
    return options


@pytest.mark.parametrize("chart", PARSES)
def test_command_lines_of_charts_parse(chart: str, served: list[Any]) -> None:
    argv, wanted = PARSES[chart]
    assert main(list(argv)) == 0
    assert {name: getattr(served[0], name) for name in wanted} == wanted


@pytest.mark.parametrize("chart", REFUSED)
def test_what_is_not_there_is_refused_by_name(
    chart: str, served: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    argv, said = REFUSED[chart]
    with pytest.raises(SystemExit) as ended:
        main(list(argv))
    assert ended.value.code == 2 and not served
    assert said in capsys.readouterr().err


def test_the_command_is_also_called_vllm() -> None:
    scripts = tomllib.loads(PYPROJECT.read_text())["project"]["scripts"]
    assert scripts["vllm"] == scripts["jaxserve"] == "jaxserve.__main__:main"


@pytest.mark.parametrize(("flag", "shown"), [("--version", __version__), ("--help=all", "--port")])
def test_wrappers_find_the_version_and_the_flags(
    flag: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """KServe's takes the last word of the last line, and looks for flags in the help."""
    with pytest.raises(SystemExit) as ended:
        main(["serve", flag] if flag != "--version" else [flag])
    assert not ended.value.code
    output = capsys.readouterr().out
    assert shown in output
    if flag == "--version":
        assert output.split()[-1] == shown

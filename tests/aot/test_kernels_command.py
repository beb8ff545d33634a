"""`jaxserve kernels` says which implementation serves each operation, and why others do not."""

from __future__ import annotations

import json

import pytest

from tests.aot.compiled_steps import missing

if lacking := missing():
    pytest.skip(f"missing: {', '.join(lacking)}", allow_module_level=True)

from jaxserve.cli.options import parse_args
from jaxserve.commands.kernels import Served, choices, kernels

FEW = ["--decode-buckets", "1,64,128", "--prefill-buckets", "512", "--max-num-seqs", "128"]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.9")


def served(device: str, *flags: str) -> dict[tuple[str, str], Served]:
    """By program and operation; of those that are called twice the last."""
    line = ["--device", device, "--model", "qwen3-4b", *FEW, *flags]
    found = choices(parse_args(line, "kernels"))
    return {(each.program, each.operation): each for each in found}


def test_int4_on_hopper() -> None:
    found = served("h100", "--quantization", "int4", "--fp8-copy", "off")
    gate_up = "gated_linear_Int4Weight, weight 19456 x 2560"
    names = [found[f"decode {rows}", gate_up].implementation for rows in (1, 64)]
    assert names == ["triton_streaming", "triton_stream_k"]
    assert found["decode 64", gate_up].pdl and found["decode 128", gate_up].pdl
    many = found["decode 128", gate_up]
    assert many.implementation == "e4m3/triton, codes to e4m3 in registers"
    reasons = dict(many.refused)
    assert reasons["triton_streaming"] == "more than 64 tokens"
    assert reasons["triton"] == "so many tokens that they are read in 8 bits"
    assert "splits=" in many.config


def test_caches_and_other_cards() -> None:
    found = served("a100-80gb", "--kv-cache-dtype", "kvarn_k4v2_g128")
    attention = found["decode 1", "attention_kvarn, tokens of 6144, tiles of 1"]
    assert attention.implementation == "triton_streaming, with its inputs" and not attention.pdl
    chunks = found["mixed 512", "paged_attention, 32 heads of 128, tiles of 32"]
    assert chunks.implementation == "triton"
    assert dict(chunks.refused)["hopper"] == "written for GPUs of compute capability 9.0"


def test_the_command_prints_words_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["--device", "h200", "--model", "qwen3-4b", "--speculative-config", "off", *FEW]
    assert kernels(parse_args([*line, "--all"], "kernels")) == 0
    words = capsys.readouterr().out
    assert words.startswith("qwen3-4b on NVIDIA H200, traced without the GPU\n")
    assert "\nlinear, weight 6144 x 2560\n  decode 1: triton_streaming (rows=64, " in words
    assert "\n  decode 128, mixed 512: xla\n      not triton_streaming: only with " in words
    assert kernels(parse_args([*line, "--json"], "kernels")) == 0
    assert json.loads(capsys.readouterr().out)[0]["implementation"] == "triton_streaming"

"""`jaxserve plan` says what a start would find, and where its step times come from."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxserve.cli.gpus import GPUS
from jaxserve.cli.options import parse_args
from jaxserve.commands.plan import _FACTORS, estimate, plan
from jaxserve.config import ConfigError

MEASUREMENTS = Path(__file__).parents[2] / "docs" / "measurements"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.9")


@pytest.mark.parametrize(
    ("gpu", "line", "sequences", "context"),
    [
        ("rtx4090", "qwen3-8b", 64, 34_496),
        ("l4", "qwen3-8b", 32, 25_408),
        ("rtx3060", "qwen3-8b --quantization int4", 32, 27_200),
        ("rtx3090", "qwen3-32b --quantization int4", 8, 7_104),
        ("h200", "qwen3-4b", 256, 40_960),
    ],
)
def test_it_plans_what_a_start_on_such_a_gpu_would(
    gpu: str, line: str, sequences: int, context: int
) -> None:
    """The numbers of tests/startup/test_small_cards.py, which pretends the GPU to a start."""
    found = estimate(parse_args(["--gpu", gpu, "--model", *line.split()], "plan"))
    assert (found.max_num_seqs, found.max_model_len) == (sequences, context)
    assert found.kv_tokens >= context
    assert found.weights + found.kv_cache < found.memory
    assert found.streams[context] == found.kv_tokens // context or found.streams[context] == 256


def test_bytes_of_a_token_follow_the_format_of_the_cache() -> None:
    sizes = [
        estimate(
            parse_args(["--gpu", "h100", "--model", "qwen3-4b", "--kv-cache-dtype", name], "plan")
        ).kv_bytes_per_token
        for name in ("auto", "fp8_e4m3", "int8", "kvarn_k4v4_g128", "kvarn_k4v2_g128")
    ]
    assert sizes == [147_456, 73_728, 76_032, 40_320, 31_104]


def test_state_and_snapshots_of_recurrent_layers_are_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = parse_args(["--gpu", "h200", "--model", "qwen3.5-35b-a3b"], "plan")
    found = estimate(options)
    assert found.state_bytes == 64_389_120 and found.snapshots > 64
    assert plan(options) == 0
    printed = capsys.readouterr().out
    assert f", {found.snapshots:,} of 61.4 MiB, for the prefix cache" in printed
    assert ", 61.4 MiB for each sequence" in printed


def test_steps_of_few_sequences_read_few_experts() -> None:
    """Qwen3-30B-A3B in bf16: 61.1 GB, 58.0 of them experts, 0.6 an embedding of which rows are
    read. One token has 8 of 128 experts; 256 have all."""
    found = estimate(parse_args(["--gpu", "h200", "--model", "qwen3-30b-a3b"], "plan"))
    floors = {step.sequences: step.peak_ms * GPUS["h200"].gb_per_s / 1e3 for step in found.steps}
    keys_and_values = 1024 * found.kv_bytes_per_token / 1e9
    assert floors[1] - keys_and_values == pytest.approx(6.08, abs=0.01)
    assert floors[8] - 8 * keys_and_values == pytest.approx(25.8, abs=0.1)
    assert floors[256] - 256 * keys_and_values == pytest.approx(60.4, abs=0.1)


@pytest.mark.parametrize(("line", "gib"), [("gpt-oss-20b", 13.0), ("gpt-oss-120b", 62.0)])
def test_models_of_experts_fit_as_they_are_published(line: str, gib: float) -> None:
    """Names of gpt-oss mean experts in MXFP4; steps touch few of them."""
    found = estimate(parse_args(["--gpu", "h200", "--model", *line.split()], "plan"))
    assert found.weights / 2**30 == pytest.approx(gib, abs=0.1)
    one, *_, many = found.steps
    assert one.peak_ms < 0.35 * many.peak_ms


def test_expected_steps_are_within_what_was_measured() -> None:
    """Ratios of measured steps to the time that their bytes take at the card's peak rate."""
    h200 = json.loads((MEASUREMENTS / "step_h200.json").read_text())
    h100 = json.loads((MEASUREMENTS / "quantized_steps_h100.json").read_text())
    ratios: dict[str | None, list[float]] = {}

    def add(name: str | None, result: dict[str, Any], peak: float) -> None:
        for timing in result["timings"]:
            floor = timing["floor_ms"] * result["copy_tb_per_s"] * 1e3 / peak
            ratios.setdefault(name, []).append(timing["step_ms"] / floor)

    add(None, h200, GPUS["h200"].gb_per_s)
    for run in h100["runs"]:
        if run["quantization"] in _FACTORS:
            add(run["quantization"], run, GPUS["h100"].gb_per_s)
    assert ratios.keys() == _FACTORS.keys()
    for name, factors in _FACTORS.items():
        assert factors.least == pytest.approx(min(ratios[name]), rel=0.01)
        assert factors.most == pytest.approx(max(ratios[name]), rel=0.01)


def test_the_measured_steps_of_an_h200_are_in_the_range_that_it_prints() -> None:
    found = estimate(parse_args(["--gpu", "h200", "--model", "qwen3-4b"], "plan"))
    measured = json.loads((MEASUREMENTS / "step_h200.json").read_text())["timings"]
    times = {timing["batch"]: timing["step_ms"] for timing in measured}
    for step in found.steps:
        if step.sequences in times:
            assert step.peak_ms < step.least_ms <= times[step.sequences] <= step.most_ms * 1.01


def test_what_does_not_fit_or_is_not_there_is_one_line() -> None:
    for flags, said in (
        (["--gpu", "l4", "--model", "qwen3-32b"], "too little memory"),
        (["--gpu", "l4", "--model", "Qwen/Qwen3-4B"], "pass a folder with config.json"),
        (["--model", "qwen3-4b"], "--gpu is missing"),
    ):
        with pytest.raises(ConfigError, match=said):
            estimate(parse_args(flags, "plan"))


def test_the_command_prints_the_plan_in_words_and_as_json() -> None:
    command = [sys.executable, "-m", "jaxserve", "plan", "--model", "qwen3-8b", "--gpu", "rtx4090"]
    words = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "34,496 tokens (what fits)" in words.stdout and not words.stderr
    found = json.loads(subprocess.check_output([*command, "--json"], text=True))
    assert found["max_model_len"] == 34_496 and found["streams"]["4096"] == 8


def test_its_flags_are_those_of_serving_and_its_own() -> None:
    options = parse_args(["--gpu", "h100", "--gpu-memory", "40Gi", "--json"], "plan")
    assert (options.gpu, options.gpu_memory, options.json) == ("h100", 40 * 2**30, True)
    with pytest.raises(SystemExit):
        parse_args(["--gpu", "h100"])

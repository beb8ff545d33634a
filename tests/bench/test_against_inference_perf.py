"""The harness and kubernetes-sigs/inference-perf time the same traffic on the same server alike.

python -m venv V && V/bin/pip install inference-perf==0.7.0
PATH=$PATH:V/bin python -m pytest -m slow -s tests/bench/test_against_inference_perf.py
"""

from __future__ import annotations

import asyncio
import json
import shutil
import zlib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxserve.bench.experiment import run_experiment
from jaxserve.bench.options import Experiment
from tests.bench.mock_server import Course, serving

RATE, SECONDS, TOKENS = 8, 20, 12


def course(body: dict[str, Any], _: int) -> Course:
    """By the prompt, so the same for both clients."""
    drawn = zlib.crc32(body["prompt"].encode())
    return Course(
        ttft=0.3 + 0.2 * (drawn % 97) / 97,
        gap=0.03 + 0.02 * (drawn % 31) / 31,
        tokens=body["max_tokens"],
    )


def write_tokenizer(folder: Path) -> None:
    """A token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = models.BPE({letter: token for token, letter in enumerate(alphabet)}, [])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def lengths(tokens: int) -> dict[str, int]:
    return {"min": tokens, "max": tokens, "mean": tokens, "std_dev": 0, "total_count": 1000}


async def by_inference_perf(program: str, url: str, folder: Path) -> list[dict[str, Any]]:
    """What it says of each request."""
    write_tokenizer(folder / "tokenizer")
    config = {
        "api": {"type": "completion", "streaming": True},
        "data": {
            "type": "random",
            "input_distribution": lengths(40),
            "output_distribution": lengths(TOKENS),
        },
        "load": {
            "type": "poisson",
            "interval": 1,
            "stages": [{"rate": RATE, "duration": SECONDS}],
            "num_workers": 1,
            "base_seed": 42,
        },
        "server": {"type": "vllm", "model_name": "mock", "base_url": url, "ignore_eos": True},
        "tokenizer": {"pretrained_model_name_or_path": str(folder / "tokenizer")},
        "report": {"request_lifecycle": {"summary": True, "per_request": True}},
        "storage": {"local_storage": {"path": str(folder / "report")}},
    }
    (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    process = await asyncio.create_subprocess_exec(
        program, "--config_file", str(folder / "config.yaml"),
        env={"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HOME": str(folder)},
    )  # fmt: skip
    assert await process.wait() == 0
    return json.loads((folder / "report" / "per_request_lifecycle_metrics.json").read_text())


def write_trace(path: Path, theirs: list[dict[str, Any]]) -> None:
    """The same prompts at the same times."""
    begin = min(request["start_time"] for request in theirs)
    lines = [
        json.dumps(
            {
                "time": request["start_time"] - begin,
                "prompt": json.loads(request["request"])["prompt"],
                "output_tokens": TOKENS,
            }
        )
        for request in theirs
    ]
    path.write_text("\n".join(lines))


@pytest.mark.slow
async def test_ttft_and_tpot_are_those_of_inference_perf(tmp_path: Path) -> None:
    program = shutil.which("inference-perf")
    if program is None:
        pytest.skip("inference-perf is not on the path; see the top of this file")
    async with serving(course) as mock:
        theirs = await by_inference_perf(program, mock.url, tmp_path)
        write_trace(tmp_path / "trace.jsonl", theirs)
        experiment = Experiment(
            url=mock.url, prompts="text", trace=tmp_path / "trace.jsonl", model="mock",
            warmup=0.0, cooldown=0.0,
        )  # fmt: skip
        point = await run_experiment(experiment, lambda run: nullcontext())
    total = point["summary"]["total"]
    assert total["completed"] == len(theirs) > 100
    assert {body["prompt"] for body in mock.bodies[len(theirs) :]} == {
        body["prompt"] for body in mock.bodies[: len(theirs)]
    }
    summary = json.loads((tmp_path / "report" / "summary_lifecycle_metrics.json").read_text())
    latencies = summary["successes"]["latency"]
    for ours, name in (
        (total["ttft_ms_of_completed"], "time_to_first_token"),
        (total["tpot_ms_of_completed"], "time_per_output_token"),
    ):
        for mine, other in (("mean", "mean"), ("p50", "median"), ("p90", "p90"), ("p99", "p99")):
            print(f"{name} {mine}: {ours[mine]:.2f} ms, by it {1e3 * latencies[name][other]:.2f}")
            if mine != "p99":
                assert ours[mine] == pytest.approx(1e3 * latencies[name][other], rel=0.05)

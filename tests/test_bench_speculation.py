"""What the benchmark of speculation concludes from pairs, and what its prompts hold."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve_checkpoints.resolve import embedded_model
from scripts.paired import ratio_of

ROOT = Path(__file__).parents[1]
pairs = st.lists(st.tuples(st.floats(1, 2), st.floats(1, 2)), min_size=1, max_size=12)


@given(pairs)
def test_a_ratios_interval_holds_its_median(found: list[tuple[float, float]]) -> None:
    ratio = ratio_of(found)
    assert ratio.low <= ratio.median <= ratio.high
    assert (ratio.confidence >= 0.95) == (len(found) >= 6)


def test_the_interval_holds_the_true_median_as_often_as_it_says() -> None:
    draw, held, tries = Random(0), 0, 2000
    for _ in range(tries):
        ratio = ratio_of([(1.0, draw.lognormvariate(0, 0.1)) for _ in range(8)])
        held += ratio.low <= 1.0 <= ratio.high
    assert abs(held / tries - ratio.confidence) < 0.02
    assert ratio.confidence == pytest.approx(1 - 2 * (1 / 256 + 8 / 256), abs=0.07)


def test_noise_that_both_arms_share_drops_out_of_pairs() -> None:
    draw = Random(1)
    found = [(speed, 1.02 * speed) for speed in (draw.uniform(0.8, 1.2) for _ in range(6))]
    assert ratio_of(found).median == pytest.approx(1.02) and ratio_of(found).noise < 1e-9


MADE = """
import json, random, sys
sys.path.insert(0, "scripts")
import speculation_workloads as workloads
found = {}
for name in workloads.MADE:
    prompt = workloads.made(name, random.Random(4), 512, 192)["prompt"]
    answer = [token := workloads.FOLLOWING[prompt[-1]]]
    answer += [token := workloads.FOLLOWING[token] for _ in range(191)]
    def longest(at):
        best = 0
        for n in range(len(prompt)):
            length = 0
            while (n + length < len(prompt) and at + length < len(answer)
                   and prompt[n + length] == answer[at + length]):
                length += 1
            best = max(best, length)
        return best
    found[name] = [longest(at) for at in range(0, 192, 32)]
print(json.dumps(found))
"""


def test_prompts_hold_as_much_of_the_answer_as_their_names_say() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MADE], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert min(found["made-quotes"]) >= 31, "whole passages"
    assert max(found["made-fresh"]) <= 2
    assert 5 <= max(found["made-misleading"]) <= 7
    assert 15 <= max(found["made-edit"]) <= 24


@pytest.mark.slow  # two servers
def test_one_command_measures_everything(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    flags = "--decode-buckets 8 --prefill-buckets 128 --max-model-len 256"
    command = [sys.executable, "scripts/bench_speculation.py", "--model", str(embedded_model())]
    command += ["--clients", "1,4", "--workloads", "made-edit,made-quotes", "--seconds", "2"]
    command += ["--pairs", "3", "--prompt-tokens", "96", "--output-tokens", "32", "--out", str(out)]
    command += ["--ttft", "20", "--tpot", "2", "--flags", flags]
    subprocess.run(command, cwd=ROOT, check=True, timeout=900)
    result = json.loads(out.read_text())
    assert [(each["workload"], each["clients"]) for each in result["points"]] == [
        (name, clients) for clients in (1, 4) for name in ("made-edit", "made-quotes")
    ]
    for point in result["points"]:
        assert point["speedup"]["low"] <= point["speedup"]["median"] <= point["speedup"]["high"]
        assert point["equal"] == 1.0 and point["compared"] > 0
        assert not point["on"]["errors"] and not point["on"]["compiles_while_serving"]
    assert [each["workload"] for each in result["overload"]] == ["made-edit", "made-quotes"]
    assert all(each["ratio"] is not None for each in result["overload"])
    assert "verify step by rows and positions" in result["step_times"]["on"]

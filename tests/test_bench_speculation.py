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

from jaxserve.step_times import StepTimes
from jaxserve_checkpoints.resolve import embedded_model
from scripts.paired import ratio_of, ratio_of_turns
from tests.e2e import family_models

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


def turns(draw: Random, pairs: int, ratio: float) -> list[tuple[float, float]]:
    """Speeds that drift, with some noise."""
    found: list[tuple[float, float]] = []
    for number in range(pairs):
        speed = 100.0 * (1 + number / pairs)
        off, on = (each * speed * draw.lognormvariate(0, 0.01) for each in (1.0, ratio))
        found.append((off, on))
    return found


def test_many_short_turns_tell_a_small_difference_from_none() -> None:
    for ratio in (0.98, 1.0, 4.0):
        found = ratio_of_turns(turns(Random(2), 60, ratio))
        assert found.low <= ratio <= found.high and found.noise < 0.005


def test_the_interval_of_turns_holds_the_ratio_as_often_as_it_says() -> None:
    draw, tries = Random(3), 300
    found = [ratio_of_turns(turns(draw, 20, 0.99)) for _ in range(tries)]
    assert abs(sum(each.low <= 0.99 <= each.high for each in found) / tries - 0.95) < 0.03


def test_one_odd_turn_changes_little() -> None:
    pairs = turns(Random(4), 40, 1.0)
    pairs[7] = (pairs[7][0], 1.0)
    assert ratio_of_turns(pairs).median == pytest.approx(1.0, abs=0.02)


TURNS = """
import sys
sys.path.insert(0, "scripts")
from speculation_points import pairs_of
def turn(arm, seconds, verify):
    return dict(
        arm=arm, seconds=seconds, decode_s=seconds, expected_s=0.2, tokens=30, verify_steps=verify
    )
assert pairs_of([turn("off", 0.4, 0), turn("on", 0.5, 0)]) == [(0.5, 0.4)]
assert pairs_of([turn("on", 0.5, 1), turn("off", 0.4, 0)]) == [(75.0, 60.0)]
assert not pairs_of([turn("on", 0.5, 0), turn("on", 0.4, 0), turn("off", 0.4, 0)])
"""


def test_speed_is_of_expected_seconds_where_nothing_was_verified() -> None:
    subprocess.run([sys.executable, "-c", TURNS], cwd=ROOT, check=True)


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


REPORT = """
import json, sys
from pathlib import Path
sys.path.insert(0, "scripts")
import bench_speculation
file = Path(sys.argv[1])
report = bench_speculation.Report(file, budget=60.0)
report.found["points"] = [1]
with report.timed("first"):
    raise ValueError("of this part")
report.found["points"].append(2)
with report.timed("second"):
    pass
assert not report.is_late("third")
late = bench_speculation.Report(None, budget=-1.0)
assert late.is_late("third") and late.found["left_out"] == ["third"]
"""


def test_a_part_that_fails_leaves_the_others_and_what_was_written(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    subprocess.run([sys.executable, "-c", REPORT, str(file)], cwd=ROOT, check=True)
    found = json.loads(file.read_text())
    assert found["points"] == [1, 2] and set(found["seconds"]) == {"first", "second"}
    assert found["errors"] == {"first": "ValueError: of this part"}


@pytest.mark.slow  # a server, and engines
@pytest.mark.timeout(1500)
def test_one_command_measures_everything(tmp_path: Path) -> None:
    out, hybrid = tmp_path / "found.json", tmp_path / "hybrid"
    family_models.write(hybrid, "Qwen3_5ForConditionalGeneration")
    flags = "--decode-buckets 8 --prefill-buckets 128 --max-model-len 256"
    heads = "--decode-buckets 1 --prefill-buckets 128 --max-model-len 128 --max-num-seqs 1"
    command = [sys.executable, "scripts/bench_speculation.py", "--model", str(embedded_model())]
    command += ["--parts", "copies,fresh,overload,mtp", "--clients", "1,4", "--seconds", "6"]
    command += ["--prompt-tokens", "96", "--output-tokens", "32", "--out", str(out)]
    command += [
        "--turn",
        "1.5",
        "--ttft",
        "20",
        "--tpot",
        "2",
        "--flags",
        flags,
        "--mtp-model",
        str(hybrid),
    ]
    command += ["--head-flags", heads + """ --speculative-config '{"num_speculative_tokens": 3}'"""]
    subprocess.run(command, cwd=ROOT, check=True, timeout=1200)
    result = json.loads(out.read_text())
    assert [(each["workload"], each["clients"]) for each in result["points"]] == [
        (name, clients)
        for names in (("made-edit", "made-quotes"), ("made-fresh",))
        for clients in (1, 4)
        for name in names
    ]
    for point in result["points"]:
        assert point["speedup"]["low"] <= point["speedup"]["median"] <= point["speedup"]["high"]
        assert point["equal"] == 1.0 and point["compared"] > 0 and point["pairs"] >= 2
        assert not point["errors"] and not point["loop"]["compiles_while_serving"]
        assert not point["off"]["verify_steps"]
        if point["workload"] != "made-fresh" and point["clients"] == 1:
            assert point["on"]["verify_steps"] and point["loop"]["accepted_per_draft_row"] > 2
    assert [each["workload"] for each in result["overload"]] == ["made-fresh", "made-edit"]
    assert all(each["ratio"] is not None for each in result["overload"])
    file = tmp_path / "step_times.json"
    file.write_text(json.dumps(result["step_times"]))
    assert StepTimes.load(file).verify
    assert set(result["heads"]["mtp"]["steps"]["verify"]) == {"1x2", "1x4"}
    assert set(result["seconds"]) == {"copies", "fresh", "overload", "server", "mtp"}

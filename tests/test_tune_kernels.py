"""What the tuner tries on a card, and how it keeps what it finds, without the card."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxserve.models.registry import NAMED_MODELS
from jaxserve_kernels import tables
from jaxserve_kernels.dense_matmul import config as dense
from jaxserve_kernels.paged_attention import config as attention
from jaxserve_kernels.target import Target
from scripts.tuning import candidates, operations, pretended, write

ROOT = Path(__file__).parents[1]
CONFIGS: dict[str, Any] = {"dense_matmul": dense.Config, "paged_attention": attention.Config}
TABLES = Path(tables.__file__).parent


def entry(rows: int, tokens: int = 16) -> dict[str, Any]:
    parameters = {"rows": rows, "depth": 128, "splits": 1, "num_warps": 4, "num_stages": 3}
    shape = ["linear", 2560, 4096]
    return {"shape": shape, "tokens": tokens, "parameters": parameters, "source": "a test"}


@pytest.mark.parametrize("gpu", ["h200", "l40s", "a100-80gb", "rtx5090"])
@pytest.mark.parametrize("model", ["qwen3-4b", "llama-3.1-8b"])
def test_each_operation_has_candidates_that_it_takes(gpu: str, model: str) -> None:
    device = pretended(gpu)
    for key in operations(NAMED_MODELS[model]).values():
        tried = candidates(key, 16, device)
        assert tried, f"{key} has none on {gpu}"
        for parameters in tried:
            config = CONFIGS[key[0]](**parameters)
            if key[0] == "dense_matmul":
                _, out, depth = key[1]
                assert out % config.rows == 0 and depth % (config.depth * config.splits) == 0
                size = (config.rows + 16) * config.depth * 2 * config.num_stages
                assert size < device.shared_memory_per_block


def test_a_card_with_less_shared_memory_has_fewer_and_smaller_tilings() -> None:
    key = operations(NAMED_MODELS["qwen3-4b"])["head"]
    small, large = (candidates(key, 16, pretended(gpu)) for gpu in ("l40s", "a100-80gb"))
    assert len(small) < len(large)


def test_the_script_says_what_it_would_try() -> None:
    script = ROOT / "scripts" / "tune_kernels.py"
    call = ["--dry-run", "--gpu", "l40s", "--batch", "1", "--operations", "qkv,attention"]
    out = subprocess.check_output([sys.executable, script, *call], text=True)
    assert out.startswith("NVIDIA L40S: 142 multiprocessors\nbatch 1, qkv ('linear', 6144, 2560):")
    assert "batch 1, attention (4, 8):" in out and "'num_stages'" in out


_TUNES = """
import sys
sys.path.insert(0, "scripts")
import tune_kernels
from scripts.tuning import pretended
from tests.tiny_model import SPEC
key = ("dense_matmul", ("linear", SPEC.embed, SPEC.ffn))
tune_kernels.candidates = lambda *_: [{"rows": 32}]
bench = tune_kernels.Bench(SPEC, 2, 100)
tune_kernels.tune(bench, {"down": key}, 2, pretended("h200"), float("inf"))
"""


@pytest.mark.slow
def test_steps_are_timed_with_each_candidate() -> None:
    """On a CPU, where parameters change nothing."""
    out = subprocess.check_output([sys.executable, "-c", _TUNES], text=True, cwd=ROOT)
    first, *rest = out.splitlines()
    assert first.startswith("batch 2: ") and first.endswith(" us by the heuristics")
    assert rest[-1].endswith(" us after down, 1 tried")


def test_a_card_without_a_table_gets_one_that_operations_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dense_matmul").mkdir()
    device = pretended("l40s")
    file = write("dense_matmul", [entry(32), entry(16, 1)], device, tmp_path)
    assert file.name == "nvidia_l40s.json"
    table = json.loads(file.read_text())
    assert (table["device"], table["compute_capability"]) == ("NVIDIA L40S", 89)
    assert table["limits"] == {} and [each["tokens"] for each in table["launches"]] == [1, 16]
    assert {each["source"] for each in table["launches"]} == {"a test"}
    measured = json.loads((TABLES / "dense_matmul" / "nvidia_h200.json").read_text())
    known = {each["device"]: each for each in (table, measured)}
    monkeypatch.setattr(tables, "_tables", lambda operation: known)
    target = Target.for_gpu(89).replace(device=device)
    size = {"gated": False, "out": 2560, "depth": 4096, "target": target}
    assert dense.choose(tokens=9, **size) == dense.Config(**entry(32)["parameters"])
    assert dense.choose(tokens=1, **size) == dense.Config(**entry(16)["parameters"])


def test_what_is_found_again_takes_the_place_of_what_was_there(tmp_path: Path) -> None:
    shutil.copytree(TABLES / "dense_matmul", tmp_path / "dense_matmul")
    h200 = pretended("h200")
    before = json.loads((tmp_path / "dense_matmul" / "nvidia_h200.json").read_text())
    write("dense_matmul", [entry(64)], h200, tmp_path)
    file = write("dense_matmul", [entry(32)], h200, tmp_path)
    after = json.loads(file.read_text())
    assert after["limits"] == before["limits"]
    assert [each for each in after["launches"] if each not in before["launches"]] == [entry(32)]

"""What the measurements of starts use: folders of random weights, and how two results differ."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from jaxserve.cli.options import parse_args
from jaxserve.weights.model_source import find_model
from jaxserve_checkpoints.reader import open_checkpoint
from jaxserve_checkpoints.resolve import embedded_model
from scripts import bench_start, random_checkpoint
from tests.tiny_model import tiny_spec

SPEC = tiny_spec(num_layers=2)


def test_a_folder_of_random_weights_is_of_the_shape_and_kept(tmp_path: Path) -> None:
    random_checkpoint.make(SPEC, tmp_path)
    spec = find_model(parse_args(["--model", str(tmp_path)])).spec
    assert (spec.embed, spec.num_layers) == (SPEC.embed, SPEC.num_layers)
    names = open_checkpoint(tmp_path).names
    assert sorted(names) == sorted(name for name, _ in random_checkpoint.tensors(spec))
    file = tmp_path / "model.safetensors"
    before = file.stat().st_mtime_ns, file.read_bytes()
    random_checkpoint.make(SPEC, tmp_path)
    assert (file.stat().st_mtime_ns, file.read_bytes()) == before
    random_checkpoint.make(tiny_spec(num_layers=3), tmp_path)
    assert "model.layers.2.mlp.down_proj.weight" in open_checkpoint(tmp_path)
    assert [each.name for each in tmp_path.glob(".*")] == []


def test_its_shape_may_be_that_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tmp_path / "made"
    monkeypatch.setattr(sys, "argv", ["random_checkpoint.py", str(embedded_model()), str(made)])
    random_checkpoint.main()
    ours = json.loads((made / "config.json").read_text())
    theirs = json.loads((embedded_model() / "config.json").read_text())
    assert {name: theirs[name] for name in ours} == ours


def test_the_best_runs_of_two_results_are_compared() -> None:
    before = [{"ready": 3.0, "weights": 1.0, "cpu": 5.0, "peak": 900.0}]
    after = [
        {"ready": 4.5, "weights": 2.5, "cpu": 6.0, "peak": 1000.0},
        {"ready": 3.5, "weights": 1.5, "cpu": 7.0, "peak": 800.0},
    ]
    told = bench_start.difference(before, after)
    assert told == (
        "ready 3.50 instead of 3.00 s (+0.50); weights 1.50 instead of 1.00 s (+0.50); "
        "cpu 6.00 instead of 5.00 s (+1.00); peak 800.00 instead of 900.00 MB (-100.00)"
    )

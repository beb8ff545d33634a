"""The measurement of the link runs; a CPU's figures say nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_figure_of_the_link_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "link.json"
    flags = ["--gib=0.02", "--page-mib=0.5", "--chunk-mib=0.25", "--depth=2", "--seconds=0.02"]
    subprocess.run(
        [sys.executable, ROOT / "scripts" / "bench_link.py", *flags, "--out", out],
        check=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.DEVNULL,
    )
    result = json.loads(out.read_text())
    names = {"store", "load", "store_both", "load_both"}
    assert result["card"] == "cpu"
    assert result["plain"].keys() == names
    assert names < result["copies"][1].keys()
    for rates in (result["plain"], result["verified"], result["busy_1"], result["steps"]):
        assert all(value > 0 for value in rates.values())

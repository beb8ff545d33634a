"""The measurement of the link runs, and survives its process; a CPU's figures say nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from scripts.bench_link import Death, measured

ROOT = Path(__file__).parents[1]
CHILD = """
import json, os, sys, time
report, ending, *names = sys.argv[1:]
lines = open(report, "a", buffering=1)
print(json.dumps({"step": "start"}), file=lines)
for name in names:
    print(json.dumps({"step": name}), file=lines)
    if name == "b":
        print(json.dumps({"step": "b, the third part"}), file=lines)
        print("as it died", file=sys.stderr, flush=True)
        if ending == "hang":
            time.sleep(60)
        elif ending == "exit":
            sys.exit(3)
        else:
            os.kill(os.getpid(), int(ending))
    print(json.dumps({"name": name, "result": os.getpid()}), file=lines)
"""
ENDS = {
    "11": "signal SIGSEGV",
    "9": "signal SIGKILL",
    "exit": "exit status 3",
    "hang": "it took more than 5 s",
}


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
    for rates in (result["plain"], result["verified"], *result["busy"], result["steps"]):
        assert all(value > 0 for value in rates.values())
    assert "died" not in result


@pytest.mark.parametrize("ending", [*list(ENDS)[:3], pytest.param("hang", marks=pytest.mark.slow)])
def test_a_measurement_that_dies_is_named_and_the_others_go_on(ending: str) -> None:
    def command(report: Path, names: Sequence[str]) -> list[str | Path]:
        return [sys.executable, "-c", CHILD, report, ending, *names]

    results, deaths = measured(["a", "b", "c", "d"], command, seconds=5 if ending == "hang" else 60)
    assert deaths == [Death("b, the third part", ENDS[ending], "as it died\n")]
    assert results.keys() == {"a", "c", "d"}
    assert results["c"] == results["d"] != results["a"]


def test_a_process_that_cannot_start_is_not_started_again() -> None:
    results, deaths = measured(["a"], lambda *_: [sys.executable, "-c", "import nowhere_at_all"])
    assert not results
    (death,) = deaths
    assert (death.step, death.how) == ("start", "exit status 1")
    assert "nowhere_at_all" in death.said

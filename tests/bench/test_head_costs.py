"""What draft heads cost: the steps of the embedded model without and with them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLAGS = (
    "--decode-buckets 1 --prefill-buckets 16 --max-model-len 64 --max-num-batched-tokens 16"
    " --max-num-seqs 1"
)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_each_step_is_timed_without_and_with_each_head(tmp_path: Path) -> None:
    out = tmp_path / "heads.json"
    command = [sys.executable, "scripts/bench_speculation.py", "--model", "jaxserve-embedded"]
    command += ["--heads", "eagle3,dflash,draft", "--flags", FLAGS, "--out", str(out)]
    paths = os.pathsep.join(str(ROOT / part) for part in ("", "kernels", "checkpoints"))
    subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, check=True)
    heads = json.loads(out.read_text())["heads"]
    assert list(heads) == ["eagle3", "dflash", "draft"]
    for kinds in heads.values():
        assert list(kinds["decode"]) == ["1"] and list(kinds["mixed"]) == ["16"]
        assert set(kinds["verify"]) == {"1x2", "1x4", "1x8"}
        for buckets in kinds.values():
            for took in buckets.values():
                assert took["ratio"] == pytest.approx(
                    took["with_ms"] / took["without_ms"], abs=0.01
                )

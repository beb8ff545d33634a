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
    " --max-num-seqs 1 --speculative-config {}"
)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("head", ["eagle3", "dflash", "draft"])
def test_each_step_is_timed_without_and_with_each_head(head: str) -> None:
    command = [sys.executable, "scripts/head_costs.py", "--model", "jaxserve-embedded"]
    command += ["--head", head, "--flags", FLAGS]
    paths = os.pathsep.join(str(ROOT / part) for part in ("", "kernels", "checkpoints"))
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["layers"] == found["all_layers"] > 0
    steps = found["steps"]
    assert list(steps["decode"]) == ["1"] and list(steps["mixed"]) == ["16"]
    assert set(steps["verify"]) == {"1x2", "1x4", "1x8"}
    for buckets in steps.values():
        for took in buckets.values():
            assert took["ratio"] == pytest.approx(took["with_ms"] / took["without_ms"], abs=0.01)

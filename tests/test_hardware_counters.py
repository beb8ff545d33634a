"""What Nsight Compute prints, as `lab/studies/hardware_counters.py` reads it."""

from __future__ import annotations

import pytest

from lab.studies.hardware_counters import METRICS, kernels


def printed(*times: str) -> str:
    """The program's own output, then ncu's, with a time in ns for each kernel."""
    names = ["ID", "Kernel Name", "Grid Size", METRICS["us"], METRICS["registers"]]
    rows = [names, ["", "", "", "ns", "register/thread"]]
    rows += [[str(at), "_product", "(544, 1, 1)", time, "58"] for at, time in enumerate(times)]
    lines = [",".join(f'"{each}"' for each in row) for row in rows]
    return "\n".join(["==PROF== Connected", *lines])


def test_each_kernel_has_its_counters() -> None:
    first, second = kernels(printed("35,456", "20,450"))
    assert first == {"kernel": "_product", "grid": "(544, 1, 1)", "us": 35.456, "registers": 58}
    assert second["us"] == 20.45


def test_without_a_kernel_the_output_is_shown() -> None:
    with pytest.raises(ValueError, match="no kernel: ==PROF== Connected"):
        kernels("==PROF== Connected")

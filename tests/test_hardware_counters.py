"""What Nsight Compute prints, as `lab/studies/hardware_counters.py` reads it."""

from __future__ import annotations

import pytest

from lab.studies.hardware_counters import METRICS, kernels, stalls


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


def test_stalls_are_those_of_stretches_that_are_executed_equally_often() -> None:
    names = ["Address", "Source", "Instructions Executed", "stall_wait", "stall_wait (Not Issued)"]
    rows = [["0", "MOV", "528", "1", "9"], ["1", "FMUL", "26,880", "", "9"]]
    rows += [["2", "FMUL", "26,880", "1,200", "9"], ["3", "BRA", "528", "0", "0"]]
    lines = [["Kernel Name", "_program", ""], names, *rows]
    printed = "\n".join(",".join(f'"{each}"' for each in line) for line in lines)
    (kernel,) = stalls(printed)
    assert (kernel["kernel"], kernel["instructions"]) == ("_program", 4)
    assert kernel["stretches"] == [
        {"first": 0, "instructions": 1, "executed": 528, "samples": {"wait": 1}},
        {"first": 1, "instructions": 2, "executed": 26880, "samples": {"wait": 1200}},
        {"first": 3, "instructions": 1, "executed": 528, "samples": {}},
    ]

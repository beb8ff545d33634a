"""The documentation says of each GPU and format what `scripts/support_matrix.py` has found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxserve_kernels.kv_format import NAMES
from scripts.support_table import GENERATIONS, PAGES, SOURCE, cell, summary, with_table

FOUND = json.loads(SOURCE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_table_in_the_documentation_is_the_generated_one(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert with_table(text, PAGES[page](FOUND)) == text, "run scripts/support_table.py"


def test_every_format_was_tried_on_each_generation_in_the_file() -> None:
    assert set(FOUND["cards"]) <= set(GENERATIONS)
    for card in FOUND["cards"].values():
        assert set(card["kv"]) == set(NAMES) - {"auto"}
        assert {"bf16", "int4", "int8", "fp8", "nvfp4", "mxfp4"} <= set(card["weights"])


def test_a_format_with_a_kernel_that_does_not_compile_is_said_to_fall_back() -> None:
    works = {"kernels": 3, "failed": {}}
    assert cell("9.0", works) == "measured"
    assert cell("8.9", works) == "compiles"
    assert cell("8.9", works | {"failed": {"linear": "why"}}) == "falls back (1 of 3 kernels)"
    assert cell("8.9", None) == "not tried"
    assert cell("9.0", None) == "measured"


def test_the_summary_names_formats_that_fall_back() -> None:
    works = {"kernels": 3, "failed": {}}
    broken = works | {"failed": {"linear": "why"}}
    found = {
        "cards": {
            "8.0": {"weights": {"bf16": works}, "kv": {"int8": works}},
            "8.9": {"weights": {"bf16": works}, "kv": {"int8": broken}},
        }
    }
    rows = summary(found).splitlines()
    assert "| A100 | 8.0 | compiles, in all formats |" in rows
    fallen = "| L4, L40S, RTX 40 | 8.9 | compiles; KV `int8` falls back (1 of 3 kernels) |"
    assert fallen in rows
    assert "| B200 | 10.0 | not tried |" in rows

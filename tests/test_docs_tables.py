"""Generated tables are those of the pages, and their numbers are in the files that they name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts import draw_architecture
from scripts.docs_tables import PAGES, PLACE, ROOT, TABLES, with_tables

MEASUREMENTS = ROOT / "docs" / "measurements"
NUMBER = re.compile(r"-?[\d,]*\d(?:\.\d+)?")
CELL = re.compile(r"(?:\*\*)?(-?[\d,]*\d(?:\.\d+)?)( %| x| s| MB)?(?:\*\*)?")
PLANNED = {"bytes per token, Qwen3-4B", "qwen3-8b, GiB"}
"""Columns whose numbers are the planner's."""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.9")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_as_they_are_made_now(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    made = with_tables(text, root=page.parent == ROOT)
    assert made == text, "run python scripts/docs_tables.py"


def test_every_table_is_on_a_page() -> None:
    used = {match[2] for page in PAGES for match in PLACE.finditer(page.read_text())}
    assert used == set(TABLES)


def numbers(value: Any) -> Iterator[float]:
    """All numbers of a measurement's file, those in its keys and texts too."""
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, int | float):
        yield float(value)
    elif isinstance(value, str):
        yield from (float(text.replace(",", "")) for text in NUMBER.findall(value))
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from numbers(key)
            yield from numbers(each)
    else:
        for each in value:
            yield from numbers(each)


def measured_cells() -> Iterator[tuple[str, str, list[str], set[float]]]:
    """Table, column, row and the numbers of the table's files, for each cell with a number."""
    for page in PAGES:
        for match in PLACE.finditer(page.read_text(encoding="utf-8")):
            files = re.findall(r"measurements/(\w+\.json)\)", match[0])
            if not files:
                continue
            known = {
                n for file in files for n in numbers(json.loads((MEASUREMENTS / file).read_text()))
            }
            lines = [line for line in match[0].splitlines() if line.startswith("|")]
            head, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
            for row in rows[1:]:
                for column, cell in zip(head, row, strict=True):
                    if CELL.fullmatch(cell) and cell != "0" and column not in PLANNED:
                        yield match[2], column, [cell, *row], known


def is_rounded(text: str, unit: str | None, row: list[str], known: set[float]) -> bool:
    shown = float(text.replace(",", ""))
    digits = len(text.partition(".")[2])
    half = 0.5 * 10**-digits + 1e-9
    if unit == " x":  # a ratio of two numbers beside it
        values = [float(cell.replace(",", "")) for cell in row if NUMBER.fullmatch(cell)]
        return any(abs(a / b - shown) < 0.01 for a in values for b in values if b)
    scale = 100 if unit == " %" else 1
    return any(abs(number * scale - shown) <= half for number in known)


def test_each_number_of_a_table_is_in_a_file_that_it_names() -> None:
    cells = list(measured_cells())
    assert len(cells) > 200
    for name, column, (cell, *row), known in cells:
        match = CELL.fullmatch(cell)
        assert match
        assert is_rounded(match[1], match[2], row, known), (name, column, cell)


def test_the_figures_of_the_readme_are_in_the_comparison() -> None:
    known = set(numbers(json.loads((MEASUREMENTS / "side_by_side_h200.json").read_text())))
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"^- \*\*Fast\.\*\* .*$", text, re.M)
    assert found
    shown = [n for n in NUMBER.findall(found[0]) if float(n.replace(",", "")) > 256]
    assert len(shown) == 3 and "252" in found[0]
    for number in (*shown, "252"):
        assert is_rounded(number, None, [], known), number


def test_a_number_that_is_in_no_file_is_found() -> None:
    assert is_rounded("2.44", None, [], {2.436})
    assert not is_rounded("2.45", None, [], {2.436})
    assert is_rounded("50.2", " %", [], {0.5024})
    assert is_rounded("1.21", " x", ["2.44", "2.01"], set())
    assert not is_rounded("1.31", " x", ["2.44", "2.01"], set())


@pytest.mark.parametrize("file", sorted(MEASUREMENTS.glob("*.json")), ids=lambda file: file.stem)
def test_a_measurement_says_where_it_comes_from(file: Path) -> None:
    """Which device, how, and of which commit; `recorded_in` is the commit that added the file."""
    text = file.read_text()
    for names in ("card|cards|device", "command|client", "commit|jaxserve_commit|recorded_in"):
        assert re.search(rf'"({names})":', text), names


def test_the_drawing_of_the_architecture_is_as_it_is_drawn_now() -> None:
    drawn = draw_architecture.FILE.read_text(encoding="utf-8")
    assert drawn == draw_architecture.svg(), "run python scripts/draw_architecture.py"

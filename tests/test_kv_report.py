"""What the benchmark of KV formats says of its runs."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.kv_report import by_load, cell, compared


def runs(*speeds: float) -> list[dict[str, Any]]:
    return [{"load": "512/128", "clients": 8, "tok_per_s": speed} for speed in speeds]


def test_a_run_is_compared_with_the_first_formats_of_the_same_turn() -> None:
    """The host was slow in the second turn: both formats were."""
    points = compared({"bf16": runs(100.0, 50.0, 100.0), "int8": runs(110.0, 55.0, 120.0)})
    assert points["bf16"]["ratios"] == [1.0, 1.0, 1.0]
    assert points["int8"]["ratios"] == pytest.approx([1.1, 1.1, 1.2])
    assert points["int8"]["tok_per_s"] == 110.0
    assert points["int8"]["runs"] == [110.0, 55.0, 120.0]


def test_a_cell_has_the_spread_where_there_are_several_runs() -> None:
    points = compared({"bf16": runs(100.0, 50.0, 100.0), "int8": runs(110.0, 55.0, 120.0)})
    assert cell(points["int8"]) == "110 (1.100, 1.10 to 1.20)"
    assert cell(compared({"bf16": runs(2_000.0)})["bf16"]) == "2,000 (1.000)"


def test_points_are_found_by_load_in_the_order_of_clients() -> None:
    entries = {
        "bf16": {"points": {"a": {"load": "512/128", "clients": 16}}},
        "int8": {"points": {"b": {"load": "512/128", "clients": 8}}},
    }
    assert by_load(entries) == {"512/128": [8, 16]}

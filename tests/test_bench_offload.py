"""The benchmark of the host tier gives no figure under the name of a tier that was not hit."""

from __future__ import annotations

import pytest

from scripts.bench_offload import First, figure

TIERS = {
    "cold": (0, 0, 0, 0),
    "device": (96, 0, 0, 0),
    "host": (96, 96, 0, 900),
    "disk": (96, 96, 900, 900),
    "partly cold": (16, 16, 0, 100),
    "partly device": (96, 16, 0, 100),
    "partly disk": (96, 96, 300, 900),
}
"""Tokens found and restored of 100, bytes read and loaded."""


def first(tier: str, ms: float = 1.0, refused: str = "") -> First:
    return First(ms, 100, *TIERS[tier], refused)


@pytest.mark.parametrize("tier", TIERS)
def test_a_request_s_tier_is_what_was_counted(tier: str) -> None:
    assert first(tier).tier == tier


def test_a_figure_is_given_only_if_all_its_requests_hit_its_tier() -> None:
    assert figure("host", [first("host", ms) for ms in (3.0, 1.0, 2.0)]) == {"host": 2.0}
    assert figure("host", [first("host"), first("device"), first("cold")]) == {
        "host": None,
        "host: hit instead": {"host": 1, "device": 1, "cold": 1},
    }


def test_what_the_policy_refused_is_said_beside_the_figure() -> None:
    firsts = [first("disk", 5.0, "predicted: 9.0 ms"), first("disk", 5.0)]
    assert figure("disk", firsts) == {
        "disk": 5.0,
        "disk: computed unless forced": "1 of 2, predicted: 9.0 ms",
    }

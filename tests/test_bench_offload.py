"""The benchmark of the host tier gives no figure under the name of a tier that was not hit."""

from __future__ import annotations

import pytest

from scripts.bench_offload import First, fastest, figure

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


def test_between_two_rates_the_share_falls_on_a_straight_line() -> None:
    def point(rate: float, share: float) -> dict[str, float]:
        return {
            "requests per second": rate,
            "GB per second to the device": 2 * rate,
            "share": share,
        }

    points = [point(8.0, 0.95), point(2.0, 0.99), point(4.0, 0.98)]
    assert fastest(points) == pytest.approx((16 / 3, 32 / 3), abs=0.01)
    assert fastest(points[:1]) == pytest.approx((4.8, 9.6), abs=0.01)
    assert fastest(points[1:]) is None, "more is kept at all of them"

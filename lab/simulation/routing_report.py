"""The table of docs/cluster.md, from the simulation of routing.

python -m lab.simulation.routing_report
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "measurements" / "routing_simulated.json"
SHOWN = {"many prefixes": 60, "one hot prefix": 60, "short prefixes": 160}
"""Requests per second of each kind of traffic."""


def table(result: Any) -> str:
    """Returns good requests per second and the share of prompt tokens that were cached."""
    heads = [f"{kind}, {rate}/s: good | cached" for kind, rate in SHOWN.items()]
    lines = [f"| router | {' | '.join(heads)} |", f"|---|{'---:|' * 2 * len(SHOWN)}"]
    for router in dict.fromkeys(point["router"] for point in result["points"]):
        cells = [router]
        for kind, rate in SHOWN.items():
            (point,) = (
                point
                for point in result["points"]
                if (point["router"], point["traffic"], point["rate"]) == (router, kind, rate)
            )
            cells += [f"{point['goodput']:.1f}", f"{100 * point['hit_rate']:.0f} %"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(json.loads(FILE.read_text())))

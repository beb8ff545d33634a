"""Step times that a server is made to believe."""

from __future__ import annotations

import json
from pathlib import Path


def believe_that_drafts_pay(folder: Path) -> None:
    """Rewrites the step times in a cache folder: to verify takes a tenth of a decode step.

    However busy the machine is, what a server learns changes no time by more than half. So each
    step with a draft is a verify step.
    """
    for file in folder.glob("executables/*/step_times.json"):
        times = json.loads(file.read_text())
        believed = {
            "decode": dict.fromkeys(times["decode"], 0.01),
            "mixed": dict.fromkeys(times["mixed"], 0.02),
            "verify": {key: [0.001, 0.0] for key in times["verify"]},
            "decode_context": 0.0,
        }
        file.write_text(json.dumps({**times, **believed}))

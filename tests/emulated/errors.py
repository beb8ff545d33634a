"""How far results are from what they should be."""

from __future__ import annotations

from typing import Any

import numpy as np


def relative_error(out: Any, expected: Any) -> float:
    """Of the norm. AssertionError: something is no number, so perhaps nobody wrote it."""
    a, b = (np.asarray(x, np.float64) for x in (out, expected))
    assert np.isfinite(a).all()
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))

"""An argparse type for lists of KV formats."""

from __future__ import annotations

import argparse

from jaxserve_kernels.kv_format import NAMES


def kv_formats(text: str) -> list[str]:
    """Parses a comma-separated list of KV formats, for argparse."""
    names = text.split(",")
    if unknown := set(names) - set(NAMES):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose from {', '.join(NAMES)}")
    return names

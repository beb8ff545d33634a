"""KV formats as scripts are told them."""

from __future__ import annotations

import argparse

from jaxserve_kernels.kv_format import NAMES


def kv_formats(text: str) -> list[str]:
    """The names of a list with commas, for argparse."""
    names = text.split(",")
    if unknown := set(names) - set(NAMES):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose from {', '.join(NAMES)}")
    return names

"""jaxserve: a JAX/XLA-compiled serving engine for dense language models."""

import importlib
import sys
from typing import Any

__version__ = "0.1.0"

if sys.version_info < (3, 12):  # noqa: UP036  (pip checks it, but a clone also runs without pip)
    raise ImportError(
        f"jaxserve needs Python 3.12 or newer, this is {sys.version.split()[0]}; in a clone "
        "`make serve` looks for one and sets it up"
    )


_LIBRARY = ("Engine", "Output", "SamplingParams", "Running", "WeightChange")
"""Names of jaxserve.library, which is imported when one of them is used."""


def __getattr__(name: str) -> Any:
    if name in _LIBRARY:
        return getattr(importlib.import_module("jaxserve.library"), name)
    raise AttributeError(f"module 'jaxserve' has no attribute {name!r}")

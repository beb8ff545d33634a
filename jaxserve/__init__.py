"""jaxserve: a JAX/XLA-compiled serving engine for dense language models."""

import sys

__version__ = "0.1.0"

if sys.version_info < (3, 12):  # noqa: UP036  (pip checks it, but a clone also runs without pip)
    raise ImportError(
        f"jaxserve needs Python 3.12 or newer, this is {sys.version.split()[0]}; in a clone "
        "`make serve` looks for one and sets it up"
    )

"""`python -m jaxserve.dynamo`: a Dynamo worker that takes Dynamo's flags and those of serving."""

from __future__ import annotations

import sys
from importlib import import_module

from jaxserve.config import ConfigError
from jaxserve_checkpoints.reader import CheckpointError


def main() -> int:
    """Runs the worker. Returns the exit status. Errors of flags and model are one line."""
    try:
        run = import_module("dynamo.common.backend.run").run
        worker = import_module("jaxserve.dynamo.worker").Worker
    except ModuleNotFoundError as error:
        print(
            f"jaxserve.dynamo: error: Dynamo's packages are missing ({error.name}): see "
            "docs/dynamo.md",
            file=sys.stderr,
        )
        return 1
    try:
        run(worker)
    except (ConfigError, CheckpointError, ValueError) as error:
        print(f"jaxserve.dynamo: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

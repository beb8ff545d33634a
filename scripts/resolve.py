"""Lists the packages that pip would install for an extra, with the versions of constraints.txt.

    python scripts/resolve.py cuda13            # name==version, one per line
    python scripts/resolve.py cuda13 --compile  # only the packages needed to compile for a GPU

pip needs access to its index. `make compile-test` installs the second list, and
tests/aot/test_resolution.py compares the first with constraints.txt.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]

COMPILING = (
    *("jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-triton", "triton"),
    *("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm"),
)
"""Packages of the GPU extra that are needed to compile for a GPU without having one: 0.7 of 4
GB."""


def resolve(extra: str, constraints: Path) -> dict[str, str]:
    """Versions, by name, of all packages that `pip install .[extra]` would install.

    Raises:
      subprocess.CalledProcessError: pip finds no solution. Its message is on standard error.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        command += ["--dry-run", "--ignore-installed", "--report", str(report)]
        command += ["-c", str(constraints), f"{ROOT}[{extra}]"]
        subprocess.run(command, check=True)
        found = json.loads(report.read_text())["install"]
    metadata = [each["metadata"] for each in found]
    return {
        canonicalize_name(each["name"]): each["version"]
        for each in metadata
        if each["name"] != "jaxserve"
    }


def pins(constraints: Path) -> dict[str, str]:
    """Versions, by name, in a constraints file."""
    lines = [line for line in constraints.read_text().splitlines() if "==" in line]
    return {canonicalize_name(name): version for name, version in (x.split("==") for x in lines)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("extra", help="an extra of pyproject.toml, e.g. cuda13")
    parser.add_argument("--constraints", type=Path, default=ROOT / "constraints.txt")
    parser.add_argument("--compile", action="store_true", help="only packages needed to compile")
    args = parser.parse_args()
    for name, version in sorted(resolve(args.extra, args.constraints).items()):
        if not args.compile or name in COMPILING:
            print(f"{name}=={version}")


if __name__ == "__main__":
    main()

"""Finds the kernels that make a step slower with another Triton version. Runs bench_step.py with
the PTX of some kernels taken from another version.

    python scripts/kernel_code.py --out new --decode 1,64
    PYTHONPATH=.venv-compiler/triton-3.6 python scripts/kernel_code.py --out old --decode 1,64
    python -m lab.studies.swap_kernels new old 'add_rms_norm|linear' -- --batch 1,64

The first two commands need .venv-compiler but no GPU.

If a kernel's name matches, it is assembled from the old PTX wherever the step uses the new one. An
empty pattern swaps nothing and gives the step to compare with.
"""

from __future__ import annotations

import argparse
import json
import re
import runpy
import sys
from pathlib import Path

from jaxserve_kernels import ptxas

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from plain_ptx import plain  # importing kernel_code would make JAX use the CPU


def main() -> None:
    own, _, rest = "\0".join(sys.argv[1:]).partition("\0--\0")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("new", type=Path)
    parser.add_argument("old", type=Path)
    parser.add_argument("kernels", help="a pattern of kernels' names; empty: none")
    args = parser.parse_args(own.split("\0"))
    known = swaps(args.new, args.old, args.kernels) if args.kernels else {}
    assemble, swapped = ptxas.assemble, set[str]()

    def assemble_old(ptx: str, compute_capability: int) -> bytes | None:
        entry = re.search(r"\.entry (\w+)\(", ptx)
        old = known.get(without_version(plain(ptx)))
        if old is None or entry is None:
            return assemble(ptx, compute_capability)
        version = re.search(r"^\.version .*$", ptx, re.MULTILINE)
        assert version
        swapped.add(entry[1])
        text = re.sub(r"^\.version .*$", version[0], old, flags=re.MULTILINE)
        return assemble(re.sub(r"\bkernel\b", entry[1], text), compute_capability)

    ptxas.assemble = assemble_old
    sys.argv = ["bench_step.py", *rest.split("\0")]
    runpy.run_path(str(ROOT / "scripts" / "bench_step.py"), run_name="__main__")
    print(f"swapped {args.kernels!r}: {len(swapped)} kernels: {', '.join(sorted(swapped))}")


def swaps(new: Path, old: Path, pattern: str) -> dict[str, str]:
    """Returns the old PTX by the new PTX, for kernels whose names match."""
    launches = [json.loads((each / "launches.json").read_text()) for each in (new, old)]
    found: dict[str, str] = {}
    for step, calls in launches[0].items():
        for (name, grid, code), (_, old_grid, old_code) in zip(
            calls, launches[1][step], strict=True
        ):
            assert grid == old_grid
            if re.search(pattern, f"{name} {grid}"):
                text = (new / f"{code}.ptx").read_text().partition("\n")[2]
                found[without_version(text)] = (old / f"{old_code}.ptx").read_text()
    return found


def without_version(ptx: str) -> str:
    return re.sub(r"^\.version .*\n", "", ptx, flags=re.MULTILINE)


if __name__ == "__main__":
    main()

"""Finds the kernels whose machine code a change alters, without a GPU.

    .venv-compiler/bin/python scripts/kernel_code.py --out before     # in the tree as it was
    .venv-compiler/bin/python scripts/kernel_code.py --out after      # in the changed tree
    .venv-compiler/bin/python scripts/kernel_code.py --compare before after

The first two commands compile the kernels of the steps of `support_matrix.py`. They write each
distinct PTX to a folder, without comments, line numbers and names, and the launches of each step,
in order, to its `launches.json`. A kernel with the same PTX, or with the same machine code from
ptxas, is as fast as before. The comparison names all other kernels, which have to be timed, and
exits with status 1 if there are any.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import support_matrix
from plain_ptx import plain

from jaxserve_kernels import ptxas

type Launches = dict[str, list[list[str]]]
"""For each step, the kernels' names, grids and names of their PTX files."""


def main() -> int:
    args = parse_args()
    if args.compare:
        return compare(*args.compare, args.kernels)
    args.out.mkdir(parents=True, exist_ok=True)
    known: dict[Any, str] = {}
    found: Launches = {}
    for capability in args.capabilities:
        for step in support_matrix.steps(args):
            name = "/".join((f"sm_{capability}", step.model, step.weights, step.kv))
            equations = support_matrix.launches(capability, step)
            found[f"{name}/{step.bucket.name}"] = [
                launch(capability, equation, known, args.out)
                for equation in equations
                if re.search(args.kernels, equation.params["name"])
            ]
            print(f"{name}/{step.bucket.name}: {len(set(known.values()))}", file=sys.stderr)
    (args.out / "launches.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def parse_args() -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return text.split(",")

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",") if part]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--out", type=Path, help="a folder for the PTX of this tree's kernels")
    action.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    parser.add_argument("--capabilities", type=numbers, default=[90])
    parser.add_argument("--models", type=names, default=["qwen3-4b"])
    parser.add_argument("--weights", type=names, default=["bf16", "int4"])
    parser.add_argument("--kv", type=names, default=list(support_matrix.KV_FORMATS))
    parser.add_argument("--decode", type=numbers, default=[1, 8, 16, 64, 256])
    parser.add_argument("--prefill", type=numbers, default=[512])
    parser.add_argument("--kernels", default="", help="only those whose names this pattern is in")
    return parser.parse_args()


def launch(capability: int, equation: Any, known: dict[Any, str], folder: Path) -> list[str]:
    """Returns a kernel's name, grid and the name of its PTX. Each PTX is compiled and written
    once."""
    from jaxserve_kernels.pdl.describe import describe

    name, grid = equation.params["name"], str(equation.params["grid"])
    marks = str(equation.params["in_tree"])
    key = capability, support_matrix.variant(equation, sizes=True), marks, grid
    if key not in known:
        code = describe(equation).code
        text = (
            f"// {code.warps} warps, {code.shared_bytes} bytes of shared memory\n{plain(code.ptx)}"
        )
        known[key] = f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        (folder / f"{known[key]}.ptx").write_text(text, encoding="utf-8")
    return [name, grid, known[key]]


def compare(before: Path, after: Path, pattern: str) -> int:
    """Prints the kernels whose machine code differs, in steps that both folders have. Returns 1 if
    there are any."""
    old, new = (json.loads((each / "launches.json").read_text()) for each in (before, after))
    same, differ = set[str](), set[str]()
    changed: dict[tuple[str, str], list[str]] = {}
    for step in sorted(old.keys() & new.keys()):
        first = [each for each in old[step] if re.search(pattern, each[0])]
        if [each[:2] for each in first] != [each[:2] for each in new[step]]:
            print(f"{step}: other kernels or grids")
            differ.add(step)
            continue
        for (name, _, code), (_, _, new_code) in zip(first, new[step], strict=True):
            if code == new_code:
                same.add(name)
            else:
                changed.setdefault((code, new_code), []).append(step)
    for (code, new_code), steps in changed.items():
        files = before / f"{code}.ptx", after / f"{new_code}.ptx"
        counts = [len(file.read_text(encoding="utf-8").splitlines()) for file in files]
        equal = assembled(files[0]) == assembled(files[1])
        verdict = "the same machine code" if equal else "OTHER MACHINE CODE"
        print(f"{code} -> {new_code}, {counts[0]} -> {counts[1]} lines: {verdict}: {steps[0]}")
        differ |= set() if equal else {code}
    print(f"the same PTX: {', '.join(sorted(same))}")
    print(f"{len(changed)} with other PTX, {len(differ)} with other machine code")
    return 1 if differ else 0


def assembled(file: Path) -> bytes | None:
    """The machine code of a file's PTX."""
    ptx = file.read_text(encoding="utf-8")
    capability = re.search(r"\.target sm_(\d+)", ptx)
    assert capability
    return ptxas.assemble(ptx, int(capability[1]))


if __name__ == "__main__":
    sys.exit(main())

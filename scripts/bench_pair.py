"""Compares step times of two installations or source trees on one card, in turns.

    python scripts/bench_pair.py --sides 3.6=/opt/triton36 3.9=/opt/triton39 --out pair.json -- \\
        --batch 1,8,64,256
    python scripts/bench_pair.py --sides before=../before after=. --trees --assert-ratio 1.01
    python scripts/bench_pair.py --script bench_mixed.py …

Times from two separate runs also differ because the card and its host change. Here both sides
compile at the same time, and then take turns on the card, one round each, so that both see the same
conditions. Each side runs `bench_step.py`, or --script, with the flags after `--` and half of the
card's memory. `bench_experts.py` times layers of experts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def main() -> int:
    args = parse_args()
    with tempfile.TemporaryDirectory() as folder:
        running = [
            (name, Path(folder) / f"{name}.json", start(name, path, Path(folder), args))
            for name, path in args.sides
        ]
        failed = [name for name, _, process in running if process.wait() != 0]
        if failed:
            print(f"{args.script} failed for {', '.join(failed)}, see above")
            return 1
        results = {name: json.loads(file.read_text()) for name, file, _ in running}
    slower = show(results, args.assert_ratio)
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")
    return slower


def parse_args() -> argparse.Namespace:
    def side(text: str) -> tuple[str, Path]:
        name, _, path = text.partition("=")
        if not Path(path).is_dir():
            raise argparse.ArgumentTypeError(f"{path or text} is no folder; want NAME=FOLDER")
        return name, Path(path).resolve()

    own, _, rest = " ".join(sys.argv[1:]).partition(" -- ")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sides", type=side, nargs=2, required=True, metavar="NAME=FOLDER")
    parser.add_argument(
        "--trees", action="store_true", help="folders are trees of jaxserve, not of packages"
    )
    parser.add_argument(
        "--script",
        choices=("bench_step.py", "bench_mixed.py", "bench_experts.py"),
        default="bench_step.py",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--assert-ratio",
        type=float,
        help="fail if the second side takes more than this many times as long",
    )
    args = parser.parse_args(own.split())
    args.rest = rest.split()
    return args


def start(name: str, path: Path, folder: Path, args: argparse.Namespace) -> subprocess.Popen[bytes]:
    tree = path if args.trees else ROOT
    sources = [tree, tree / "kernels", tree / "checkpoints", *([] if args.trees else [path])]
    before = os.environ.get("PYTHONPATH")
    environment = {
        "XLA_CLIENT_MEM_FRACTION": "0.46",
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, sources), *([before] if before else [])]),
    }
    command = [sys.executable, str(tree / "scripts" / args.script), *args.rest]
    command += ["--rounds", str(args.rounds), "--turns", str(folder / "turn")]
    return subprocess.Popen(
        [*command, "--out", str(folder / f"{name}.json")], cwd=tree, env=environment
    )


def show(results: dict[str, Any], limit: float | None) -> int:
    """Prints the comparison. Returns the number of steps in which the second side exceeds the
    limit."""
    (one, first), (two, second) = results.items()
    print(f"{first['card']}: ms, {one} and {two}")
    slower = 0
    for old, new in zip(timings(first), timings(second), strict=True):
        ratio = new["step_ms"] / old["step_ms"]
        late = limit is not None and ratio > limit
        slower += late
        print(
            f"{what(old)}: {old['step_ms']:.3f} {new['step_ms']:.3f} {ratio - 1:+.2%}"
            f"{'  too slow' if late else ''}"
        )
    return slower


def timings(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The timings of a result, each with its milliseconds."""
    if "experts" in result:
        return [{**each, "step_ms": each["us"] / 1000} for each in result["experts"]]
    return result["timings"]


def what(timing: dict[str, Any]) -> str:
    if "case" in timing:
        return timing["case"]
    if "batch" in timing:
        return f"{timing['batch']:4} rows, context {timing['context']}"
    return f"{timing['chunk']:5} tokens from {timing['start']} on, {timing['decodes']} decode rows"


if __name__ == "__main__":
    sys.exit(main())

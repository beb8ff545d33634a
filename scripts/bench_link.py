"""Measures the rate of page copies between host memory and a GPU, and their effect on steps.

    python scripts/bench_link.py --out link.json

Takes half a minute on a GPU. Rates are in GB/s (1e9 bytes) in each direction:

- plain: one copy of pinned memory, one way and both ways at once: the rate of the link
- copies: pages through `CudaCopier`, by chunk size and number of chunks in flight; and the
  milliseconds that a small copy to the host takes meanwhile, like that of a step's tokens
- verified: copies with checksums
- busy: copies beside one or two threads that run Python all the time
- steps: milliseconds of a compiled step alone, and beside copies in both directions

Measurements run in a child process. If it dies, the result records its signal and its last step,
the remaining measurements continue in a new process, and the exit status is 1. Without a GPU the
script uses CPU arrays, which only shows that it works.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from working_tree import commit

NAMES = (
    "setting",
    "content",
    "plain",
    "copies",
    "verified",
    "busy",
    "steps",
)
ROOT = Path(__file__).parents[1]
_CHILD = Path(__file__).with_name("link_measurements.py")
_SECONDS = 300.0
"""Seconds after which a process is killed."""


class Death(NamedTuple):
    """The premature end of a measuring process."""

    step: str
    how: str
    said: str
    """The last part of its stderr."""


def measured(
    names: Sequence[str],
    command: Callable[[Path, Sequence[str]], Sequence[str | Path]],
    seconds: float = _SECONDS,
) -> tuple[dict[str, Any], list[Death]]:
    """Returns the results by name, and the processes that died.

    A measurement during which its process dies is left out. If a process dies at its start, no more
    measurements are tried.

    Args:
      names: names of the measurements.
      command: returns a process's command line, from its report file and names.
      seconds: time limit of a process.
    """
    results: dict[str, Any] = {}
    deaths: list[Death] = []
    left = list(names)
    while left:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "report"
            path.touch()
            how, said = _run(command(path, left), seconds)
            lines = [json.loads(line) for line in path.read_text().splitlines()]
        results |= {line["name"]: line["result"] for line in lines if "name" in line}
        if not how:
            break
        step = next((line["step"] for line in reversed(lines) if "step" in line), "start")
        deaths.append(Death(step, how, said))
        begun = [name for name in left if name in results or step.split(",")[0] == name]
        print(f"died in {step!r}: {how}\n{said}", file=sys.stderr, flush=True)
        if not begun or step in ("start", "end"):
            break
        left = left[left.index(begun[-1]) + 1 :]
    return results, deaths


def _run(command: Sequence[str | Path], seconds: float) -> tuple[str, str]:
    """Runs a process. Returns how it died, empty if it did not, and the last part of its stderr."""
    with tempfile.TemporaryFile("w+") as errors:
        try:
            status = subprocess.run(command, stderr=errors, timeout=seconds).returncode
        except subprocess.TimeoutExpired:
            how = f"it took more than {seconds:g} s"
        else:
            how = f"exit status {status}" if status > 0 else ""
            if status < 0:
                how = f"signal {signal.Signals(-status).name}"
        errors.seek(0)
        return how, errors.read()[-3000:]


def show(result: dict[str, Any]) -> None:
    plain = result["plain"]
    table = Table(title=f"{result['card']}, pages of {result['page_mib']} MiB, GB/s")
    columns = ("chunk MiB", "depth", "store", "load", "store, both", "load, both", "small copy ms")
    for column in columns:
        table.add_column(column, justify="right")
    names = ("store", "load", "store_both", "load_both")
    table.add_row("plain", "", *(str(plain[name]) for name in names), "")
    for row in result["copies"]:
        times = [str(row.get(f"small_copy_{p}_ms", "")) for p in ("p50", "p99")]
        cells = [
            f"{row[name]} ({row[name] / plain[name]:.0%})" if name in row else "" for name in names
        ]
        chunk, depth = row["chunk_mib"] or "none", row.get("depth", "")
        table.add_row(str(chunk), str(depth), *cells, " / ".join(times))
    Console(width=120).print(table)
    for name in ("pin_seconds_per_gib", *NAMES[4:]):
        print(f"{name}: {result.get(name, 'not measured')}")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    def numbers(text: str) -> list[float]:
        return [float(each) for each in text.split(",")]

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=4.0, help="host memory")
    parser.add_argument("--page-mib", type=float, default=9.0, help="Qwen3-4B in bf16: 9")
    parser.add_argument("--chunk-mib", type=numbers, default=[1, 2, 4, 8, 16])
    parser.add_argument(
        "--depth", type=lambda text: [int(each) for each in text.split(",")], default=[2, 4, 8]
    )
    parser.add_argument("--seconds", type=float, default=0.25, help="of each measurement")
    parser.add_argument("--out", type=Path, help="JSON")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as settings:
        json.dump({name: value for name, value in vars(args).items() if name != "out"}, settings)
        settings.flush()
        results, deaths = measured(
            NAMES, lambda report, names: [sys.executable, _CHILD, settings.name, report, *names]
        )
    result = {**results.pop("setting", {}), "commit": commit(), **results}
    if deaths:
        result["died"] = [death._asdict() for death in deaths]
    if {"card", "plain", "copies"} <= result.keys():
        show(result)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return int(bool(deaths))


if __name__ == "__main__":
    sys.exit(main())

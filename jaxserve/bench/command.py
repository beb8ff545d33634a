"""`python -m jaxserve bench` and `python -m jaxserve bench compare`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxserve.bench import options, results, tables
from jaxserve.bench.experiment import ServerNotReady, run_experiment
from jaxserve.bench.load import Run
from jaxserve.bench.options import Experiment
from jaxserve.cli.flag_parser import FlagParser

_EXAMPLES = """examples:
  python -m jaxserve bench --rate 8 --duration 60 --output results.json --html results.html
  python -m jaxserve bench --concurrency 64 --traffic fixed --input-tokens 1024
  python -m jaxserve bench --config experiments.yaml --output results.json
  python -m jaxserve bench compare before.json after.json
"""


def main(argv: list[str]) -> int:
    """Runs a benchmark or compares result files. Returns the exit status."""
    if argv[:1] == ["compare"]:
        return _compare(argv[1:])
    args = _parse(argv)
    points: list[dict[str, Any]] = []
    status = 0
    try:
        experiments = _experiments(args)
        asyncio.run(_run(experiments, Console(stderr=True), points, args))
    except (ServerNotReady, ValueError, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        print("bench: interrupted", file=sys.stderr)
        status = 130
    if any(point["interrupted"] for point in points):
        status = 130
    return _report(args, points) or status if points else status


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = FlagParser(
        prog="jaxserve bench",
        description="Load an OpenAI-compatible server and report what its users would have had: "
        "latencies from the intended send time, lost requests counted.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("--config", type=Path, help="YAML file: run (defaults) and experiments")
    parser.add_argument("--output", type=Path, help="write everything as JSON")
    parser.add_argument("--csv", type=Path, help="write one row per request")
    parser.add_argument("--html", type=Path, help="write a page of plots")
    options.add_flags(parser.add_argument_group("experiment"))
    return parser.parse_args(argv)


def _experiments(args: argparse.Namespace) -> list[Experiment]:
    own = {"config", "output", "csv", "html"}
    flags = {key: value for key, value in vars(args).items() if key not in own}
    for path in (args.output, args.csv, args.html):
        if path is not None:
            results.check_writable(path)  # reports a bad path before the run, not after it
    if args.html:
        _report_module()
    if args.config:
        return options.read_yaml(args.config, flags)
    return options.from_flags(flags)


async def _run(
    experiments: list[Experiment],
    console: Console,
    points: list[dict[str, Any]],
    args: argparse.Namespace,
) -> None:
    """Appends each point as soon as it exists. An interrupted point is the last one."""
    for number, experiment in enumerate(experiments, start=1):
        title = f"{experiment.name} ({number} of {len(experiments)})"
        console.print(f"{title}: {experiment.url}", highlight=False, markup=False)
        points.append(await run_experiment(experiment, lambda run: _watched(run, console, title)))  # noqa: B023
        tables.print_point(console, points[-1])
        if points[-1]["interrupted"]:
            return
        if args.output and number < len(experiments):  # a later failure must not lose these
            results.write(args.output, _as_json(points))


@contextlib.asynccontextmanager
async def _watched(run: Run, console: Console, title: str) -> AsyncGenerator[None]:
    """Shows the run while it lasts. Ctrl-C ends it and keeps its results."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, run.interrupt)
    try:
        async with tables.live_view(run, console, title):
            yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _as_json(points: list[dict[str, Any]]) -> str:
    return json.dumps(results.document(points)) + "\n"


def _report(args: argparse.Namespace, points: list[dict[str, Any]]) -> int:
    """Writes the requested files, as many as possible. Returns the exit status."""
    status = 0
    for path, text in (
        (args.output, lambda: _as_json(points)),
        (args.csv, lambda: results.requests_csv(points)),
        (args.html, lambda: _page(args.html, points)),
    ):
        if path is None:
            continue
        try:
            results.write(path, text())
        except OSError as error:
            print(f"bench: {path} was not written: {error}", file=sys.stderr)
            status = 1
    return status


def _page(path: Path, points: list[dict[str, Any]]) -> str:
    return _report_module().page([(path.stem, results.document(points))])


def _report_module() -> Any:
    """Imports the report page, which needs matplotlib; serving does not."""
    try:
        from jaxserve.bench import report
    except ImportError as error:
        raise ValueError(f"{error}: pip install 'jaxserve[bench]'") from error
    return report


def _compare(argv: list[str]) -> int:
    parser = FlagParser(
        prog="jaxserve bench compare",
        usage="jaxserve bench compare [flags] FILE [FILE ...]",
        description="Result files side by side, with ratios to the first.",
    )
    parser.add_argument("files", nargs="+", type=Path, help="of `jaxserve bench --output`")
    parser.add_argument("--html", type=Path, help="write a page of plots of all files")
    args = parser.parse_args(argv)
    try:
        documents = [(path.stem, results.read(path)) for path in args.files]
        for table in tables.compare(documents):
            Console().print(table)
        if args.html:
            results.write(args.html, _report_module().page(documents))
    except (ValueError, OSError) as error:
        print(f"bench compare: {error}", file=sys.stderr)
        return 1
    return 0

"""Result files: the whole run as one JSON document, and a CSV row per request."""

from __future__ import annotations

import csv
import dataclasses
import errno
import io
import json
import os
import platform
import tempfile
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jaxserve import __version__
from jaxserve.bench.records import Record
from jaxserve.bench.scrape import Sample

FORMAT = 1
"""Version of the result file."""


def document(points: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the result document of one invocation."""
    return {
        "format": FORMAT,
        "jaxserve": __version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "client": {"python": platform.python_version(), "cpus": os.cpu_count()},
        "points": list(points),
    }


def record_json(record: Record) -> dict[str, Any]:
    """Returns a request as stored: gaps instead of token times, rounded to microseconds."""
    values = dataclasses.asdict(record)
    del values["token_times"]
    values["outcome"] = record.outcome.value
    values["ttft"] = record.ttft
    values["e2e"] = record.e2e
    values["gaps"] = record.gaps
    return _rounded(values)


def sample_json(sample: Sample) -> dict[str, float]:
    """Returns a sample of the server's metrics as stored in the result file."""
    return {"time": round(sample.time, 3), **sample.values}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return value


CSV_COLUMNS = (
    "id",
    "traffic_class",
    "outcome",
    "intended",
    "sent",
    "ttft",
    "e2e",
    "prompt_tokens",
    "cached_tokens",
    "max_tokens",
    "output_tokens",
    "error",
)


def requests_csv(points: Iterable[dict[str, Any]]) -> str:
    """Returns one row per request of every point; times in seconds."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(("experiment", *CSV_COLUMNS))
    for point in points:
        for record in point["requests"]:
            writer.writerow((point["name"], *(record[column] for column in CSV_COLUMNS)))
    return out.getvalue()


def write(path: Path, text: str) -> None:
    """Writes a file completely or not at all. Writes into pipes and devices directly."""
    if path.exists() and not path.is_file():
        path.write_text(text)
        return
    path = path.resolve()  # writes through a link instead of replacing it
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        try:
            file.write(text)
            file.flush()
        except OSError:
            os.unlink(file.name)
            raise
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def check_writable(path: Path) -> None:
    """Raises OSError with the path if `write` would fail."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "is a directory, not a file", str(path))
    if path.exists() and not path.is_file():
        return
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path.parent):
        pass


def read(path: Path) -> dict[str, Any]:
    """Reads a result file. Raises ValueError if it is none."""
    try:
        found = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT or "points" not in found:
        raise ValueError(f"{path} is not a result file of `jaxserve bench` (format {FORMAT})")
    return found

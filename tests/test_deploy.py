"""What deploy/ holds names flags and metrics that exist."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxserve.cli.options import parse_args
from jaxserve.metrics.metrics import Metrics

DEPLOY = Path(__file__).parents[1] / "deploy"
SUFFIXES = {"counter": ("",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


def series() -> set[str]:
    """Names that a query may use."""
    text = Metrics("m").exposition().decode()
    types = re.findall(r"^# TYPE (\S+) (\w+)", text, re.M)
    return {name + suffix for name, kind in types for suffix in SUFFIXES[kind]}


def dashboard() -> dict[str, Any]:
    return json.loads((DEPLOY / "grafana-dashboard.json").read_text())


def dashboard_queries() -> list[str]:
    panels = dashboard()["panels"]
    variables = [one["query"] for one in dashboard()["templating"]["list"]]
    return [target["expr"] for panel in panels for target in panel["targets"]] + variables[1:]


def alert_queries() -> list[str]:
    groups = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


@pytest.mark.parametrize("query", dashboard_queries() + alert_queries())
def test_queries_name_series_that_are_exported(query: str) -> None:
    named = re.findall(r"(?:vllm:|jaxserve_)\w+", query)
    assert named
    assert set(named) <= series()


def test_reasons_and_phases_in_queries_exist() -> None:
    text = Metrics("m").exposition().decode()
    queries = "".join(dashboard_queries() + alert_queries())
    for label in re.findall(r'(?:reason|phase)="\w+"', queries):
        assert label in text, label


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels}) == len(panels)


def test_the_command_lines_parse() -> None:
    unit = (DEPLOY / "jaxserve.service").read_text().replace("\\\n", " ")
    command = re.search(r"^ExecStart=\S+ (.*)$", unit, re.M)
    assert command
    options = parse_args(shlex.split(command[1]))
    assert options.api_key_file is not None
    stop = re.search(r"^TimeoutStopSec=(\d+)$", unit, re.M)
    assert stop
    assert int(stop[1]) > options.shutdown_timeout
    entry = re.search(r"^ENTRYPOINT (\[.*\])$", (DEPLOY / "Dockerfile").read_text(), re.M)
    assert entry
    assert parse_args(json.loads(entry[1])[1:]).host == "0.0.0.0"

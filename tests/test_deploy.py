"""What deploy/ holds names flags, commands and metrics that exist."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from jaxserve import __version__
from jaxserve.__main__ import main
from jaxserve.cli.options import Options, parse_args
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


def alert_rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def alert_queries() -> list[str]:
    return [rule["expr"] for rule in alert_rules()]


@pytest.mark.parametrize("query", dashboard_queries() + alert_queries())
def test_queries_name_series_that_are_exported(query: str) -> None:
    named = re.findall(r"([a-z_][\w:]*)(?:\{|, instance\))", query)
    assert named
    assert set(named) <= series() | {"up"}


@pytest.mark.parametrize("rule", alert_rules(), ids=lambda rule: rule["alert"])
def test_alerts_are_of_this_job_s_servers_and_say_how_bad_it_is(rule: dict[str, Any]) -> None:
    selectors = re.findall(r"\{([^}]*)\}", rule["expr"])
    assert all('job="jaxserve"' in selector.split(",") for selector in selectors)
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["annotations"]["summary"]


def test_a_server_that_is_down_or_not_ready_alerts() -> None:
    critical = {r["expr"] for r in alert_rules() if r["labels"]["severity"] == "critical"}
    assert {'up{job="jaxserve"} == 0', 'jaxserve_ready{job="jaxserve"} == 0'} <= critical


def test_reasons_and_phases_in_queries_exist() -> None:
    text = Metrics("m").exposition().decode()
    queries = "".join(dashboard_queries() + alert_queries())
    for label in re.findall(r'(?:reason|phase)="\w+"', queries):
        assert label in text, label


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels}) == len(panels)


def instruction(name: str) -> str:
    """The value of the Dockerfile's last such instruction."""
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    return re.findall(rf"^{name} (.*)$", text, re.M)[-1]


class Ran(NamedTuple):
    """A command, and the options that it got."""

    command: str
    options: Options


@pytest.fixture
def run_image(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """As `docker run jaxserve ARGUMENTS` does; commands do nothing but tell their options."""
    ran: list[Ran] = []

    def command(name: str) -> Callable[..., int]:
        return lambda options, *_: ran.append(Ran(name, options)) or 0

    for name in ("serve", "precompile", "convert"):
        monkeypatch.setattr(f"jaxserve.commands.{name}.{name}", command(name))
    monkeypatch.setattr("jaxserve.startup.heap.import_freely", lambda: None)
    for setting in shlex.split(instruction("ENV")):
        monkeypatch.setenv(*setting.split("=", 1))

    def run(*arguments: str) -> Ran:
        program, *first = json.loads(instruction("ENTRYPOINT"))
        assert program == "jaxserve"
        assert main([*first, *(arguments or json.loads(instruction("CMD")))]) == 0
        return ran[-1]

    return run


def test_the_image_serves_whatever_way_it_is_asked_to(run_image: Callable[..., Ran]) -> None:
    for arguments, model in (
        ((), None),
        (("serve",), None),
        (("serve", "qwen3-4b"), "qwen3-4b"),
        (("serve", "qwen3-4b", "--max-model-len", "8k"), "qwen3-4b"),
        (("--model", "qwen3-4b"), "qwen3-4b"),
        (("--port", "8000"), None),
    ):
        command, options = run_image(*arguments)
        assert (command, options.model) == ("serve", model)
        assert (options.host, options.log_format) == ("0.0.0.0", "json")
    assert run_image("serve", "--host", "::", "--log-format=text").options.host == "::"


def test_the_image_has_the_other_commands(
    run_image: Callable[..., Ran], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_image("precompile", "--model", "qwen3-4b")[0] == "precompile"
    assert run_image("convert", "--model", "qwen3-4b", "--out", "/x")[0] == "convert"
    for arguments, shown in ((["bench", "--help"], "--duration"), (["--version"], __version__)):
        with pytest.raises(SystemExit) as ended:
            run_image(*arguments)
        assert not ended.value.code
        assert shown in capsys.readouterr().out


def test_the_commands_that_the_dockerfile_shows_work(run_image: Callable[..., Ran]) -> None:
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n#", "")
    shown = re.findall(r"^#   docker run .* jaxserve (\w.*)$", text, re.M)
    assert [run_image(*line.split()).command for line in shown] == ["serve", "precompile"]


def test_the_unit_s_command_line_parses() -> None:
    unit = (DEPLOY / "jaxserve.service").read_text().replace("\\\n", " ")
    command = re.search(r"^ExecStart=\S+ (.*)$", unit, re.M)
    assert command
    options = parse_args(shlex.split(command[1]))
    assert options.api_key_file is not None
    stop = re.search(r"^TimeoutStopSec=(\d+)$", unit, re.M)
    assert stop
    assert int(stop[1]) > options.shutdown_timeout
    files = re.search(r"^LimitNOFILE=(\d+)$", unit, re.M)
    assert files
    assert int(files[1]) > 2 * options.max_num_queued_reqs
    wanted = re.search(r"^Wants=(.*)$", unit, re.M)
    assert wanted
    ours = [name for name in wanted[1].split() if name.startswith("jaxserve")]
    assert ours and all((DEPLOY / name).is_file() for name in ours)


def test_the_adapter_gives_the_autoscaler_series_that_are_exported() -> None:
    rules = yaml.safe_load((DEPLOY / "prometheus-adapter.yml").read_text())["rules"]
    given = {rule["seriesQuery"].partition("{")[0]: rule["name"]["as"] for rule in rules}
    assert given.keys() <= series()
    objects = (DEPLOY / "kubernetes" / "components" / "hpa" / "objects.yaml").read_text()
    assert set(re.findall(r"name: (vllm_\w+)", objects)) == set(given.values())

"""The compose file: what it mounts exists, what it calls answers, and its server's flags parse."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxserve.cli.options import Options, parse_args
from jaxserve.server.access import OPEN_ROUTES

DEPLOY = Path(__file__).parents[1] / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
SERVER: dict[str, Any] = SERVICES["jaxserve"]


def filled(text: str, **variables: str) -> str:
    """With variables, as Compose puts them in."""

    def value(match: re.Match[str]) -> str:
        name, default = match[1], match[2] or ""
        if default.startswith(":?") and name not in variables:
            raise KeyError(name)
        return variables.get(name, default.removeprefix(":-"))

    return re.sub(r"\$\{(\w+)(:[-?][^}]*)?\}", value, text)


def options(**variables: str) -> Options:
    command, *rest = shlex.split(filled(SERVER["command"], **variables))
    assert command == "serve"
    image = re.findall(r'^ENV JAXSERVE_FLAGS="(.*)"$', (DEPLOY / "Dockerfile").read_text(), re.M)
    return parse_args(["--model", *rest], None, *image)


def port_of(address: str) -> tuple[str, int]:
    """Host and port of a URL or of HOST:PORT."""
    host, port = address.removeprefix("http://").partition("/")[0].split(":")
    return host, int(port)


def published(service: str) -> int:
    """The port in the container."""
    (port,) = SERVICES[service]["ports"]
    address, _, inner = port.split(":")
    assert address == "127.0.0.1"
    return int(inner)


def test_the_server_s_command_parses() -> None:
    assert options().model == "jaxserve-embedded"
    chosen = options(MODEL="qwen3-8b", FLAGS="--kv-cache-dtype int8")
    assert (chosen.model, chosen.kv_cache_dtype) == ("qwen3-8b", "int8")
    assert chosen.host == "0.0.0.0"
    assert published("jaxserve") == chosen.port


def test_without_a_key_nothing_starts() -> None:
    key = SERVER["environment"]["JAXSERVE_API_KEY"]
    with pytest.raises(KeyError, match="JAXSERVE_API_KEY"):
        filled(key)
    for one in (key, SERVICES["open-webui"]["environment"]["OPENAI_API_KEY"]):
        assert filled(one, JAXSERVE_API_KEY="secret") == "secret"


def test_a_stop_waits_for_running_requests() -> None:
    assert float(SERVER["stop_grace_period"].removesuffix("s")) > options().shutdown_timeout + 10


def test_the_container_writes_only_where_it_may() -> None:
    home = re.findall(r"^VOLUME (\S+)$", (DEPLOY / "Dockerfile").read_text(), re.M)
    assert SERVER["read_only"] is True and SERVER["cap_drop"] == ["ALL"]
    assert [volume.split(":")[1] for volume in SERVER["volumes"]] == home
    assert SERVER["tmpfs"] == ["/tmp"]


def test_health_is_a_route_that_needs_no_key() -> None:
    *_, code = SERVER["healthcheck"]["test"]
    (url,) = re.findall(r"'(http://.*?)'", code)
    assert port_of(url) == ("127.0.0.1", published("jaxserve"))
    assert url.partition(":8000")[2] == "/ready"
    assert "/ready" in OPEN_ROUTES
    compile(code, "healthcheck", "exec")


def test_files_that_are_mounted_exist() -> None:
    for service in SERVICES.values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert (DEPLOY / source).exists() if source[0] == "." else source in COMPOSE["volumes"]


def test_services_find_each_other() -> None:
    webui = SERVICES["open-webui"]
    base = webui["environment"]["OPENAI_API_BASE_URL"]
    assert port_of(base) == ("jaxserve", published("jaxserve"))
    assert base.endswith("/v1")
    assert json.loads(webui["environment"]["DEFAULT_MODEL_PARAMS"])
    assert webui["depends_on"].keys() <= SERVICES.keys()
    sources = yaml.safe_load((DEPLOY / "compose/grafana/datasources/prometheus.yaml").read_text())
    (source,) = sources["datasources"]
    assert port_of(source["url"]) == ("prometheus", published("prometheus"))
    assert source["type"] == "prometheus" and source["isDefault"]


def test_prometheus_scrapes_the_server_with_its_key_and_has_the_alerts() -> None:
    settings = yaml.safe_load((DEPLOY / "compose/prometheus.yml").read_text())
    (job,) = settings["scrape_configs"]
    assert job["job_name"] == "jaxserve"  # the alerts and the dashboard select it
    (target,) = job["static_configs"][0]["targets"]
    assert port_of(target) == ("jaxserve", published("jaxserve"))
    secret = Path(job["authorization"]["credentials_file"])
    assert secret.parent == Path("/run/secrets")
    assert secret.name in SERVICES["prometheus"]["secrets"] == list(COMPOSE["secrets"])
    mounted = {volume.split(":")[1] for volume in SERVICES["prometheus"]["volumes"]}
    assert {f"/etc/prometheus/{name}" for name in settings["rule_files"]} <= mounted


def test_grafana_finds_the_dashboard() -> None:
    providers = yaml.safe_load((DEPLOY / "compose/grafana/dashboards/jaxserve.yaml").read_text())
    (provider,) = providers["providers"]
    mounted = {v.split(":")[0]: v.split(":")[1] for v in SERVICES["grafana"]["volumes"]}
    shown = Path(mounted["./grafana-dashboard.json"])
    assert shown.parent == Path(provider["options"]["path"])
    for kind in ("datasources", "dashboards"):
        assert mounted[f"./compose/grafana/{kind}"] == f"/etc/grafana/provisioning/{kind}"

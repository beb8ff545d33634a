"""Pods of the manifests beside the server that they run: flags, ports, routes, metrics, time."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from jaxserve.__main__ import main
from jaxserve.cli.options import Options, parse_args
from jaxserve.metrics.metrics import Metrics
from tests.fakes import FakeEngine
from tests.kubernetes.manifests import (
    COMPONENTS,
    KUBERNETES,
    Container,
    Object,
    containers,
    objects,
    of_kind,
    plain,
)
from tests.server.test_probe_port import probes, status

KUBE_ALL = [each for file, each in plain() if file != "leaderworkerset.yaml"]
BASE = objects((KUBERNETES / "base" / "jaxserve.yaml").read_text())
PATCHED = [
    each
    for file in sorted(KUBERNETES.glob("components/*/patches.yaml"))
    for each in objects(file.read_text())
]
DEPLOYMENT = of_kind(BASE, "Deployment")
POD: Object = DEPLOYMENT["spec"]["template"]["spec"]
(SERVER,) = POD["containers"]
EVENTS_FLAG = "--kv-events-config"


def named(each: Container) -> str:
    return f"{each.owner['kind']}:{each.container['name']}"


def commands() -> list[list[str]]:
    """Arguments of all containers, those of patches included."""
    every = containers([*KUBE_ALL, *PATCHED])
    return [each.container["args"] for each in every if "args" in each.container]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Options]]:
    """Commands that ran, with their options; they do nothing else."""
    found: list[tuple[str, Options]] = []
    for name in ("serve", "precompile"):
        monkeypatch.setattr(
            f"jaxserve.commands.{name}.{name}",
            lambda options, *_, name=name: found.append((name, options)) or 0,
        )
    monkeypatch.setattr("jaxserve.startup.heap.import_freely", lambda: None)
    return found


@pytest.mark.parametrize("arguments", commands(), ids=" ".join)
def test_command_lines_parse(arguments: list[str], ran: list[tuple[str, Options]]) -> None:
    assert main(arguments) == 0
    command, options = ran[-1]
    assert command == arguments[0]
    assert options.model == "jaxserve-embedded"
    assert str(options.cache_dir) == "/var/cache/jaxserve"


def test_kv_events_are_announced_on_the_ports_of_the_pod(ran: list[tuple[str, Options]]) -> None:
    (args,) = (line for line in commands() if any(part.startswith(EVENTS_FLAG) for part in line))
    assert main(args) == 0
    events = ran[-1][1].kv_events_config
    assert events is not None and events.active
    (patch,) = (
        each.container
        for each in containers(PATCHED)
        if any(port["name"] == "kv-events" for port in each.container.get("ports", []))
    )
    ports = {port["name"]: port["containerPort"] for port in patch["ports"]}
    assert ports == {"kv-events": 5556, "kv-replay": 5557}
    assert events.endpoint == f"tcp://*:{ports['kv-events']}"
    assert events.replay_endpoint == f"tcp://*:{ports['kv-replay']}"
    assert events.topic == "kv@$(POD_IP):8000@jaxserve-embedded"
    assert [variable["name"] for variable in patch["env"]] == ["POD_IP"]
    extras = re.findall(r"pip install .*\[\$\{CUDA\},([\w,-]+)\]", dockerfile())
    assert "kv-events" in extras[0].split(",")


def test_only_readers_of_events_reach_their_ports() -> None:
    (policy,) = (each for each in PATCHED if each["kind"] == "NetworkPolicy")
    requests, scrapes, events = policy["spec"]["ingress"]
    assert [port["port"] for port in scrapes["ports"]] == ["probes"]
    assert [port["port"] for port in requests["ports"]] == ["http"]
    assert [port["port"] for port in events["ports"]] == ["kv-events", "kv-replay"]
    assert events["from"]
    by_default = of_kind(BASE, "NetworkPolicy")["spec"]["ingress"]
    assert [rule["ports"][0]["port"] for rule in by_default] == ["http", "probes"]


def test_a_pod_lives_as_long_as_its_requests_may_take(ran: list[tuple[str, Options]]) -> None:
    assert main(SERVER["args"]) == 0
    options = ran[-1][1]
    before = SERVER["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert before > 0
    assert POD["terminationGracePeriodSeconds"] >= before + options.shutdown_timeout + 10
    assert options.shutdown_timeout == parse_args([]).shutdown_timeout


def test_the_server_listens_where_the_manifests_look(ran: list[tuple[str, Options]]) -> None:
    assert main(SERVER["args"]) == 0
    options = ran[-1][1]
    assert options.host == "0.0.0.0"
    ports = {port["name"]: port["containerPort"] for port in SERVER["ports"]}
    assert (ports["http"], ports["probes"]) == (options.port, options.probe_port)
    asked = [SERVER[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")]
    (service,) = of_kind(BASE, "Service")["spec"]["ports"]
    (monitor,) = of_kind(KUBE_ALL, "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert {*(probe["port"] for probe in asked), monitor["port"]} == {"probes"}
    assert service["targetPort"] == "http"
    pool = of_kind(KUBE_ALL, "InferencePool")["spec"]
    assert pool["targetPorts"] == [{"number": options.port}]


@pytest.mark.parametrize("probe", ["startupProbe", "readinessProbe", "livenessProbe"])
async def test_probes_ask_routes_of_the_server(probe: str) -> None:
    async with probes(FakeEngine()) as url:
        assert await status(url + SERVER[probe]["httpGet"]["path"]) == 200


async def test_prometheus_scrapes_a_route_of_the_server() -> None:
    (monitor,) = of_kind(KUBE_ALL, "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert "authorization" not in monitor
    async with probes(FakeEngine()) as url:
        assert await status(url + monitor["path"]) == 200


async def test_a_start_that_compiles_is_alive_and_gets_no_traffic() -> None:
    engine = FakeEngine()
    engine.phase = "compiling"
    async with probes(engine) as url:
        said = {
            name: await status(url + SERVER[f"{name}Probe"]["httpGet"]["path"])
            for name in ("startup", "readiness", "liveness")
        }
    assert said == {"startup": 503, "readiness": 503, "liveness": 200}


def test_a_slow_start_is_not_killed_and_a_dead_server_is() -> None:
    startup, liveness = SERVER["startupProbe"], SERVER["livenessProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 15 * 60
    assert liveness["periodSeconds"] * liveness["failureThreshold"] >= 60
    assert liveness["timeoutSeconds"] >= 5
    assert DEPLOYMENT["spec"]["progressDeadlineSeconds"] > 15 * 60


def series() -> set[str]:
    text = Metrics("m").exposition().decode()
    return set(re.findall(r"^# TYPE (\S+) gauge", text, re.M))


def test_scalers_ask_for_gauges_that_exist() -> None:
    scaled = of_kind(KUBE_ALL, "ScaledObject")["spec"]["triggers"]
    asked = {re.findall(r"(vllm:\w+)\{", trigger["metadata"]["query"])[0] for trigger in scaled}
    assert asked == {"vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"} <= series()
    hpa = of_kind(KUBE_ALL, "HorizontalPodAutoscaler")["spec"]["metrics"]
    assert {metric["pods"]["metric"]["name"].replace("_", ":", 1) for metric in hpa} == asked


@pytest.mark.parametrize("kind", ["ScaledObject", "HorizontalPodAutoscaler"])
def test_scalers_scale_the_deployment_and_go_down_slowly(kind: str) -> None:
    spec = of_kind(KUBE_ALL, kind)["spec"]
    target = {key: DEPLOYMENT[key] for key in ("apiVersion", "kind")}
    assert spec["scaleTargetRef"] == {**target, "name": DEPLOYMENT["metadata"]["name"]}
    behavior = (
        spec["behavior"]
        if kind == "HorizontalPodAutoscaler"
        else spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    )
    assert behavior["scaleDown"]["stabilizationWindowSeconds"] >= 600


@pytest.mark.parametrize("each", containers(KUBE_ALL), ids=named)
def test_pods_have_no_rights(each: Container) -> None:
    pod = each.spec["securityContext"]
    assert pod["runAsNonRoot"] is True
    assert pod["runAsUser"] == pod["runAsGroup"] == user_of_the_image()
    assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
    assert each.spec["automountServiceAccountToken"] is False
    assert each.spec["enableServiceLinks"] is False
    assert each.container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert each.container["resources"]["limits"]["nvidia.com/gpu"] == 1


def user_of_the_image() -> int:
    return int(re.findall(r"^USER (\d+)$", dockerfile(), re.M)[0])


def dockerfile() -> str:
    return (KUBERNETES.parent / "Dockerfile").read_text()


@pytest.mark.parametrize("each", containers(KUBE_ALL), ids=named)
def test_what_the_image_writes_is_on_volumes(each: Container) -> None:
    mounted = {mount["mountPath"]: mount["name"] for mount in each.container["volumeMounts"]}
    home = re.findall(r"^VOLUME (\S+)$", dockerfile(), re.M)
    assert mounted.keys() == {"/tmp", *home, "/var/cache/jaxserve"}
    assert set(mounted.values()) == {volume["name"] for volume in each.spec["volumes"]}


@pytest.mark.parametrize("kind", ["Service", "PodDisruptionBudget", "NetworkPolicy", "PodMonitor"])
def test_selectors_find_the_server_s_pods_and_not_those_that_compile(kind: str) -> None:
    spec: Any = of_kind(KUBE_ALL, kind)["spec"]
    selector = spec.get("podSelector", spec.get("selector"))
    wanted = selector.get("matchLabels", selector)
    assert wanted.items() <= DEPLOYMENT["spec"]["template"]["metadata"]["labels"].items()
    job = of_kind(KUBE_ALL, "Job")["spec"]["template"]["metadata"]["labels"]
    assert not wanted.items() <= job.items()


def test_the_route_leads_to_the_pool_for_as_long_as_a_request_may_take() -> None:
    pool, route = (of_kind(KUBE_ALL, kind) for kind in ("InferencePool", "HTTPRoute"))
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
    (rule,) = route["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    assert backend["group"] == pool["apiVersion"].partition("/")[0]
    assert (backend["kind"], backend["name"]) == ("InferencePool", pool["metadata"]["name"])
    assert int(rule["timeouts"]["request"].removesuffix("s")) >= 600


def test_precompiled_programs_are_those_that_pods_mount() -> None:
    claim = of_kind(KUBE_ALL, "PersistentVolumeClaim")["metadata"]["name"]
    job = of_kind(KUBE_ALL, "Job")["spec"]["template"]["spec"]["volumes"]
    (patch,) = objects((KUBERNETES / "components/precompiled/patches.yaml").read_text())
    pod = patch["spec"]["template"]["spec"]
    (volume,) = pod["volumes"]
    assert volume["persistentVolumeClaim"] == {"claimName": claim, "readOnly": True}
    assert {"name": "programs", "persistentVolumeClaim": {"claimName": claim}} in job
    assert "--require-precompiled" in SERVER["args"] and pod["initContainers"] is None


def test_every_file_of_values_has_a_component() -> None:
    folders = {folder.name for folder in (KUBERNETES / "components").iterdir()}
    assert folders == set(COMPONENTS)
    for name in COMPONENTS:
        assert yaml.safe_load((KUBERNETES / "values" / f"{name}.yaml").read_text())

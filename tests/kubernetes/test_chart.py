"""The Helm chart renders what the plain manifests say, and refuses what cannot work."""

from __future__ import annotations

import subprocess
from itertools import combinations
from pathlib import Path

import pytest
import yaml

from scripts.render_manifests import files, identity, render
from tests.kubernetes.manifests import COMPONENTS, KUBERNETES, Object, objects, tool
from tests.kubernetes.test_schemas import check

EVERYTHING = """
imagePullSecrets: [{name: registry}]
nodeSelector: {nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3}
tolerations: [{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}]
runtimeClassName: nvidia
podLabels: {team: a}
podAnnotations: {note: b}
env: [{name: HF_HUB_OFFLINE, value: "1"}]
model:
  name: /models/qwen3-8b
  servedNames: [qwen3-8b, chat]
  volume: {persistentVolumeClaim: {claimName: models, readOnly: true}}
engineArgs: [--kv-cache-dtype=int8]
serveArgs: [--max-queue-time=30]
apiKey: {existingSecret: keys}
service: {type: LoadBalancer, port: 80}
networkPolicy: {clients: [{namespaceSelector: {matchLabels: {name: apps}}}]}
podMonitor: {enabled: true, labels: {release: prometheus}}
kvEvents: {enabled: true}
gateway: {enabled: true, hostnames: [llm.example.com]}
autoscaling: {keda: {enabled: true}}
"""


def template(folder: Path, values: str) -> list[Object]:
    tool("helm")
    (folder / "values.yaml").write_text(values)
    return render(folder / "values.yaml")


def refusal(folder: Path, values: str) -> str:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        template(folder, values)
    return refused.value.stderr


def test_the_plain_manifests_are_those_of_the_chart() -> None:
    tool("helm")
    for path, content in files().items():
        assert path.read_text() == content, f"run scripts/render_manifests.py: {path}"


def test_helm_finds_nothing_to_complain_of() -> None:
    chart = KUBERNETES / "chart"
    subprocess.run([tool("helm"), "lint", "--strict", chart], check=True, capture_output=True)


def kustomized(folder: Path) -> list[Object]:
    command = [tool("kubectl"), "kustomize", str(folder)]
    return objects(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def together() -> list[tuple[str, ...]]:
    """Components alone, in pairs, and all that may be together."""
    sets = [*combinations(COMPONENTS, 1), *combinations(COMPONENTS, 2), tuple(COMPONENTS)]
    return [tuple(n for n in each if {"hpa", "keda"} - {*each} or n != "hpa") for each in sets]


@pytest.mark.parametrize("names", sorted(set(together())), ids=" ".join)
def test_components_make_of_the_base_what_values_make_of_the_chart(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    up = "../" * len(tmp_path.parts[1:]) + str(KUBERNETES)[1:]
    kustomization = {
        "resources": [f"{up}/base"],
        "components": [f"{up}/components/{n}" for n in names],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    tool("helm")
    rendered = render(*(KUBERNETES / "values" / f"{name}.yaml" for name in names))
    expected = {identity(each): each for each in rendered if each["kind"] != "Job"}
    built = {identity(each): each for each in kustomized(tmp_path)}
    assert sorted_lists(built) == sorted_lists(expected)


def sorted_lists[T](value: T) -> T:
    """Lists of named things in the order of their names: a merge may turn it."""
    if isinstance(value, dict):
        return {key: sorted_lists(each) for key, each in value.items()}  # pyright: ignore
    if isinstance(value, list):
        made = [sorted_lists(each) for each in value]
        named = all(isinstance(each, dict) and "name" in each for each in made)
        return sorted(made, key=lambda each: each["name"]) if named else made  # pyright: ignore
    return value


def test_the_job_and_its_claim_build() -> None:
    kinds = [each["kind"] for each in kustomized(KUBERNETES / "precompile")]
    assert sorted(kinds) == ["Job", "PersistentVolumeClaim"]


def test_the_example_builds_and_serves_its_model() -> None:
    built = kustomized(KUBERNETES / "example")
    for each in built:
        check(each)
        assert each["metadata"]["namespace"] == "llm"
    (pod,) = (each["spec"]["template"]["spec"] for each in built if each["kind"] == "Deployment")
    assert pod["containers"][0]["args"][:2] == ["serve", "/models/qwen3-8b"]
    assert pod["initContainers"][0]["args"][:2] == ["precompile", "--model=/models/qwen3-8b"]
    for container in (*pod["containers"], *pod["initContainers"]):
        assert container["image"] == "registry.example.com/jaxserve:0.1.0"
        assert len(container["volumeMounts"]) == len(pod["volumes"]) == 4
    (scaled,) = (each["spec"] for each in built if each["kind"] == "ScaledObject")
    assert all('namespace="llm"' in one["metadata"]["query"] for one in scaled["triggers"])


@pytest.mark.parametrize("mode", ["init", "job", "none"])
def test_everything_together_is_valid(mode: str, tmp_path: Path) -> None:
    programs = f"programs: {{precompile: {mode}, claim: {'programs' if mode == 'job' else ''}}}"
    rendered = template(tmp_path, EVERYTHING + programs)
    for each in rendered:
        check(each)
    (pod,) = (each["spec"]["template"]["spec"] for each in rendered if each["kind"] == "Deployment")
    (server,) = pod["containers"]
    assert ("--require-precompiled" in server["args"]) == (mode != "none")
    assert ("initContainers" in pod) == (mode == "init")
    compiling = [
        container
        for each in rendered
        if each["kind"] in ("Deployment", "Job")
        for container in each["spec"]["template"]["spec"].get(
            "containers" if each["kind"] == "Job" else "initContainers", []
        )
    ]
    for container in compiling:  # with the flags that decide which programs there are
        assert container["args"][2:] == ["--cache-dir=/var/cache/jaxserve", "--kv-cache-dtype=int8"]
        assert set(container["args"][2:]) <= set(server["args"])
    names = [variable["name"] for variable in server["env"]]
    assert names == ["POD_IP", "JAXSERVE_API_KEY", "HF_HUB_OFFLINE"]
    assert any("@qwen3-8b" in flag for flag in server["args"] if flag.startswith("--kv-events"))


def test_the_grace_period_follows_the_values(tmp_path: Path) -> None:
    rendered = template(tmp_path, "shutdown: {preStopSeconds: 20, timeoutSeconds: 300}")
    (pod,) = (each["spec"]["template"]["spec"] for each in rendered if each["kind"] == "Deployment")
    assert pod["terminationGracePeriodSeconds"] == 330
    assert "--shutdown-timeout=300" in pod["containers"][0]["args"]


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    both = "autoscaling: {hpa: {enabled: true}, keda: {enabled: true}}"
    assert "not both" in refusal(tmp_path, both)
    assert "needs programs.claim" in refusal(tmp_path, "programs: {precompile: job}")
    assert "additional properties 'replica' not allowed" in refusal(tmp_path, "replica: 2")
    assert "/model/name" in refusal(tmp_path, 'model: {name: ""}')

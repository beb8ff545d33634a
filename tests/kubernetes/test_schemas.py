"""The plain manifests are what Kubernetes and the custom resources take; unknown fields fail."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.kubernetes.manifests import KUBERNETES, Object, objects, plain

SCHEMAS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("schemas.yaml").read_text())
VERSIONS = ("1.30", "1.37")
"""The oldest that the chart takes, and the newest that is known here."""


def closed(schema: Object) -> Object:
    """The same schema, in which objects have no other fields, and what has fields is an object."""
    made = {key: _closed(key, value) for key, value in schema.items()}
    if {"properties", "required", "additionalProperties"} & made.keys():
        made = {"type": "object", "additionalProperties": False, **made}
    elif "items" in made:
        made["type"] = "array"
    return made


def _closed(key: str, value: Any) -> Any:
    if key == "properties":
        return {name: closed(each) for name, each in value.items()}
    if key in ("items", "additionalProperties") and isinstance(value, dict):
        return closed(value)
    return value


def check(each: Object, version: str = VERSIONS[-1]) -> None:
    """Raises a validation error, or SchemaNotFoundError for a kind that nobody knows."""
    described = SCHEMAS.get(each["kind"])
    if described is None:
        kubernetes_validate.validate(each, version, strict=True)
        return
    assert each["apiVersion"] == described["apiVersion"]
    assert each.keys() == {"apiVersion", "kind", "metadata", "spec"}
    jsonschema.validate(each["spec"], closed(described["spec"]))
    template = each["spec"].get("leaderWorkerTemplate", {})
    for part in (template.get("leaderTemplate"), template.get("workerTemplate")):
        if part:
            check({"apiVersion": "v1", "kind": "Pod", **part}, version)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "each", [pytest.param(each, id=f"{file}:{each['kind']}") for file, each in plain()]
)
def test_every_object_is_valid(each: Object, version: str) -> None:
    check(each, version)


def test_all_kinds_are_there() -> None:
    kinds = {each["kind"] for _, each in plain()}
    assert kinds >= {"Deployment", "Service", "Job", "PersistentVolumeClaim", "NetworkPolicy"}
    assert kinds >= {"PodDisruptionBudget", "HorizontalPodAutoscaler"} | SCHEMAS.keys()


@pytest.mark.parametrize(
    "each",
    [pytest.param(each, id=f"{file}:{each['kind']}") for file, each in plain() if each["spec"]],
)
def test_a_field_that_does_not_exist_is_noticed(each: Object) -> None:
    wrong = deepcopy(each)
    wrong["spec"]["replicaz"] = 1
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        check(wrong)


@pytest.mark.parametrize(
    "spec",
    [
        # As it was before v1.
        {"selector": {"app": "x"}, "targetPortNumber": 8000, "extensionRef": {"name": "epp"}},
        {"selector": {"matchLabels": {"app": "x"}}, "targetPorts": []},
        {"selector": {"matchLabels": {"app": "x"}}, "targetPorts": [{"number": 8000}] * 2},
        {
            "selector": {"matchLabels": {"app": "x"}},
            "targetPorts": [{"number": 8000}],
            "endpointPickerRef": {"name": "epp"},
        },
    ],
)
def test_pools_of_other_versions_and_wrong_ones_are_noticed(spec: Object) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(spec, closed(SCHEMAS["InferencePool"]["spec"]))


def test_each_schema_says_where_it_is_from() -> None:
    for described in SCHEMAS.values():
        repository, commit = described["source"].split()[:2]
        assert repository.count("/") == 1 and len(commit.rstrip(",")) == 7


def test_rendered_files_say_that_they_are_rendered() -> None:
    for file in (*KUBERNETES.glob("base/*"), *KUBERNETES.glob("components/*/*")):
        assert file.read_text().startswith("# Rendered by scripts/render_manifests.py"), file
        assert objects(file.read_text())

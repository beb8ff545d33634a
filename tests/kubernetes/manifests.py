"""The manifests of deploy/kubernetes, as the tests look at them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from scripts.kube_tools import find

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"
COMPONENTS = sorted(file.stem for file in KUBERNETES.glob("values/*.yaml"))

type Object = dict[str, Any]


def tool(name: str) -> str:
    """Helm or kubectl. Tests that need them are left out where `make test` did not bring them."""
    found = find(name)
    if found is None:
        assert not os.environ.get("CI"), "make test installs it"
        pytest.skip(f"no {name}: run scripts/kube_tools.py")
    return found


def objects(text: str) -> list[Object]:
    return [each for each in yaml.safe_load_all(text) if each]


def plain() -> Iterator[tuple[str, Object]]:
    """Every whole object of the plain manifests, with its file."""
    for file in sorted(KUBERNETES.glob("**/*.yaml")):
        part = file.relative_to(KUBERNETES)
        if part.parts[0] in ("chart", "values") or file.name == "patches.yaml":
            continue
        for each in objects(file.read_text()):
            if "kustomize" not in each["apiVersion"]:
                yield str(part), each


class Container(NamedTuple):
    owner: Object
    """What its pod is of."""
    spec: Object
    """Of the pod."""
    container: Object


def pod_template(owner: Object) -> Object | None:
    return owner["spec"].get("template") if owner["kind"] in ("Deployment", "Job") else None


def containers(owners: list[Object]) -> list[Container]:
    found: list[Container] = []
    for owner in owners:
        if template := pod_template(owner):
            spec = template.get("spec", {})
            for container in [*(spec.get("initContainers") or []), *spec.get("containers", [])]:
                found.append(Container(owner, spec, container))
    return found


def of_kind(owners: list[Object], kind: str) -> Object:
    (found,) = (each for each in owners if each["kind"] == kind)
    return found

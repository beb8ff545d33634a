"""Renders the plain manifests of deploy/kubernetes from its Helm chart.

    python scripts/render_manifests.py

`base` is the chart with its default values. Each file in `values` becomes a Kustomize component:
the objects that it adds, and patches for those that it changes. A Job goes into `precompile`, since
it must finish before the base is applied. tests/kubernetes builds all of them, and compares the
result with Helm's.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.kube_tools import find

KUBERNETES = Path(__file__).parents[1] / "deploy" / "kubernetes"
HEADER = "# Rendered by scripts/render_manifests.py from the chart. Do not edit.\n"
LISTS = {"ports": "containerPort", "volumeMounts": "mountPath"}
"""Keys by which the elements of these lists are merged; other lists are merged by name."""

type Object = dict[str, Any]


def render(*values: Path) -> list[Object]:
    """Returns the objects that Helm renders, in its order.

    Raises:
      FileNotFoundError: Helm is not installed; see scripts/kube_tools.py.
      subprocess.CalledProcessError: the chart refuses the values.
    """
    helm = find("helm")
    if helm is None:
        raise FileNotFoundError("no helm: run scripts/kube_tools.py")
    command = [helm, "template", "jaxserve", str(KUBERNETES / "chart"), "--namespace", "default"]
    command += [part for file in values for part in ("--values", str(file))]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [each for each in yaml.safe_load_all(text) if each]


def identity(each: Object) -> tuple[str, str]:
    """Returns kind and name."""
    return each["kind"], each["metadata"]["name"]


def changes(old: Object, new: Object) -> Object:
    """Returns the strategic merge patch that turns `old` into `new`, without names."""
    patch = {key: None for key in old if key not in new}
    for key, value in new.items():
        if key not in old:
            patch[key] = value
        elif old[key] != value:
            patch[key] = _changed(key, old[key], value)
    return patch


def _changed(key: str, old: Any, new: Any) -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        return changes(old, new)
    name = LISTS.get(key, "name")
    if not (isinstance(old, list) and all(isinstance(e, dict) and name in e for e in [*old, *new])):
        return new
    before, after = ({each[name]: each for each in part} for part in (old, new))
    gone = [{name: each, "$patch": "delete"} for each in before if each not in after]
    differing = [
        {name: each, **(changes(before[each], value) if each in before else value)}
        for each, value in after.items()
        if before.get(each) != value
    ]
    return [*gone, *differing]


def dumped(objects: list[Object]) -> str:
    return HEADER + yaml.safe_dump_all(objects, sort_keys=False, width=100)


def files() -> dict[Path, str]:
    """Returns the content of every rendered file."""
    base = render()
    found = {
        KUBERNETES / "base" / "jaxserve.yaml": dumped(base),
        KUBERNETES / "base" / "kustomization.yaml": HEADER
        + yaml.safe_dump({**_kustomization("Kustomization"), "resources": ["jaxserve.yaml"]}),
    }
    known = {identity(each): each for each in base}
    for values in sorted(KUBERNETES.glob("values/*.yaml")):
        folder, rendered = KUBERNETES / "components" / values.stem, render(values)
        added = [each for each in rendered if identity(each) not in known]
        jobs = [each for each in added if each["kind"] == "Job"]
        added = [each for each in added if each["kind"] != "Job"]
        patches = [
            {**_head(each), **changes(known[identity(each)], each), "metadata": _name(each)}
            for each in rendered
            if known.get(identity(each), each) != each
        ]
        kustomization = _kustomization("Component")
        for job in jobs:
            del job["metadata"]["annotations"]  # Helm's own
            found[KUBERNETES / "precompile" / "job.yaml"] = dumped([job])
        if added:
            found[folder / "objects.yaml"] = dumped(added)
            kustomization["resources"] = ["objects.yaml"]
        if patches:
            found[folder / "patches.yaml"] = dumped(patches)
            kustomization["patches"] = [{"path": "patches.yaml"}]
        found[folder / "kustomization.yaml"] = HEADER + yaml.safe_dump(kustomization)
    return found


def _kustomization(kind: str) -> Object:
    version = "v1alpha1" if kind == "Component" else "v1beta1"
    return {"apiVersion": f"kustomize.config.k8s.io/{version}", "kind": kind}


def _head(each: Object) -> Object:
    return {key: each[key] for key in ("apiVersion", "kind")}


def _name(each: Object) -> Object:
    return {"name": each["metadata"]["name"]}


if __name__ == "__main__":
    for path, content in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)

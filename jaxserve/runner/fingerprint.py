"""The cache key of compiled programs: versions, device, flags, sources and model."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxserve
import jaxserve_kernels
from jaxserve.programs.executable_cache import Key
from jaxserve.runner.programs import RunnerConfig
from jaxserve_kernels import ptxas

_PACKAGES = (
    *("jax", "jaxlib", "numpy", "triton", "jax-triton"),
    *("jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt"),
)

_OURS = (
    *("api.py", "config.py", "layer_spec.py", "model_spec.py", "plan.py", "views.py"),
    *(f"models/{name}.py" for name in ("attention", "decoder", "delta_net")),
    *(f"models/{name}.py" for name in ("layer", "layer_weights", "rope")),
    *(f"models/drafts/{name}.py" for name in ("block", "draw", "eagle3", "mtp", "places", "spec")),
    *("programs/*.py", "runner/*.py"),
)
"""The files of jaxserve that programs depend on; `tests/test_layering.py` checks the list."""


def program_key(
    config: RunnerConfig, params: Any, compiler_settings: Mapping[str, str], device: Any
) -> Key:
    """Returns the key of all programs of a runner on `device`, in readable words.

    Args:
      params: the weights, or a tree of ShapeDtypeStruct.
      compiler_settings: settings that compilers read from the environment.
    """
    return {
        **{name: version for name in _PACKAGES if (version := _version(name))},
        "python": ".".join(map(str, sys.version_info[:2])),
        "platform": " ".join(device.client.platform_version.split()),
        "device": device.device_kind,
        "target": dataclasses.asdict(config.target),
        "processor": _processor() if device.platform == "cpu" else platform.machine(),
        "driver": _driver() if device.platform == "gpu" else "",
        "ptxas": (ptxas.version() or "") if device.platform == "gpu" else "",
        "matmul_precision": str(jax.config.values["jax_default_matmul_precision"]),
        **compiler_settings,
        "sources": sources_digest(),
        "model": dataclasses.asdict(config.spec),
        "draft": None if config.draft is None else dataclasses.asdict(config.draft),
        "dtype": np.dtype(config.dtype).name,
        "weights": _describe(params),
        "kv_format": config.kv_format.name,
        "kv_cache": [dataclasses.asdict(each) for each in config.kv_shapes],
        "sequences": list(config.sequences_shape),
        "tables": _describe(config.tables),
        "sampled_vocab": config.sampled_vocab,
        "rings": None if config.rings is None else list(config.rings),
        "parallelism": 1,
    }


@functools.cache
def sources_digest() -> str:
    """Returns the SHA-256 of all sources that are traced into programs."""
    digest = hashlib.sha256()
    for name, path in program_sources():
        digest.update(f"{name} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def program_sources() -> Iterator[tuple[str, Path]]:
    """Yields (name, file) of every source file that programs may depend on, in a fixed order."""
    root = Path(jaxserve.__path__[0])
    for pattern in _OURS:
        for path in sorted(root.glob(pattern)):
            yield f"jaxserve/{path.relative_to(root).as_posix()}", path
    root = Path(jaxserve_kernels.__path__[0])
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".json"):
            yield f"jaxserve_kernels/{path.relative_to(root).as_posix()}", path


def _describe(params: Any) -> list[str]:
    """Returns the tree's structure, and the path, dtype and shape of every leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return [
        str(jax.tree.structure(params)),
        *(
            f"{jax.tree_util.keystr(path)} {leaf.dtype.name}{list(leaf.shape)}"
            for path, leaf in leaves
        ),
    ]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    """Returns the processor's model and instruction sets, on which machine code depends."""
    wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    first = text.split("\n\n", 1)[0].splitlines()
    fields = [line.split(":", 1) for line in first if line.split("\t", 1)[0].strip() in wanted]
    digest = hashlib.sha256(repr(fields).encode()).hexdigest()[:16]
    model = next((value.strip() for name, value in fields if name.strip() == "model name"), "")
    return f"{platform.machine()} {model} {os.cpu_count()} cores, features {digest}"


def _driver() -> str:
    try:
        return Path("/sys/module/nvidia/version").read_text(encoding="utf-8").strip()
    except OSError:
        return "unknown"

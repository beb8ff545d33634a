"""Compares Orbax with the engine's own checkpoint format: write and read time, memory, import time.

    python -m lab.studies.bench_checkpoints --model qwen3-0.6b --folder /tmp/checkpoints

Writes stacked bfloat16 weights of the model's shape from host memory to files, and reads them to
arrays on the default device. Each measurement runs in its own process. Needs the extra `bench`
(orbax comes with flax).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxserve.models.registry import NAMED_MODELS

_FORMATS = ("native", "orbax")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(NAMED_MODELS), default="qwen3-0.6b")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=3, help="the best one counts")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        kind, what = options.one
        print(json.dumps(measure(kind, what, options.model, options.folder)))
        return
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for what in ("write", "read"):
        for kind in _FORMATS:
            runs = [child(kind, what, options) for _ in range(options.repeats)]
            best = min(runs, key=lambda run: run["seconds"])
            shown = ", ".join(f"{name} {value:.2f}" for name, value in best.items())
            print(f"{what:5} {kind:6} {shown}", flush=True)


def child(kind: str, what: str, options: argparse.Namespace) -> dict[str, float]:
    arguments = ["--model", options.model, "--folder", str(options.folder), "--one", kind, what]
    output = subprocess.check_output([sys.executable, __file__, *arguments], text=True)
    return json.loads(output.splitlines()[-1])


def measure(kind: str, what: str, model: str, folder: Path) -> dict[str, float]:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxserve.models import decoder

    abstract = decoder.abstract(NAMED_MODELS[model], jnp.bfloat16, stacked=True)
    jax.devices()
    begun = time.perf_counter()
    run = (native if kind == "native" else orbax)(what, folder / kind, abstract)
    imported = time.perf_counter() - begun
    tree: Any = None
    if what == "write":
        shutil.rmtree(folder / kind, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(0)
        tree = jax.tree.map(
            lambda leaf: np.resize(
                rng.integers(0, 2**16, 1 << 22, np.uint16).view(leaf.dtype), leaf.shape
            ),
            abstract,
        )
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the memory peak
    begun, processor = time.perf_counter(), time.process_time()
    run(tree)
    seconds, processor = time.perf_counter() - begun, time.process_time() - processor
    size = sum(file.stat().st_size for file in (folder / kind).rglob("*") if file.is_file())
    return {
        "seconds": seconds,
        "cpu": processor,
        "GB": size / 1e9,
        "files": sum(file.is_file() for file in (folder / kind).rglob("*")),
        "peak GB beyond": (resident("VmHWM") - before) / 1e9,
        "import": imported,
    }


def native(what: str, folder: Path, abstract: Any) -> Callable[[Any], Any]:
    from jaxserve_checkpoints.load import load_params
    from jaxserve_checkpoints.naming import leaf_parts, leaf_paths
    from jaxserve_checkpoints.native import open_native
    from jaxserve_checkpoints.native_writer import NativeWriter

    def write(tree: Any) -> None:
        values = dict(leaf_paths(tree))
        parts = {part.path: part for part in leaf_parts(abstract)}
        leaves = {name: part.leaf for name, part in parts.items()}
        with NativeWriter(folder, leaves, {}, {}) as writer:
            for name, part in parts.items():
                value = values[part.owner]
                writer.write(name, value if part.layer is None else value[part.layer])
            writer.finish()

    def read(_: Any) -> Any:
        import jax

        own = open_native(folder)
        own.verify()
        return jax.block_until_ready(load_params(own.tensors, own.rules(), abstract))

    return write if what == "write" else read


def orbax(what: str, folder: Path, abstract: Any) -> Callable[[Any], Any]:
    import jax
    import orbax.checkpoint as ocp

    def write(tree: Any) -> None:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder.absolute(), jax.tree.map(jax.numpy.asarray, tree))

    def read(_: Any) -> Any:
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        target = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), abstract
        )
        with ocp.StandardCheckpointer() as checkpointer:
            return jax.block_until_ready(checkpointer.restore(folder.absolute(), target))

    return write if what == "write" else read


def resident(field: str) -> int:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(re.findall(rf"^{field}:\s+(\d+)", status, re.M)[0]) * 1024


if __name__ == "__main__":
    main()

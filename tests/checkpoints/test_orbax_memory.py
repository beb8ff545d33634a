"""How much memory reading an Orbax checkpoint takes beside the weights, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints.orbax_files import maxtext_tree, random_tensors, save
from tests.tiny_model import tiny_spec

LARGE = tiny_spec(
    vocab_size=4096, embed=512, ffn=4096, num_layers=12, q_heads=8, kv_heads=4, head_dim=64
)
"""About 350 MB in float32."""

_IN_FLIGHT = 32 << 20
_BUFFER = 8 << 20
_ROOM = 64 << 20
"""Of allocators and libraries."""

_PROGRAM = f"""
import json, sys, jax, jax.numpy as jnp
from pathlib import Path
from jaxserve.models import decoder, registry
from jaxserve_checkpoints.load import load_params
from jaxserve_checkpoints import staging
from jaxserve_checkpoints.orbax import find_step, open_orbax
from jaxserve_checkpoints.stream_sources import assembled_sources
from tests.checkpoints.test_orbax_memory import LARGE
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
config = dict(vocab_size=LARGE.vocab_size, num_hidden_layers=LARGE.num_layers)
checkpoint = open_orbax(find_step(Path(sys.argv[1])), config)
jax.block_until_ready(jnp.zeros(8) + 1)
staging.BUFFER_BYTES = {_BUFFER}
abstract, rules = decoder.abstract(LARGE, jnp.bfloat16, stacked=True), registry.rules(LARGE)
programs = {{each.name: jax.jit(each.function, donate_argnums=each.donated).lower(*each.arguments)
    .compile() for each in staging.staging_programs(abstract)}}
before = peak()
if sys.argv[2] == "load":
    params = load_params(checkpoint, rules, abstract, max_bytes_in_flight={_IN_FLIGHT})
else:
    sources = assembled_sources(checkpoint, rules, abstract, max_bytes_ahead={_IN_FLIGHT})
    params = staging.stream(sources, abstract, programs)
print(json.dumps([sum(leaf.nbytes for leaf in jax.tree.leaves(params)), peak() - before]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["load", "stream"])
@pytest.mark.parametrize("scanned", [False, True])
def test_memory_beside_the_weights_is_bounded(tmp_path: Path, scanned: bool, way: str) -> None:
    """By what is in flight; and of arrays of all layers, in one chunk each, by those of a leaf."""
    tensors = random_tensors(LARGE)
    total = sum(array.nbytes for array in tensors.values())
    save(tmp_path / "saved", maxtext_tree(tensors, LARGE, scanned=scanned))
    ups = [array.nbytes for name, array in tensors.items() if "gate" in name or "up" in name]
    out = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(tmp_path / "saved"), way],
        check=True,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ":".join(sys.path), "JAX_PLATFORMS": "cpu"},
    ).stdout
    weights, grown = json.loads(out)
    assert weights == total // 2
    beside = grown - weights
    print(f"beside {weights >> 20} MiB of weights: {beside >> 20} MiB")
    read = 2 * sum(ups) if scanned else 0  # as chunks are decoded, and as an array
    written = sum(ups) // 2  # a CPU copies the leaf of all layers that it writes into
    copied = 4 * _BUFFER if way == "stream" else 0  # a CPU copies both of them once more
    assert beside < 2 * _IN_FLIGHT + read + written + copied + _ROOM

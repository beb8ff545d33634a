"""What moves pages to and from the host tier, compiled by XLA for GPUs that are not here: two
architectures, every KV format and one with a head beside it, in place."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.runner import page_moves, state_copies
from jaxserve.runner.draft_cache import DraftedLayout
from jaxserve.runner.page_moves import Rings
from jaxserve_kernels.kv_format import CacheShape, PageLayout, named
from jaxserve_kernels.kv_format.kvarn import KVarN
from jaxserve_kernels.recurrent_state import RecurrentState
from jaxserve_kernels.target import Target
from tests.aot.compiled_steps import missing

H100 = (Path(__file__).parent / "h100_80gb_hbm3.textproto").read_text()
SHAPE = CacheShape(layers=4, pages=64, kv_heads=8, page_size=64, head_dim=128, slots=5)
RINGS = Rings(store=8, load=16)
STATE = RecurrentState(
    conv=jax.ShapeDtypeStruct((6, 5, 3, 512), jnp.bfloat16),  # type: ignore[arg-type]
    delta=jax.ShapeDtypeStruct((6, 5, 8, 128, 128), jnp.float32),  # type: ignore[arg-type]
)
LAYOUTS: tuple[PageLayout, ...] = (
    named("auto"),
    named("int8"),
    named("fp8_e4m3"),
    KVarN(value_bits=2, group=64),
    KVarN(value_bits=4, group=64),
    DraftedLayout(model=named("int8"), layers=1, kv_heads=2, head_dim=64),
)


def sharding(major: int) -> NamedSharding:
    """Of one GPU of a compute capability of `major`.0: an H100's sizes, and no Hopper features."""
    if lacking := missing():
        pytest.skip(f"cannot compile for a GPU here: {', '.join(lacking)} missing")
    description = H100
    if major < 9:
        description = re.sub(
            r"major: 9\s+feature_extension: ACCELERATED_FEATURES", f"major: {major}", H100
        )
        assert description != H100
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="gpu", topology="1x1x1", target_config=description
    )
    mesh = topologies.make_mesh(topo=topology, mesh_shape=(1,), axis_names=("gpu",))
    return NamedSharding(mesh, PartitionSpec())


@pytest.mark.parametrize("major", [8, 9])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda it: getattr(it, "name", "with a head's"))
def test_moves_of_pages_compile_and_copy_no_cache(layout: PageLayout, major: int) -> None:
    place = sharding(major)
    programs = page_moves.programs(
        [layout], [SHAPE], jnp.bfloat16, RINGS, STATE, target=Target.for_gpu(10 * major)
    )
    moved = [each for each in programs if each.name.endswith(("_1", "_16"))]
    assert len(moved) == 8
    page = layout.page_bytes(SHAPE, jnp.bfloat16)
    for program in moved:
        arguments = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            program.arguments,
        )
        jitted = jax.jit(program.function, donate_argnums=program.donated)
        compiled = jitted.lower(*arguments).compile()
        assert "triton_kernel_call" in (compiled.as_text() or ""), "no kernel gave way"
        analysis = compiled.memory_analysis()
        assert analysis is not None
        given = jax.tree.leaves(program.arguments[program.donated[0]])
        donated = sum(leaf.size * leaf.dtype.itemsize for leaf in given)
        assert analysis.alias_size_in_bytes >= donated, f"{program.name} copies what it is given"
        assert analysis.temp_size_in_bytes <= 4 * page, program.name


@pytest.mark.parametrize("major", [8, 9])
def test_a_copy_of_recurrent_state_needs_no_scratch(major: int) -> None:
    """Else it would wait for the scratch of the step in flight."""
    place = sharding(major)
    (program,) = state_copies.programs(STATE, target=Target.for_gpu(10 * major))
    arguments = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        program.arguments,
    )
    compiled = jax.jit(program.function, donate_argnums=program.donated).lower(*arguments).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None and analysis.temp_size_in_bytes < 1024
    states = sum(leaf.size * leaf.dtype.itemsize for leaf in STATE)
    assert analysis.alias_size_in_bytes == states, "the state is copied"

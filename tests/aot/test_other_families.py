"""The kernels of other families' heads and matrices, compiled without a GPU."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

from jaxserve_kernels import weights
from jaxserve_kernels.attention_inputs import HeadWeights
from jaxserve_kernels.kv_format import AttentionStep, CacheShape, attend, end_step, named
from jaxserve_kernels.matmul import add_linear, gated_linear, linear
from jaxserve_kernels.paged_attention import QueryTiles, tile_tokens
from jaxserve_kernels.target import Target
from tests.aot.compiled_steps import missing

if lacking := missing():
    pytest.skip(f"missing: {', '.join(lacking)}", allow_module_level=True)


class Family(NamedTuple):
    """A model's shapes."""

    embed: int
    ffn: int
    q_heads: int
    kv_heads: int
    biased: bool

    @property
    def width(self) -> int:
        """Of the projection to queries, keys and values."""
        return (self.q_heads + 2 * self.kv_heads) * 128


FAMILIES = {
    "llama-3.1-8b": Family(4096, 14336, 32, 8, biased=False),  # Mistral-7B has the same shapes
    "qwen2.5-7b": Family(3584, 18944, 28, 4, biased=True),
}
CAPABILITIES = (80, 90, 120)
SLOTS, PAGES, BF16 = 9, 600, jnp.bfloat16


def array(*shape: int, dtype: Any = BF16) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def ints(*shape: int) -> Any:
    return array(*shape, dtype=jnp.int32)


def step_of(tokens: int, tiles: int, decode_rows: int, page_size: int) -> AttentionStep:
    several, single = (
        QueryTiles(*(ints(count) for _ in range(4))) for count in (tiles, decode_rows)
    )
    return AttentionStep(
        slots=ints(tokens), positions=ints(tokens), pages=ints(tokens), offsets=ints(tokens),
        tiles=several._replace(decode_rows=single if decode_rows else None),
        page_table=ints(SLOTS, 32_768 // page_size),
    )  # fmt: skip


def compile_for(capability: int, function: Any, *args: Any, pdl: bool = False) -> list[str]:
    """The names of the kernels that the function calls; every one compiles, or this raises."""
    from jaxserve_kernels.pdl.describe import describe

    target = Target.for_gpu(capability).replace(checked=False, pdl=pdl)
    program = jax.make_jaxpr(lambda *args: function(*args, target=target))(*args).jaxpr
    calls = [each for each in program.eqns if each.primitive.name == "triton_kernel_call"]
    for call in calls:
        describe(call)
    return [call.params["name"] for call in calls]


@pytest.mark.parametrize(
    ("capability", "work"),
    [*itertools.product(CAPABILITIES, ("decode_1", "mixed")), (90, "decode_8")],
)
@pytest.mark.parametrize("name", ["auto", "int8", "fp8_e4m3", "kvarn_k4v2_g128"])
@pytest.mark.parametrize("family", FAMILIES)
def test_attention(capability: int, family: str, name: str, work: str) -> None:
    """Groups of four and of seven query heads, without norms, with and without a bias."""
    compile_attention(capability, family, name, work)


@pytest.mark.parametrize(
    ("capability", "work"),
    [*itertools.product(CAPABILITIES, ("decode_1", "mixed")), (90, "decode_8")],
)
@pytest.mark.parametrize("name", ["auto", "int8", "fp8_e4m3"])
def test_attention_with_the_window_of_mistral(capability: int, name: str, work: str) -> None:
    compile_attention(capability, "llama-3.1-8b", name, work, window=4096)


def compile_attention(
    capability: int, family: str, name: str, work: str, *, window: int | None = None
) -> None:
    spec, found = FAMILIES[family], named(name)
    decodes = work != "mixed"
    tokens = int(work.split("_")[1]) if decodes else 256
    tile_size = 1 if decodes else tile_tokens(spec.q_heads // spec.kv_heads)
    page_size = found.page_size or 64
    step = step_of(tokens, tokens if decodes else 24, 0 if decodes else 8, page_size)
    shape = CacheShape(
        layers=2, pages=PAGES, kv_heads=spec.kv_heads, page_size=page_size, head_dim=128,
        slots=SLOTS,
    )  # fmt: skip
    kv = found.abstract(shape, BF16)
    heads = HeadWeights(bias=array(spec.width) if spec.biased else None)
    qkv = array(4 if decodes else 1, tokens, spec.width, dtype=jnp.float32 if decodes else BF16)
    tables = (array(tokens, 64, dtype=jnp.float32),) * 2

    def attention(qkv: Any, kv: Any, heads: Any, tables: Any, step: Any, target: Target) -> Any:
        return attend(
            qkv,
            kv,
            1,
            heads,
            tables,
            step,
            eps=1e-5,
            tile_size=tile_size,
            dtype=BF16, window=window,
            target=target,
        )  # fmt: skip

    kernels = compile_for(
        capability, attention, qkv, kv, heads, tables, step, pdl=decodes and capability == 90
    )
    assert any(kernel.startswith("paged_attention") for kernel in kernels)
    if not decodes:
        compile_for(
            capability,
            lambda kv, target: end_step(kv, step, tile_size=tile_size, target=target),
            kv,
        )


@pytest.mark.parametrize("tokens", [1, 64, 512])
@pytest.mark.parametrize("name", ["bf16", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_products(capability: int, family: str, name: str, tokens: int) -> None:
    """Where there is a kernel, in decode steps with PDL and in mixed steps."""
    spec = FAMILIES[family]

    def weight(out: int, depth: int) -> Any:
        plain = array(out, depth)
        return plain if name == "bf16" else jax.eval_shape(weights.quantize_int4, plain)

    def layer(
        x: Any, qkv: Any, heads: Any, out: Any, gate_up: Any, down: Any, target: Target
    ) -> Any:
        gated = gated_linear(x, gate_up, target=target)
        return (
            linear(x, qkv, target=target),
            add_linear(x, heads, out, target=target),
            add_linear(x, gated, down, target=target),
        )

    kernels = compile_for(
        capability, layer, array(tokens, spec.embed), weight(spec.width, spec.embed),
        array(tokens, 128 * spec.q_heads), weight(spec.embed, 128 * spec.q_heads),
        weight(2 * spec.ffn, spec.embed), weight(spec.embed, spec.ffn),
        pdl=tokens <= 64 and capability == 90,
    )  # fmt: skip
    if tokens == 1:
        assert len(kernels) == 4

"""On a GPU a prompt in chunks, beside others, gives what it gives at once, within rounding."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.layer_spec import DeltaNetSpec, LayerSpec
from jaxserve.model_spec import ModelSpec
from jaxserve.models import decoder
from jaxserve.plan import Row, Sampled
from jaxserve.runner.runner import Runner
from jaxserve_checkpoints.dummy import dummy_params
from jaxserve_kernels.paged_attention import tile_tokens
from tests.runner.driver import Placed, certain, first_token, step
from tests.tiny_model import StubMetrics, make_config, tiny_spec

pytestmark = pytest.mark.gpu

VOCAB = 2048
SPECS = tuple(
    tiny_spec(
        vocab_size=VOCAB,
        embed=512,
        ffn=1024,
        num_layers=4,
        q_heads=4 * kv_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
    )
    for kv_heads, head_dim in ((4, 128), (2, 64))
)
"""Heads of shapes that the kernel for long tiles takes: Qwen3's, and the embedded model's."""

_FULL = SPECS[0].layers[0]
_DELTA_NET = DeltaNetSpec(key_heads=2, value_heads=4, key_dim=128, value_dim=128, conv_width=4)
_RECURRENT = LayerSpec(delta_net=_DELTA_NET, feed_forward=_FULL.feed_forward)
HYBRID = dataclasses.replace(SPECS[0], layers=(_RECURRENT, _RECURRENT, _RECURRENT, _FULL))
"""Heads of Qwen3.5's size; its chunks end at blocks."""

LONGEST = 1500
PAGES = -(-LONGEST // 64)
BOUND = 0.08
"""Largest difference of a logprob; 0.013 to 0.038 were measured on an H200."""


def name_of(spec: ModelSpec) -> str:
    return "hybrid" if spec.state is not None else f"heads of {spec.head_dim}"


@pytest.fixture(scope="module", params=(*SPECS, HYBRID), ids=name_of)
def spec(request: pytest.FixtureRequest) -> ModelSpec:
    return request.param


@pytest.fixture(scope="module")
def runner(spec: ModelSpec) -> Runner:
    params = dummy_params(decoder.abstract(spec, jnp.bfloat16, stacked=True), 0)
    return compiled_runner(spec, params, prefill=(16, 128, 512, 2048))


def compiled_runner(spec: ModelSpec, params: decoder.Params, prefill: tuple[int, ...]) -> Runner:
    config = make_config(
        spec=spec,
        max_num_seqs=8,
        max_model_len=LONGEST,
        num_pages=1 + 8 * PAGES,
        page_size=64,
        decode=(8,),
        prefill=prefill,
        tile_size=tile_tokens(spec.q_heads // spec.kv_heads),
    )
    config = dataclasses.replace(config, dtype=jnp.bfloat16)
    runner = Runner(config, params, StubMetrics())  # type: ignore[arg-type]
    runner.compile(8, lambda name, done: None)
    return runner


def placed(slot: int) -> Placed:
    return Placed(slot=slot, pages=tuple(range(1 + slot * PAGES, 1 + (slot + 1) * PAGES)))


def prompt(rng: np.random.Generator, length: int) -> tuple[int, ...]:
    return tuple(rng.integers(0, VOCAB, length).tolist())


def difference(got: Sampled, expected: Sampled) -> float:
    """Largest, over the tokens that both report."""
    assert got.logprobs is not None and expected.logprobs is not None
    ours, theirs = dict(got.logprobs.top), dict(expected.logprobs.top)
    common = ours.keys() & theirs.keys()
    assert len(common) > len(theirs) // 2
    return max(abs(ours[token] - theirs[token]) for token in common)


@pytest.mark.parametrize("seed", range(12))
def test_chunks_among_others_give_what_the_whole_prompt_gives(
    spec: ModelSpec, runner: Runner, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    ids = prompt(rng, int(rng.integers(2, LONGEST)))
    expected = first_token(runner, placed(0), ids)

    runner.reset()
    others = {slot: prompt(rng, int(rng.integers(1, 200))) for slot in range(1, 5)}
    step(runner, [placed(s).chunk(o) for s, o in others.items()], [placed(s) for s in others])
    block = 1 if spec.state is None else spec.state.delta_net.block
    cuts = sorted({0, len(ids), *(rng.integers(1, len(ids), 4) // block * block).tolist()})
    got: Sequence[Sampled | None] = []
    for turn, (start, end) in enumerate(itertools.pairwise(cuts)):
        decodes = [placed(slot).decode(len(other) + turn) for slot, other in others.items()]
        chunk: Row = placed(5).chunk(ids[start:end], start, samples=end == len(ids))
        got = step(runner, [*decodes, chunk], [placed(5)] if turn == 0 else [])
    found = difference(certain(got[-1]), expected)
    print(f"{len(ids)} tokens in {len(cuts) - 1} chunks: {found:.4f}")
    assert found < BOUND

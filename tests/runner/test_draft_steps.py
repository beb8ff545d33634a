"""A draft head in the steps: what it leaves on the device, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.api import SamplingParams
from jaxserve.model_spec import ModelSpec
from jaxserve.models import decoder
from jaxserve.models.drafts.loading import open_draft
from jaxserve.models.layer import StepTokens
from jaxserve.plan import Sampled
from jaxserve.runner.programs import RunnerConfig
from jaxserve.runner.runner import Runner
from jaxserve_kernels.kv_format import AUTO, AttentionStep, Dense, KVFormat, named
from jaxserve_kernels.kv_format.kvarn import KVarN
from jaxserve_kernels.paged_attention import QueryTiles
from jaxserve_kernels.target import CPU
from tests import draft_files
from tests.draft_files import Tensors, block_states, block_tensors
from tests.runner.driver import (
    GREEDY,
    OTHER,
    PROMPT,
    SAMPLED,
    Placed,
    assert_same,
    certain,
    generate,
    plan,
    several,
    step,
    tokens_of,
)
from tests.tiny_model import COMPILES, StubMetrics, make_config, make_params, tiny_spec

SPEC = tiny_spec(num_layers=4, tie_embeddings=False)
VOCAB = 90
"""Token ids that are sampled; the rest of the output matrix is padding."""
LONGEST = 32
PAGES = {0: tuple(range(1, 9)), 1: (20, 11, 22, 13, 24, 15, 26, 17), 2: tuple(range(30, 38))}
SELDOM = "dspark of more drafts than a row verifies"
CONFIGS = {
    "dspark": draft_files.dspark(SPEC, block=4, taps=(0, 2), rank=SPEC.embed),
    SELDOM: draft_files.dspark(SPEC, block=6, taps=(1,), rank=SPEC.embed, layers=1),
    "dflash": draft_files.dflash(SPEC, block=4),
}


ENCODED = KVarN(value_bits=2, group=4)
"""The format of the target's keys and values that differs most from the head's: it encodes a page
before the head's last entry of the page is known."""
OTHER_FORMATS: tuple[KVFormat, ...] = (
    named("int8"),
    named("fp8_e4m3"),
    KVarN(value_bits=4, group=4),
)

COMPILED: dict[RunnerConfig, Runner] = {}


class Served(NamedTuple):
    settings: RunnerConfig
    head: Any
    draft: Any
    config: dict[str, Any]
    tensors: Tensors
    params: decoder.Params

    @property
    def runner(self) -> Runner:
        """With these weights: models of the same shapes have one runner, which compiles once."""
        if self.settings not in COMPILED:
            sink: Any = StubMetrics()
            COMPILED[self.settings] = Runner(self.settings, self.params, sink, self.head)
            COMPILED[self.settings].compile(2, lambda name, done: None)
        runner = COMPILED[self.settings]
        runner.use_params(self.params)
        runner._head = self.head  # pyright: ignore[reportPrivateUsage]
        return runner


def served(
    config: dict[str, Any],
    tensors: Tensors,
    params: decoder.Params,
    folder: Path,
    kv_format: KVFormat = AUTO,
) -> Served:
    """Weights of a target and of a head that drafts in its steps."""
    opened = open_draft(draft_files.write(folder, config, tensors), SPEC, jnp.float32)
    settings = replace(runner_config(), draft=opened.spec, kv_format=kv_format)
    return Served(settings, opened.load(), opened.spec, config, tensors, params)


@contextmanager
def pages_for(kv_format: KVFormat) -> Generator[None]:
    """Beside KVarN a page of the model is two of the head's, as with pages of 128 tokens."""
    with pytest.MonkeyPatch.context() as patch:
        if isinstance(kv_format, KVarN):
            patch.setattr("jaxserve.runner.draft_cache._PAGE", kv_format.group // 2)
        yield


def quiet(params: Any) -> Any:
    """Weights of a target whose attention adds nothing. So the head's formulas hold whatever the
    target's format of keys and values does to those."""
    layers = [
        layer if layer.out is None else layer._replace(out=jnp.zeros_like(layer.out))
        for layer in params.layers
    ]
    return params._replace(layers=tuple(layers))


def runner_config(spec: ModelSpec = SPEC) -> RunnerConfig:
    """With room for the workloads of `test_equivalence`."""
    return make_config(
        spec=spec, decode=(4,), prefill=(24,), verify=((4, 4),), num_pages=41, sampled_vocab=VOCAB
    )


def drafts_on_device(runner: Runner, slot: int) -> tuple[int, list[int]]:
    """The position of the first, and those that there are."""
    on_device: Any = runner._verify  # pyright: ignore[reportPrivateUsage]
    state = on_device.state
    drafts = [token for token in np.asarray(state.drafts)[slot].tolist() if token >= 0]
    return int(state.draft_first[slot]), drafts


def taps_of(served: Served, tokens: Sequence[int]) -> np.ndarray:
    """The target's states that the head reads, [tokens, taps * embed]: computed alone."""
    padded = np.zeros(LONGEST, np.int32)
    padded[: len(tokens)] = tokens
    tapped = _tapped(served.params, jnp.asarray(padded), served.draft.taps)
    return np.asarray(tapped)[: len(tokens)]


@partial(jax.jit, static_argnames="taps")
def _tapped(params: decoder.Params, ids: Any, taps: tuple[int, ...]) -> Any:
    """One chunk in one page."""
    shape = replace(runner_config().kv_shapes[0], pages=2, page_size=LONGEST)
    positions, zeros = jnp.arange(LONGEST), jnp.zeros(LONGEST, jnp.int32)
    first, length, slot, position = (jnp.asarray([each]) for each in (0, LONGEST, 0, 0))
    place = AttentionStep(
        slots=zeros,
        positions=positions,
        pages=zeros + 1,
        offsets=positions,
        tiles=QueryTiles(first, length, slot, position),
        page_table=jnp.asarray([[1]], jnp.int32),
    )
    _, _, tapped = decoder.tapped_forward(
        params,
        (Dense().allocate(shape, jnp.float32),),
        StepTokens(ids, (place,)),
        SPEC,
        tile_size=LONGEST,
        target=CPU,
        taps=taps,
    )
    return jnp.concatenate(tapped, -1)


def greedy_drafts(served: Served, tokens: Sequence[int], positions: int) -> list[int]:
    """What the formulas say that the head drafts after the tokens.

    Args:
      positions: of the block that have pages.
    """
    draft, (*before, last) = served.draft, tokens
    taps = taps_of(served, before).astype(np.float64)
    weights: Any = served.params
    embedding = np.asarray(weights.embedding)
    ids = [last, *[draft.mask_token] * (min(draft.block, positions) - 1)]
    states = block_states(served.config, served.tensors, embedding, taps, ids)
    scores = states @ np.asarray(weights.lm_head, np.float64).T
    found: list[int] = []
    for row in scores if draft.predicts_next else scores[1:]:
        if draft.markov_rank:
            w1, w2 = (served.tensors[f"markov_head.markov_w{n}.weight"] for n in (1, 2))
            row = row + w1[last].astype(np.float64) @ w2.T
        last = int(row[:VOCAB].argmax())
        found.append(last)
    return found[:3]


@pytest.fixture(
    scope="module",
    params=[
        *((name, AUTO) for name in ("dspark", "dflash")),
        ("dspark", ENCODED),
        pytest.param((SELDOM, AUTO), marks=pytest.mark.slow),
        *(pytest.param(("dspark", each), marks=pytest.mark.slow) for each in OTHER_FORMATS),
    ],
    ids=lambda it: f"{it[0]}, {it[1].name}",
)
def random(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    name, kv_format = request.param
    config, params = CONFIGS[name], make_params(SPEC, 4)
    folder = tmp_path_factory.mktemp("head")
    params = params if kv_format == AUTO else quiet(params)
    with pages_for(kv_format):
        yield served(config, block_tensors(config), params, folder, kv_format)


@pytest.fixture(scope="module")
def perfect(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """A target whose scores follow from the last token alone, and a head that knows them."""
    params: Any = make_params(SPEC, 4)
    layers = [
        layer._replace(out=jnp.zeros_like(layer.out), down=jnp.zeros_like(layer.down))
        for layer in params.layers
    ]
    params = params._replace(layers=tuple(layers))
    config = CONFIGS["dspark"]
    states = np.asarray(params.embedding, np.float64)
    states = draft_files.rms(states, np.asarray(params.final_norm, np.float64))
    tensors = block_tensors(config) | {
        "norm.weight": np.zeros(SPEC.embed, np.float32),
        "markov_head.markov_w1.weight": states.astype(np.float32),
        "markov_head.markov_w2.weight": np.asarray(params.lm_head),
    }
    return served(config, tensors, params, tmp_path_factory.mktemp("perfect"))


def placed(slot: int, params: SamplingParams = GREEDY) -> Placed:
    return Placed(slot=slot, pages=PAGES[slot], params=params)


def test_the_drafts_on_the_device_are_those_of_the_formulas(random: Served) -> None:
    """Blocks end where the pages of the row's bound do."""
    assert_drafts(random.runner, lambda known, room: greedy_drafts(random, known, room))


def assert_drafts(runner: Runner, drafts_of: Callable[[list[int], int], list[int]]) -> None:
    """After chunks, decode steps and verify steps, with drafts accepted and rejected, for several
    sequences side by side. `drafts_of`: see `drafts_in_turns`."""
    runner.reset()
    prompts = {0: PROMPT, 1: OTHER, 2: PROMPT[:3]}
    seqs = {slot: placed(slot) for slot in prompts}
    expected = {
        slot: [*prompts[slot], *tokens_of(generate(runner, seqs[slot], prompts[slot], 14))]
        for slot in seqs
    }
    runner.reset()
    tokens = {slot: [*prompt] for slot, prompt in prompts.items()}
    first = [seq.chunk(prompts[slot][:2], samples=False) for slot, seq in seqs.items()]
    step(runner, first, seqs.values())
    rest = [seqs[slot].chunk(prompts[slot][2:], 2) for slot in prompts]
    append(tokens, list(prompts), step(runner, rest))
    seen = drafts_in_turns(runner, seqs, tokens, expected, 4, drafts_of)
    assert len(seen) > 1 and max(seen) == 3


def drafts_in_turns(
    runner: Runner,
    seqs: Mapping[int, Placed],
    tokens: dict[int, list[int]],
    expected: Mapping[int, list[int]],
    page: int,
    drafts_of: Callable[[list[int], int], list[int]],
) -> set[int]:
    """Run five steps of three sequences, one of them without drafts, and compare the drafts on the
    device with `drafts_of`, which takes a sequence's tokens and how many places its pages have
    left. Returns how many drafts there were."""
    seen: set[int] = set()
    for turn in range(5):
        order = [2, 0, 1] if turn % 2 else [0, 1, 2]
        starts = {slot: len(tokens[slot]) - 1 for slot in order}
        if turn == 3:
            append(tokens, order, step(runner, [seqs[slot].decode(starts[slot]) for slot in order]))
            continue
        rows = [
            seqs[slot].verify(
                starts[slot],
                expected[slot][starts[slot] + 1 :][: (turn + slot) % 4],
                positions=4,
                end=starts[slot] + 1 + turn,
            )
            for slot in order
        ]
        append(tokens, order, step(runner, rows))
        for slot in order:
            last = len(tokens[slot]) - 1
            assert tokens[slot] == expected[slot][: last + 1]
            held = -(-(starts[slot] + 1 + turn) // page) * page
            drafts = drafts_of(tokens[slot], held - last) if held > last else []
            assert drafts_on_device(runner, slot) == (last + 1, drafts)
            seen.add(len(drafts))
    return seen


def append(tokens: dict[int, list[int]], order: Sequence[int], found: Iterable[Any]) -> None:
    """What the rows of a step yielded."""
    for slot, result in zip(order, found, strict=True):
        tokens[slot] += tokens_of(several(result))


KINDS = {
    "greedy": GREEDY,
    "seeded": SAMPLED,
    "masked": SamplingParams(max_tokens=100, seed=4, allowed_token_ids=tuple(range(20, 50))),
    "biased until a position": SamplingParams(
        max_tokens=100,
        temperature=0.8,
        seed=8,
        min_tokens=7,
        stop_token_ids=frozenset(range(20)),
        logit_bias=((30, 3.0), (31, 3.0)),
    ),
}


@pytest.mark.parametrize("params", KINDS.values(), ids=KINDS)
def test_a_perfect_head_has_every_draft_accepted(perfect: Served, params: SamplingParams) -> None:
    """So drafts have the temperature, the truncation and the noise of their positions. Rows are
    launched before it is known where they begin."""
    assert_all_accepted(perfect.runner, params)


def assert_all_accepted(runner: Runner, params: SamplingParams) -> None:
    runner.reset()
    before = COMPILES.count
    expected = generate(runner, placed(0, params), PROMPT, 20)
    seq = placed(1, params)
    got: list[Sampled] = [certain(step(runner, [seq.chunk(PROMPT)], [seq])[0])]
    got += several(step(runner, [seq.verify(len(PROMPT), None, positions=4, end=32)])[0])
    assert len(got) == 2, "there were no drafts yet"
    in_flight = runner.launch(plan([seq.verify(len(PROMPT) + 1, None, positions=4, end=32)]))
    for _ in range(3):
        start = len(PROMPT) + len(got)
        row = seq.verify(start, None, positions=4, end=32, follows=True)
        launched = runner.launch(plan([row]))
        row_result = several(runner.collect(in_flight)[0])
        assert len(row_result) == 4
        got += row_result
        in_flight = launched
    got += several(runner.collect(in_flight)[0])
    assert len(got) == 18
    assert COMPILES.count == before, "something was compiled while serving"
    for one, other in zip(got, expected[: len(got)], strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("params", KINDS.values(), ids=KINDS)
def test_what_is_accepted_is_what_plain_decoding_yields(
    random: Served, params: SamplingParams
) -> None:
    """A head that is nearly always wrong changes nothing."""
    assert_lossless(random._replace(params=make_params(SPEC, 4)).runner, params)


def assert_lossless(runner: Runner, params: SamplingParams) -> None:
    runner.reset()
    expected = generate(runner, placed(0, params), PROMPT, 20)
    seq = placed(2, params)
    got = [certain(step(runner, [seq.chunk(PROMPT)], [seq])[0])]
    while len(got) < 14:
        start = len(PROMPT) + len(got) - 1
        got += several(step(runner, [seq.verify(start, None, positions=4, end=32)])[0])
    for one, other in zip(got, expected[: len(got)], strict=True):
        assert_same(one, other)

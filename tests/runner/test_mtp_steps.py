"""Multi-token prediction in the steps of a hybrid model: its drafts, and that no answer changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from jaxserve.api import SamplingParams
from jaxserve.models import decoder, registry
from jaxserve.models.delta_net import abstract_state
from jaxserve.models.drafts import mtp
from jaxserve.models.drafts.spec import MtpDraft
from jaxserve.models.layer import StepTokens
from jaxserve.runner.programs import RunnerConfig
from jaxserve.runner.recurrent_drafts import located
from jaxserve.runner.runner import Runner
from jaxserve.scheduler.speculation.head import HeadDrafts
from jaxserve.scheduler.verify import Verification
from jaxserve_checkpoints.load import load_params
from jaxserve_checkpoints.reader import open_checkpoint
from jaxserve_kernels.kv_format import AUTO, AttentionStep, Dense, KVFormat, named
from jaxserve_kernels.paged_attention import QueryTiles
from jaxserve_kernels.target import CPU
from tests import draft_files
from tests.draft_files import Tensors
from tests.mtp_files import mtp_passes, mtp_tensors
from tests.runner.driver import (
    GREEDY,
    OTHER,
    PROMPT,
    SAMPLED,
    Placed,
    generate,
    short,
    step,
    tokens_of,
)
from tests.runner.test_draft_steps import (
    ENCODED,
    KINDS,
    append,
    assert_all_accepted,
    assert_lossless,
    drafts_in_turns,
    pages_for,
    quiet,
)
from tests.runner.test_equivalence import Solo, Workload, check_against_solo, workloads
from tests.runner.test_recurrent_drafts import assert_bits_of_plain_decoding, compare
from tests.runner.test_recurrent_models import BLOCK, FULL, RECURRENT, STATE, hybrid
from tests.tiny_model import COMPILES, StubMetrics, make_config, make_params

SPEC = replace(hybrid(FULL, RECURRENT), tie_embeddings=False)
VOCAB, LONGEST = 90, 32
PAGES = {0: tuple(range(1, 9)), 1: (20, 11, 22, 13, 24, 15, 26, 17), 2: tuple(range(30, 38))}
BUCKETS = ((4, 4),)
INT8 = named("int8")


class Served(NamedTuple):
    runner: Runner
    config: RunnerConfig
    tensors: Tensors
    params: Any


def served(tensors: Tensors, params: Any, folder: Path, kv_format: KVFormat = AUTO) -> Served:
    body = registry.mtp_body(SPEC)
    assert body is not None
    draft = MtpDraft(body=body, num_drafts=3)
    draft_files.write(folder, {}, tensors)
    abstract = mtp.abstract(draft, jnp.float32)
    head = load_params(open_checkpoint(folder), registry.mtp_rules(SPEC), abstract)
    made = make_config(
        spec=SPEC, decode=(4,), prefill=(24,), verify=BUCKETS, num_pages=61, sampled_vocab=VOCAB
    )
    cache = replace(made.cache, **STATE, own_tokens=kv_format.own_tokens)
    config = replace(made, draft=draft, cache=cache, kv_format=kv_format)
    sink: Any = StubMetrics()
    runner = Runner(config, params, sink, head)
    runner.compile(2, lambda name, done: None)
    return Served(runner, config, tensors, params)


@pytest.fixture(
    scope="module",
    params=[AUTO, *(pytest.param(each, marks=pytest.mark.slow) for each in (ENCODED, INT8))],
    ids=lambda it: it.name,
)
def random(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    kv_format, params = request.param, make_params(SPEC, 4)
    params = params if kv_format == AUTO else quiet(params)
    with pages_for(kv_format):
        return served(mtp_tensors(SPEC), params, tmp_path_factory.mktemp("head"), kv_format)


@pytest.fixture(scope="module")
def perfect(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """A model whose scores are always the same, and a head that gives its state on: what is drawn
    follows from the noise of each position."""
    params: Any = make_params(SPEC, 4)
    state = np.asarray(params.embedding)[0]
    hidden = draft_files.rms(state, np.asarray(params.final_norm))
    layers = [
        layer._replace(down=0 * layer.down, out=layer.out if layer.out is None else 0 * layer.out)
        for layer in params.layers
    ]
    layers[1] = layers[1]._replace(delta=layers[1].delta._replace(out=0 * layers[1].delta.out))
    params = params._replace(embedding=params.embedding.at[:].set(state), layers=tuple(layers))
    tensors, embed = mtp_tensors(SPEC), SPEC.embed
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"mtp.layers.0.{name}.weight"][:] = 0
    tensors["mtp.fc.weight"] = np.eye(embed, 2 * embed, embed, dtype=np.float32)
    tensors["mtp.pre_fc_norm_hidden.weight"][:] = 0
    tensors["mtp.norm.weight"][:] = np.sqrt((hidden**2).mean()) - 1
    return served(tensors, params, tmp_path_factory.mktemp("perfect"))


def placed(slot: int, params: SamplingParams = GREEDY) -> Placed:
    return Placed(slot=slot, pages=PAGES[slot], params=params)


@jax.jit
def _states(params: decoder.Params, ids: Any) -> Any:
    """After the final norm, one chunk in one page."""
    shape = replace(make_config(spec=SPEC).kv_shapes[0], pages=2, page_size=LONGEST)
    positions, zeros = jnp.arange(LONGEST), jnp.zeros(LONGEST, jnp.int32)
    first, length, slot, position = (jnp.asarray([each]) for each in (0, LONGEST, 0, 0))
    tiles, table = QueryTiles(first, length, slot, position), jnp.asarray([[1]], jnp.int32)
    place = AttentionStep(zeros, positions, zeros + 1, positions, tiles, table)
    state = abstract_state(SPEC, jnp.float32, 2)
    empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state)
    tokens = located(StepTokens(ids, (place,)), slot, position, length)
    caches = (Dense().allocate(shape, jnp.float32), empty)
    run = partial(decoder.forward, params, caches, tokens, SPEC, tile_size=LONGEST, target=CPU)
    return decoder.finish(params, run()[0], SPEC, target=CPU)


def expected_drafts(served: Served, tokens: Sequence[int], count: int) -> list[int]:
    """What the formulas say that the head drafts greedily after the tokens."""
    padded = np.zeros(LONGEST, np.int32)
    padded[: len(tokens)] = tokens
    states = np.asarray(_states(served.params, jnp.asarray(padded)), np.float64)
    embedding, lm_head = (np.asarray(served.params[each]) for each in (0, 3))
    found: list[int] = []
    for _ in range(count):
        own = (SPEC, served.tensors, embedding, states[: len(tokens) - 1], tokens[1:], found)
        scores = mtp_passes(*own)[-1] @ lm_head.T
        found.append(int(scores[:VOCAB].argmax()))
    return found


def test_the_drafts_on_the_device_are_those_of_the_formulas(random: Served) -> None:
    """After chunks, decode steps and verify steps, with drafts accepted and rejected, for several
    sequences side by side; they end where the pages of the row's bound do."""
    runner = random.runner
    runner.reset()
    prompts = {0: PROMPT, 1: OTHER, 2: PROMPT[:5]}
    seqs = {slot: placed(slot) for slot in prompts}
    expected = {
        slot: [*prompts[slot], *tokens_of(generate(runner, seqs[slot], prompts[slot], 14))]
        for slot in seqs
    }
    runner.reset()
    tokens = {slot: [*prompt] for slot, prompt in prompts.items()}
    chunks = [seq.chunk(prompts[slot]) for slot, seq in seqs.items()]
    append(tokens, list(prompts), step(runner, chunks, seqs.values()))
    seen = drafts_in_turns(
        *(runner, seqs, tokens, expected, 4),
        lambda known, room: expected_drafts(random, known, min(room + 1, 3)),
    )
    assert len(seen) > 1 and max(seen) == 3


@pytest.mark.parametrize("params", KINDS.values(), ids=KINDS)
def test_what_is_accepted_is_what_plain_decoding_yields(
    random: Served, params: SamplingParams
) -> None:
    random.runner.use_params(make_params(SPEC, 4))
    assert_lossless(random.runner, params)
    random.runner.use_params(random.params)


@pytest.mark.slow
def test_the_state_has_the_bits_of_plain_decoding(random: Served) -> None:
    """Whoever drafts. With the emitters of the fast tests the last bit differs."""
    if not random.config.kv_format.rewrites_pages:
        pytest.skip("rows end where their page does, and the test's rows are longer")
    assert_bits_of_plain_decoding(random.runner, SAMPLED, positions=4)


def test_with_drafts_each_request_gets_the_tokens_it_would_get_alone(random: Served) -> None:
    """Drafts of other proposers, in place of the head's."""
    compare(short(random.config), random.runner, 40, BUCKETS)


@pytest.mark.slow
@pytest.mark.parametrize("params", KINDS.values(), ids=KINDS)
def test_a_perfect_head_has_every_draft_accepted(perfect: Served, params: SamplingParams) -> None:
    assert_all_accepted(perfect.runner, params)


@pytest.mark.slow
def test_with_a_head_each_request_gets_the_tokens_it_would_get_alone(random: Served) -> None:
    assert_as_alone(random, accepted=0)


@pytest.mark.slow
def test_with_a_perfect_head_each_request_gets_its_tokens(perfect: Served) -> None:
    assert_as_alone(perfect, accepted=100)


def assert_as_alone(served: Served, accepted: int) -> None:
    """With prefix hits, preemption, and rows in flight; `accepted`: the least drafts."""
    runner, config, *_ = served
    config, before = short(config), COMPILES.count
    solo = Solo(runner, config)
    counts = dict.fromkeys(("accepted", "ahead", "hits", "preemptions"), 0)

    @settings(derandomize=True, max_examples=60, suppress_health_check=list(HealthCheck))
    @given(work=workloads())
    def check(work: Workload) -> None:
        seqs, head = config.scheduler.max_num_seqs, HeadDrafts(drafts=3)
        tokens = max(work.config.max_num_batched_tokens, seqs - 1 + BLOCK)
        pages = work.cache.num_pages + 6
        work = work._replace(
            config=replace(work.config, max_num_seqs=seqs, max_num_batched_tokens=tokens),
            cache=replace(config.cache, num_pages=pages),
        )
        asked = Verification(proposer=head, buckets=BUCKETS, observe=head.observe, room=2)
        loop = check_against_solo(work, runner, solo, verification=asked)
        counts["accepted"] += loop.accepted
        counts["ahead"] += loop.rows_ahead
        counts["hits"] += loop.hit_tokens
        counts["preemptions"] += loop.scheduler.num_preemptions

    check()
    assert COMPILES.count == before, "something was compiled while serving"
    assert counts["ahead"] > 20 and counts["hits"] > 20 and counts["preemptions"] > 0, counts
    assert counts["accepted"] > accepted, counts

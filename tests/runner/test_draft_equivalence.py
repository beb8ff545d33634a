"""With a draft head each request gets the tokens that it would get alone without drafts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.models.drafts.loading import open_draft
from jaxserve.models.drafts.spec import DraftSpec, ModelDraft
from jaxserve.runner.programs import RunnerConfig
from jaxserve.runner.runner import Runner
from jaxserve.scheduler.speculation.head import HeadDrafts
from jaxserve.scheduler.verify import Verification
from jaxserve_kernels.kv_format import AUTO
from tests import draft_files
from tests.draft_files import Tensors, block_tensors, eagle3_tensors
from tests.runner.driver import TOLERANCE
from tests.runner.test_draft_steps import ENCODED, OTHER_FORMATS, SPEC, pages_for
from tests.runner.test_equivalence import Solo, Workload, check_against_solo, play, workloads
from tests.runner.test_kv_formats import MOST_DIFFERENT, count_different
from tests.tiny_model import COMPILES, StubMetrics, make_config, make_params

BUCKETS = ((4, 4), (1, 8))


class Served(NamedTuple):
    config: RunnerConfig
    runner: Runner
    solo: Solo


def trusting(folder: Path) -> tuple[Any, DraftSpec, Any]:
    """What follows a token depends mostly on that token, which is what the Markov head knows: so
    drafts are sometimes right. Returns the target's weights, and the head with its own."""
    params: Any = make_params(SPEC, 2)
    layers = [layer._replace(out=0.2 * layer.out, down=0.2 * layer.down) for layer in params.layers]
    params = params._replace(layers=tuple(layers))
    states = draft_files.rms(np.asarray(params.embedding), np.asarray(params.final_norm))
    config = draft_files.dspark(SPEC, block=7, taps=(0, 1, 2), rank=SPEC.embed, layers=1)
    tensors = block_tensors(config)
    tensors |= {
        "norm.weight": 0.1 * tensors["norm.weight"],
        "markov_head.markov_w1.weight": states.astype(np.float32),
        "markov_head.markov_w2.weight": np.asarray(params.lm_head),
    }
    return params, *opened(folder, config, tensors)


def alike(folder: Path) -> tuple[Any, DraftSpec, Any]:
    """All tokens have nearly one embedding, and an EAGLE-3 head takes a state for that of the token
    after it, of those that it knows."""
    params: Any = make_params(SPEC, 2)
    layers = [layer._replace(out=0.3 * layer.out, down=0.3 * layer.down) for layer in params.layers]
    embedding = 0.3 * params.embedding + params.embedding[:1]
    params = params._replace(layers=tuple(layers), embedding=embedding)
    settings = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    config = draft_files.eagle3(SPEC, vocab=80) | {"eagle_config": settings}
    tensors = eagle3_tensors(config)
    fc = np.concatenate([np.zeros((SPEC.embed, 2 * SPEC.embed)), np.eye(SPEC.embed)], axis=1)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"midlayer.{name}.weight"] *= 0.1
    tensors |= {
        "fc.weight": fc.astype(np.float32),
        "norm.weight": np.asarray(params.final_norm),
        "lm_head.weight": np.asarray(params.lm_head)[tensors["t2d"]],
    }
    return params, *opened(folder, config, tensors)


def weaker(folder: Path) -> tuple[Any, DraftSpec, Any]:
    """A draft model whose layers add less than those of the target."""
    params: Any = make_params(SPEC, 2)
    layers = [layer._replace(out=0.5 * layer.out, down=0.5 * layer.down) for layer in params.layers]
    own = params._replace(layers=tuple(layers))
    return params, ModelDraft(body=SPEC, num_drafts=7), own


def opened(folder: Path, config: Any, tensors: Tensors) -> tuple[DraftSpec, Any]:
    """A head and its weights."""
    found = open_draft(draft_files.write(folder, config, tensors), SPEC, jnp.float32)
    return found.spec, found.load()


HEADS = {"dspark": trusting, "eagle3": alike, "model": weaker}


@pytest.fixture(
    scope="module",
    params=[
        ("dspark", AUTO),  # `test_eagle3_steps` plays workloads with EAGLE-3's head
        *(
            pytest.param((name, kv_format), marks=pytest.mark.slow)
            for name in HEADS
            for kv_format in (AUTO, ENCODED, *OTHER_FORMATS)
            if (name, kv_format) != ("dspark", AUTO)
        ),
    ],
    ids=lambda it: f"{it[0]}, {it[1].name}",
)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    name, kv_format = request.param
    params, draft, head = HEADS[name](tmp_path_factory.mktemp("head"))
    runner_config = replace(
        make_config(
            spec=SPEC, decode=(4,), prefill=(24,), verify=BUCKETS, max_model_len=24, num_pages=61
        ),
        draft=draft,
        kv_format=kv_format,
    )
    sink: Any = StubMetrics()
    with pages_for(kv_format):
        runner = Runner(runner_config, params, sink, head)
        runner.compile(2, lambda name, done: None)
    before = COMPILES.count
    yield Served(runner_config, runner, Solo(runner, runner_config))
    assert COMPILES.count == before, "something was compiled while serving"


@st.composite
def roomy(draw: st.DrawFn) -> Workload:
    """As many requests as slots, mostly, and pages for drafts."""
    work = draw(workloads())
    most = draw(st.sampled_from([work.config.max_num_seqs] * 3 + [8]))
    cache = replace(work.cache, num_pages=work.cache.num_pages + draw(st.sampled_from([0, 6, 16])))
    limits = replace(work.config, max_num_batched_tokens=24)
    return Workload(limits, cache, work.arrivals[:most], work.ahead)


def compare(served: Served, examples: int) -> None:
    """With joins, leaves, aborts, chunks, preemptions and prefix hits in scarce pools, and with
    drafts that are accepted and rejected."""
    config, runner, solo = served
    most = max(positions for _, positions in config.buckets.verify) - 1
    accepted: list[int] = []
    counts: Counter[int] = Counter()
    seen: Counter[str] = Counter()

    @settings(derandomize=True, max_examples=examples, suppress_health_check=[HealthCheck.too_slow])
    @given(work=roomy(), room=st.sampled_from([0, most]))
    def check(work: Workload, room: int) -> None:
        head = HeadDrafts(drafts=most)
        verification = Verification(
            proposer=head, buckets=config.buckets.verify, observe=head.observe, room=room
        )
        work = work._replace(cache=replace(work.cache, own_tokens=config.kv_format.own_tokens))
        if config.kv_format.quantized:
            loop = play(work, runner, verification)
            seen["different"] += count_different(work, loop, solo)
        else:
            loop = check_against_solo(work, runner, solo, TOLERANCE, verification)
        accepted.append(loop.accepted)
        counts.update(loop.accepted_of_rows)
        seen["requests"] += len(work.arrivals)
        seen["ahead"] += loop.rows_ahead
        seen["hits"] += loop.hit_tokens
        seen["preemptions"] += loop.scheduler.num_preemptions

    check()
    assert sum(accepted) > examples, "drafts were hardly ever right"
    assert seen["ahead"] > examples // 5 and seen["hits"] and seen["preemptions"], seen
    assert seen["different"] <= MOST_DIFFERENT * seen["requests"], seen
    if examples > 100:
        page, most_accepted = config.cache.page_size, max(counts)
        if config.kv_format.rewrites_pages:  # seven right ones are too rare to ask for
            assert most_accepted >= page, f"no row went on behind its page: {counts}"
        else:
            assert most_accepted == page - 1, f"some counts did not occur: {counts}"
        assert len(counts) > 3, f"some counts did not occur: {counts}"


def test_each_request_gets_the_tokens_it_would_get_alone(served: Served) -> None:
    compare(served, examples=40)


@pytest.mark.slow
def test_each_request_gets_its_tokens_in_many_workloads(served: Served) -> None:
    compare(served, examples=600)

"""With a draft head each request gets the tokens that it would get alone without drafts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.models.drafts.loading import open_draft
from jaxserve.runner.programs import RunnerConfig
from jaxserve.runner.runner import Runner
from jaxserve.scheduler.speculation.head import HeadDrafts
from jaxserve.scheduler.verify import Verification
from tests import draft_files
from tests.draft_files import Tensors, block_tensors, eagle3_tensors
from tests.runner.driver import TOLERANCE
from tests.runner.test_equivalence import Solo, Workload, check_against_solo, workloads
from tests.tiny_model import COMPILES, StubMetrics, make_config, make_params, tiny_spec

SPEC = tiny_spec(num_layers=4, tie_embeddings=False)
BUCKETS = ((4, 4), (1, 8))


class Served(NamedTuple):
    config: RunnerConfig
    runner: Runner
    solo: Solo


def trusting() -> tuple[Any, Any, Tensors]:
    """What follows a token depends mostly on that token, which is what the Markov head knows: so
    drafts are sometimes right. Returns the target's weights, config.json and tensors."""
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
    return params, config, tensors


def alike() -> tuple[Any, Any, Tensors]:
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
    return params, config, tensors


HEADS = {"dspark": trusting, "eagle3": alike}


@pytest.fixture(scope="module", params=["dspark", pytest.param("eagle3", marks=pytest.mark.slow)])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    params, config, tensors = HEADS[request.param]()
    folder = draft_files.write(tmp_path_factory.mktemp("head"), config, tensors)
    opened = open_draft(folder, SPEC, jnp.float32)
    runner_config = replace(
        make_config(
            spec=SPEC, decode=(4,), prefill=(24,), verify=BUCKETS, max_model_len=24, num_pages=61
        ),
        draft=opened.spec,
    )
    head: Any = opened.load()
    sink: Any = StubMetrics()
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
    accepted: list[int] = []
    counts: Counter[int] = Counter()
    ahead: list[int] = []

    @settings(derandomize=True, max_examples=examples, suppress_health_check=[HealthCheck.too_slow])
    @given(work=roomy(), room=st.sampled_from([0, 7]))
    def check(work: Workload, room: int) -> None:
        head = HeadDrafts(drafts=7)
        verification = Verification(proposer=head, buckets=BUCKETS, observe=head.observe, room=room)
        loop = check_against_solo(work, served.runner, served.solo, TOLERANCE, verification)
        accepted.append(loop.accepted)
        counts.update(loop.accepted_of_rows)
        ahead.append(loop.rows_ahead)

    check()
    assert sum(accepted) > examples, "drafts were hardly ever right"
    assert sum(ahead) > examples // 5
    if examples > 100:
        assert all(counts[number] for number in range(8)), f"some counts did not occur: {counts}"


def test_each_request_gets_the_tokens_it_would_get_alone(served: Served) -> None:
    compare(served, examples=40)


@pytest.mark.slow
def test_each_request_gets_its_tokens_in_many_workloads(served: Served) -> None:
    compare(served, examples=600)

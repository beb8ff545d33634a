"""An EAGLE-3 head in the steps: its drafts, what it knows of a shared prefix, and that no answer
changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.api import SamplingParams
from jaxserve.runner.runner import Runner
from jaxserve_kernels.kv_format import AUTO
from tests import draft_files
from tests.draft_files import Tensors, eagle3_passes, eagle3_tensors
from tests.runner import test_draft_equivalence as equivalence
from tests.runner.driver import PROMPT, Placed, short, step, tokens_of
from tests.runner.test_draft_steps import (
    ENCODED,
    KINDS,
    OTHER_FORMATS,
    PAGES,
    SPEC,
    VOCAB,
    Served,
    assert_all_accepted,
    assert_drafts,
    assert_lossless,
    drafts_on_device,
    pages_for,
    quiet,
    served,
    taps_of,
)
from tests.runner.test_equivalence import Solo
from tests.tiny_model import COMPILES, make_params

PAGE = 4
TAPS = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
"""All that a target of four layers has, whose last one no head reads."""


@pytest.fixture(
    scope="module",
    params=[
        *(AUTO, ENCODED),
        *(pytest.param(each, marks=pytest.mark.slow) for each in OTHER_FORMATS),
    ],
    ids=lambda it: it.name,
)
def random(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """With a vocabulary of its own."""
    kv_format, params = request.param, make_params(SPEC, 4)
    params = params if kv_format == AUTO else quiet(params)
    config = draft_files.eagle3(SPEC, vocab=80) | {"eagle_config": TAPS}
    folder = tmp_path_factory.mktemp("head")
    with pages_for(kv_format):
        yield served(config, eagle3_tensors(config), params, folder, kv_format)


@pytest.fixture(scope="module")
def perfect(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """A target whose scores are always the same, and a head that knows them: what is drawn follows
    from the noise of each position."""
    config = draft_files.speculators(SPEC, norm_before_residual=False, **TAPS)
    tensors = eagle3_tensors(config)
    params: Any = make_params(SPEC, 4)
    state = np.asarray(params.embedding)[0]
    hidden = draft_files.rms(state, np.asarray(params.final_norm))
    lm_head = np.array(params.lm_head)
    lm_head[~tensors["t2d"]] = -hidden  # tokens that the head does not know are never drawn
    layers = [layer._replace(out=0 * layer.out, down=0 * layer.down) for layer in params.layers]
    params = params._replace(
        embedding=params.embedding.at[:].set(state), lm_head=lm_head, layers=tuple(layers)
    )
    nothing = {
        name: np.zeros_like(tensors[name])
        for name in ("layers.0.self_attn.o_proj.weight", "layers.0.mlp.down_proj.weight")
    }
    fc = np.concatenate([np.eye(SPEC.embed), np.zeros((SPEC.embed, 2 * SPEC.embed))], axis=1)
    tensors |= nothing | {
        "fc.weight": fc.astype(np.float32),
        "norm.weight": np.asarray(params.final_norm),
        "lm_head.weight": lm_head[tensors["t2d"]],
    }
    return served(config, tensors, params, tmp_path_factory.mktemp("perfect"))


def expected_drafts(
    served: Served, tokens: Sequence[int], count: int, after: Mapping[int, int] | None = None
) -> list[int]:
    """What the formulas say that the head drafts greedily after the tokens.

    Args:
      after: the token after a position, where the head has another than that of `tokens`.
    """
    tensors: Tensors = served.tensors
    ids = [*tokens[1:]]
    for position, token in (after or {}).items():
        ids[position] = token
    taps = taps_of(served, tokens[:-1]).astype(np.float64)
    embedding: Any = np.asarray(served.params.embedding)
    listed = np.arange(served.draft.body.vocab_size) + tensors["d2t"]
    found: list[int] = []
    for _ in range(count):
        scores = eagle3_passes(served.config, tensors, embedding, taps, ids, found)[-1]
        found.append(int(listed[np.where(listed < VOCAB, scores, -np.inf).argmax()]))
    return found


def test_the_drafts_on_the_device_are_those_of_the_formulas(random: Served) -> None:
    """They end where the pages of the row's bound do."""
    assert_drafts(
        random.runner, lambda known, room: expected_drafts(random, known, min(room + 1, 3))
    )


@pytest.mark.parametrize("shared", [1, 2])
@pytest.mark.parametrize("goes_on_alike", [True, False])
def test_behind_a_cached_prefix_the_head_knows_all_of_it(
    random: Served, shared: int, goes_on_alike: bool
) -> None:
    """But for the token after it, where the last entry has that of who computed it. The pages stay
    as they are, although the slot has the state of another sequence's token there."""
    runner = random.runner
    runner.reset()
    first = Placed(slot=0, pages=PAGES[0])
    length = shared * PAGE
    prefix = PROMPT[: length + 1]
    step(runner, [first.chunk(prefix)], [first])
    stranger = Placed(slot=1, pages=PAGES[1])
    step(runner, [stranger.chunk((9, 61) * (length // 2))], [stranger])
    pages = PAGES[0][:shared]
    before = cached(runner, pages)
    second = Placed(slot=1, pages=(*pages, *PAGES[2]))
    tail = (prefix[length] if goes_on_alike else 77, 30, 31)
    tokens = [*prefix[:length], *tail]
    tokens += tokens_of(step(runner, [second.chunk(tail, length)], [second]))
    tokens += tokens_of(step(runner, [second.verify(len(tokens) - 1, None, positions=4)]))
    np.testing.assert_array_equal(cached(runner, pages), before)
    drafts = expected_drafts(random, tokens, 3, {length - 1: prefix[length]})
    assert drafts_on_device(runner, 1) == (len(tokens), drafts)


def cached(runner: Runner, pages: Sequence[int]) -> Any:
    state: Any = runner._state  # pyright: ignore[reportPrivateUsage]
    return np.asarray(state.draft_kv)[:, list(pages)]


@pytest.mark.slow
@pytest.mark.parametrize("params", KINDS.values(), ids=KINDS)
def test_a_perfect_head_has_every_draft_accepted(perfect: Served, params: SamplingParams) -> None:
    """Ids of its own vocabulary become the target's before noise is added."""
    assert_all_accepted(perfect.runner, params)


@pytest.mark.parametrize("params", KINDS.values(), ids=KINDS)
def test_what_is_accepted_is_what_plain_decoding_yields(
    random: Served, params: SamplingParams
) -> None:
    assert_lossless(random._replace(params=make_params(SPEC, 4)).runner, params)


def test_each_request_gets_the_tokens_it_would_get_alone(random: Served, tmp_path: Path) -> None:
    """With drafts that are sometimes right."""
    params, draft, head = equivalence.alike(tmp_path)
    assert draft == random.draft, "it has the compiled steps"
    config, runner = short(random.settings), random._replace(params=params, head=head).runner
    before = COMPILES.count
    equivalence.compare(equivalence.Served(config, runner, Solo(runner, config)), examples=40)
    assert COMPILES.count == before, "something was compiled while serving"

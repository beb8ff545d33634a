"""A server with an EAGLE-3 head of random weights answers as one without."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve.models.registry import spec_of
from jaxserve_checkpoints.resolve import EMBEDDED_NAME, resolve_model
from tests import draft_files
from tests.e2e.process import Server
from tests.e2e.test_draft_head import SAMPLING, answers
from tests.e2e.test_speculation import assert_same

pytestmark = pytest.mark.slow

LONG_TEXT = "".join(f"On day {n} the ship carried {n * 7} crates of tea.\n" for n in range(20))
"""Of more than two pages."""


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = resolve_model(EMBEDDED_NAME, tokenizer=False)
    target = spec_of(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    taps = {"eagle_aux_hidden_state_layer_ids": [1, 2, target.num_layers - 1]}
    config = draft_files.eagle3(target, vocab=target.vocab_size // 2) | {"eagle_config": taps}
    tensors = draft_files.eagle3_tensors(config)
    return draft_files.write(tmp_path_factory.mktemp("head"), config, tensors)


@pytest.fixture(scope="module")
def drafting(head: Path) -> Iterator[Server]:
    chosen = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    with Server("--speculative-config", json.dumps(chosen)) as running:
        yield running


@pytest.mark.parametrize("name", SAMPLING)
async def test_answers_are_those_without_a_head(
    server: Server, drafting: Server, name: str
) -> None:
    """Twice, so that prompts are found in the prefix cache."""
    expected = await answers(server, SAMPLING[name])
    for _ in range(2):
        for answer, other in zip(await answers(drafting, SAMPLING[name]), expected, strict=True):
            assert_same(answer, dict(other, choices=[dict(each) for each in other["choices"]]))


@pytest.fixture(scope="module")
def encoded(head: Path) -> Iterator[tuple[Server, Server]]:
    """A server with KVarN without a head, and one with."""
    flags = ("--kv-cache-dtype", "kvarn_k4v4_g128")
    chosen = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    with (
        Server(*flags) as plain,
        Server(*flags, "--speculative-config", json.dumps(chosen)) as drafting,
    ):
        yield plain, drafting


@pytest.mark.slow  # it compiles two servers; `test_eagle3_steps` asks the same of runners
@pytest.mark.parametrize("name", ["greedy", "seeded"])
async def test_answers_are_those_without_a_head_where_pages_are_encoded(
    encoded: tuple[Server, Server], name: str
) -> None:
    """Of prompts of several pages, which are found in the prefix cache the second time."""
    plain, drafting = encoded
    expected = await answers(plain, SAMPLING[name], LONG_TEXT)
    for _ in range(2):
        found = await answers(drafting, SAMPLING[name], LONG_TEXT)
        for answer, other in zip(found, expected, strict=True):
            assert_same(answer, dict(other, choices=[dict(each) for each in other["choices"]]))
    assert await drafting.metric("vllm:prefix_cache_hits_total") > 0
    assert await drafting.metric("vllm:spec_decode_num_draft_tokens_total") > 0
    assert await drafting.metric('jaxserve_compiles_total{phase="serving"}') == 0


async def test_drafts_were_verified(drafting: Server) -> None:
    await answers(drafting, {"temperature": 0})
    assert await drafting.metric("vllm:spec_decode_num_draft_tokens_total") > 0
    assert await drafting.metric('jaxserve_compiles_total{phase="serving"}') == 0

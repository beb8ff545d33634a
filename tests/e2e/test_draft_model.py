"""A server whose model drafts for itself answers as one that does not draft."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from jaxserve_checkpoints.resolve import EMBEDDED_NAME
from tests.e2e.process import Server
from tests.e2e.test_draft_head import SAMPLING, answers
from tests.e2e.test_speculation import assert_same

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def drafting() -> Iterator[Server]:
    chosen = {"method": "draft_model", "model": EMBEDDED_NAME, "num_speculative_tokens": 3}
    with Server("--speculative-config", json.dumps(chosen)) as running:
        yield running


@pytest.mark.parametrize("name", SAMPLING)
async def test_answers_are_those_without_drafts(
    server: Server, drafting: Server, name: str
) -> None:
    expected = await answers(server, SAMPLING[name])
    for answer, other in zip(await answers(drafting, SAMPLING[name]), expected, strict=True):
        assert_same(answer, other)


async def test_its_drafts_are_accepted(drafting: Server) -> None:
    """But for those that a stop or a limit cuts off."""
    await answers(drafting, {"temperature": 0})
    names = ("draft_tokens", "accepted_tokens")
    drafts, accepted = [
        await drafting.metric(f"vllm:spec_decode_num_{name}_total") for name in names
    ]
    assert accepted > 0.8 * drafts > 0
    assert await drafting.metric('jaxserve_compiles_total{phase="serving"}') == 0

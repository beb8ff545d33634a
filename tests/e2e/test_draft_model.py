"""A server with its own model as draft model answers as one without."""

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


async def test_nothing_is_compiled_while_serving(drafting: Server) -> None:
    """Whether drafts are verified is up to the times of steps: here a draft costs a whole step."""
    await answers(drafting, {"temperature": 0})
    assert await drafting.metric('jaxserve_compiles_total{phase="serving"}') == 0

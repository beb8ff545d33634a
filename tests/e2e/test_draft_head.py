"""A server with a draft head, trained for the embedded model as the test begins, answers as one
without, and takes fewer steps."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.process import ROOT, Server
from tests.e2e.test_speculation import assert_same

pytestmark = pytest.mark.slow

QUESTIONS = (
    "What is the capital of France?",
    "Sort these words: pear, apple, fig, cherry",
    'Repeat exactly: "amber 41 Lisbon grape"',
    "Spell the word banana letter by letter.",
    "What is 37 + 45?",
    "Who are you?",
)
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"seed": 5, "temperature": 0.8, "top_p": 0.95},
    "penalised": {"temperature": 0, "frequency_penalty": 0.2},
    "logprobs": {"temperature": 0, "logprobs": 2},
    "choices": {"seed": 8, "temperature": 1.0, "n": 2},
}


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained in two minutes."""
    folder = tmp_path_factory.mktemp("draft_head")
    flags = ("--out", str(folder), "--steps", "320", "--rows", "256")
    command = [sys.executable, "-m", "lab.embedded.draft_head", *flags]
    environment = {**os.environ, "JAX_NUMPY_DTYPE_PROMOTION": "standard"}  # optax needs it
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=900)
    return folder


@pytest.fixture(scope="module")
def drafting(head: Path) -> Iterator[Server]:
    chosen = {"method": "dspark", "model": str(head), "num_speculative_tokens": 7}
    with Server("--speculative-config", json.dumps(chosen)) as running:
        yield running


async def answers(
    server: Server, sampling: dict[str, Any], before: str = ""
) -> list[dict[str, Any]]:
    """What each question gets, with a text before it; all are sent at once."""

    async def ask(session: aiohttp.ClientSession, question: str) -> dict[str, Any]:
        prompt = f"<|im_start|>user\n{before}{question}<|im_end|>\n<|im_start|>assistant\n"
        body = {"model": "jaxserve-embedded", "prompt": prompt, "max_tokens": 60, **sampling}
        async with session.post(f"{server.url}/v1/completions", json=body) as reply:
            answer = await reply.json()
            assert reply.status == 200, answer
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        return {"choices": choices, "usage": answer["usage"]["completion_tokens"]}

    async with aiohttp.ClientSession() as session:
        return await asyncio.gather(*(ask(session, question) for question in QUESTIONS))


@pytest.mark.parametrize("name", SAMPLING)
async def test_answers_are_those_without_a_head(
    server: Server, drafting: Server, name: str
) -> None:
    expected = await answers(server, SAMPLING[name])
    for answer, other in zip(await answers(drafting, SAMPLING[name]), expected, strict=True):
        assert_same(answer, other)


async def test_a_trained_head_is_often_right(drafting: Server) -> None:
    """Of one stream, in which the times of a CPU's steps decide as well."""
    names = ("drafts", "draft_tokens", "accepted_tokens")

    async def counts() -> list[float]:
        return [await drafting.metric(f"vllm:spec_decode_num_{name}_total") for name in names]

    before = await counts()
    await answers(drafting, {"temperature": 0})
    rows, drafts, accepted = (now - old for now, old in zip(await counts(), before, strict=True))
    assert rows > 0 and accepted > 0.1 * drafts
    assert await drafting.metric('jaxserve_compiles_total{phase="serving"}') == 0


def test_a_model_of_other_tokens_is_refused_in_one_line(head: Path) -> None:
    from tests.e2e.process import start

    chosen = {"method": "eagle3", "model": str(ROOT / "tests/golden/tied")}
    process = start("--speculative-config", json.dumps(chosen))
    output, _ = process.communicate(timeout=120)
    assert process.returncode != 0 and "Traceback" not in output
    assert "a draft model needs the same vocabulary" in output

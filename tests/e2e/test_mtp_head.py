"""A server of a hybrid model drafts with the model's own weights, or looks drafts up, and answers
as one that does not."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.models.registry import spec_of
from tests.e2e import family_models
from tests.e2e.believed_times import believe_that_drafts_pay
from tests.e2e.process import Server
from tests.mtp_files import mtp_tensors

pytestmark = pytest.mark.slow

FLAGS = ("--max-model-len", "192", "--kv-cache-memory-bytes", "4Mi", "--max-num-seqs", "4")
BUCKETS = ("--decode-buckets", "4", "--prefill-buckets", "72", "--max-num-batched-tokens", "72")
SAMPLING = ({"temperature": 0}, {"temperature": 0.9, "seed": 3})
METHODS = {
    "ngram": '{"method": "ngram", "num_speculative_tokens": 1}',
    "mtp": '{"method": "qwen3_5_mtp", "num_speculative_tokens": 1}',
}


def written(folder: Path, architecture: str) -> Path:
    model = family_models.write(folder / "model", architecture)
    spec = spec_of(json.loads((model / "config.json").read_text()))
    file = model / "model.safetensors"
    save_file(load_file(file) | mtp_tensors(spec), file)
    return model


async def answers(server: Server, model: Path) -> list[str]:
    """Three at once, and one again, which finds its prompt cached. Only two tokens are allowed:
    what is looked up is often right."""

    async def ask(session: aiohttp.ClientSession, last: int, sampling: dict[str, Any]) -> str:
        body = {
            "model": str(model),
            "prompt": f"{'one two three four ' * 8}{last}",
            "max_tokens": 40,
            "ignore_eos": True,
            "allowed_token_ids": [40, 41],
            **sampling,
        }
        async with session.post(f"{server.url}/v1/completions", json=body) as reply:
            answer = await reply.json()
            assert reply.status == 200, answer
        return answer["choices"][0]["text"]

    async with aiohttp.ClientSession() as session:
        found: list[str] = []
        for sampling in SAMPLING:
            found += await asyncio.gather(*(ask(session, each, sampling) for each in range(3)))
        return [*found, await ask(session, 2, SAMPLING[0])]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "architecture", ["Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"]
)
async def test_answers_are_those_without_drafts(architecture: str, tmp_path: Path) -> None:
    model = written(tmp_path, architecture)
    flags = ("--model", str(model), "--cache-dir", str(tmp_path / "cache"), *FLAGS, *BUCKETS)
    with Server(*flags, "--speculative-config", "off") as server:
        expected = await answers(server, model)
    assert expected[-1] == expected[2]
    for method, chosen in METHODS.items():
        drafting = (*flags, "--speculative-config", chosen)
        with Server(*drafting):
            pass  # compiles its programs, and measures their times
        believe_that_drafts_pay(tmp_path / "cache")
        with Server(*drafting) as server:
            assert await answers(server, model) == expected, method
            assert await server.metric("vllm:spec_decode_num_accepted_tokens_total") > 0, method
            assert await server.metric('jaxserve_compiles_total{phase="serving"}') == 0

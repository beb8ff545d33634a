"""A real process answers chats with a checkpoint of each family: from files to text over HTTP."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from tests.e2e import family_models
from tests.e2e.process import Server
from tests.fast_compiles import FAST_COMPILES

FLAGS = ("--max-model-len", "192", "--kv-cache-memory-bytes", "4Mi")
MESSAGES = [{"role": "user", "content": "the quick brown fox jumps over the lazy dog " * 4}]
REQUEST = {
    "messages": MESSAGES,
    "max_tokens": 16,
    "temperature": 0,
    "logprobs": True,
    "ignore_eos": True,
}


ALIKE = (
    *("LlamaForCausalLM", "Qwen2ForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM"),
    "Qwen3_5MoeForConditionalGeneration",
)
"""Families that differ from others in what the goldens test; Qwen3's is the embedded model's."""


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in ALIKE else name
        for name in family_models.CONFIGS
    ],
)
async def test_a_checkpoint_of_each_family_answers_chats(architecture: str, tmp_path: Path) -> None:
    model = family_models.write(tmp_path / architecture, architecture)
    cache = ("--cache-dir", str(tmp_path / "cache"))
    fast = {"XLA_FLAGS": FAST_COMPILES}
    with Server("--model", str(model), *cache, *FLAGS, environment=fast) as server:
        async with aiohttp.ClientSession(server.url, raise_for_status=True) as session:
            replies = []
            for _ in range(2):
                async with session.post("/v1/chat/completions", json=REQUEST) as answer:
                    replies.append(await answer.json())
            async with session.post("/tokenize", json={"messages": MESSAGES}) as answer:
                prompt = await answer.json()
        compiled = await server.metric('jaxserve_compiles_total{phase="serving"}')
    usages = [reply["usage"] for reply in replies]
    assert [usage["completion_tokens"] for usage in usages] == [16, 16]
    assert [usage["prompt_tokens"] for usage in usages] == [prompt["count"]] * 2
    assert usages[1]["prompt_tokens_details"]["cached_tokens"] >= 16
    first, second = (reply["choices"][0]["logprobs"]["content"] for reply in replies)
    assert len(first) == 16
    tokens = [[each["bytes"] for each in content] for content in (first, second)]
    assert tokens[0] == tokens[1], "the prefix cache changes no answer"
    assert compiled == 0

"""A server whose memory holds less than the model's context says so, and serves what it holds."""

from __future__ import annotations

import openai
import pytest

from tests.e2e.process import Server


@pytest.mark.slow  # compiles all programs
def test_a_server_tells_the_context_that_fits() -> None:
    with Server("--kv-cache-memory-bytes", "16Mi") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        (model,) = client.models.list()
        context = model.model_dump()["max_model_len"]
        assert 512 < context < 4096
        prompt = [1] * (context - 1)
        reply = client.completions.create(model=model.id, prompt=prompt, max_tokens=9)
        assert reply.usage and reply.usage.total_tokens == context
        with pytest.raises(openai.BadRequestError, match=f"maximum context length is {context}"):
            client.completions.create(model=model.id, prompt=[*prompt, 1])

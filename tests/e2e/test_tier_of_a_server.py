"""A server with a tier below its KV cache: prompts come back from host memory, and after a restart
from disk, and their answers stay as they were."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import openai
import pytest

from tests.e2e.process import Server

SMALL = (
    *("--kv-cache-memory-bytes", "6M", "--max-num-seqs", "4", "--max-model-len", "512"),
    *("--prefill-buckets", "64,256", "--decode-buckets", "4"),
)


def answers(server: Server, prompts: list[list[int]]) -> list[str]:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    (model,) = client.models.list()
    replies = (
        client.completions.create(model=model.id, prompt=prompt, max_tokens=8, temperature=0)
        for prompt in prompts
    )
    return [reply.choices[0].text for reply in replies]


def metric(server: Server, name: str) -> float:
    return asyncio.run(server.metric(name))


@pytest.mark.slow  # three starts
def test_prompts_come_back_from_memory_and_after_a_restart_from_disk(tmp_path: Path) -> None:
    chosen = random.Random(0)
    prompts = [[chosen.randrange(1, 200) for _ in range(300)] for _ in range(8)]
    with Server(*SMALL) as server:
        cold = answers(server, prompts)
    tier = ("--kv-offload-size", "64Mi", "--kv-offload-path", str(tmp_path), "--kv-offload-verify")
    with Server(*SMALL, *tier) as server:
        assert answers(server, prompts) == cold
        assert answers(server, prompts) == cold
        hits = metric(server, "vllm:external_prefix_cache_hits_total")
        assert hits > 8 * 200, "most tokens were found below the device"
        assert metric(server, "jaxserve_kv_offload_checksum_failures_total") == 0
        assert metric(server, "jaxserve_kv_offload_disk_write_bytes_total") > 0
    with Server(*SMALL, *tier) as server:
        assert answers(server, prompts) == cold
        assert metric(server, "jaxserve_kv_offload_disk_read_bytes_total") > 0

"""A real server whose weights change: from files, through HTTP, to other answers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.commands.convert import convert
from jaxserve.weights.text_files import copy_text_files
from jaxserve_checkpoints.resolve import embedded_model
from tests.e2e.process import Server
from tests.weights.test_formats import converting

FLAGS = ("--max-model-len", "256", "--kv-cache-memory-bytes", "8Mi", "--admin-api-key", "root")
ADMIN = {"Authorization": "Bearer root"}
PROMPTS = ["What is 12 + 30?", "Repeat: apple pear plum", "Who are you?", "Count to five."]


def other_weights(folder: Path) -> Path:
    """The embedded model with as much noise: it answers something else."""
    copy_text_files(embedded_model(), folder)
    rng = np.random.default_rng(0)
    tensors = {
        name: (array.astype(np.float32) * (1 + 1.0 * rng.normal(size=array.shape))).astype(
            array.dtype
        )
        for name, array in load_file(embedded_model() / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


async def ask(session: aiohttp.ClientSession, prompt: str) -> tuple[str, str]:
    """Returns the version of the weights, and the answer."""
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
    }
    async with session.post("/v1/chat/completions", json=body) as reply:
        version = reply.headers["x-jaxserve-weights"]
        return version, (await reply.json())["choices"][0]["message"]["content"]


async def change(session: aiohttp.ClientSession, model: Path, **fields: Any) -> dict[str, Any]:
    body = {"model": str(model), **fields}
    async with session.post("/v1/weights", json=body, headers=ADMIN) as reply:
        return await reply.json()


@pytest.mark.slow
async def test_weights_change_from_files_of_every_format(tmp_path: Path) -> None:
    other = other_weights(tmp_path / "other")
    assert convert(converting(other, tmp_path / "orbax", "--to", "orbax")) == 0
    assert convert(converting(other, tmp_path / "native")) == 0
    damaged = other_weights(tmp_path / "damaged") / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    with Server("--cache-dir", str(tmp_path / "cache"), *FLAGS) as server:
        async with aiohttp.ClientSession(server.url) as session:
            first = [(await ask(session, prompt))[1] for prompt in PROMPTS]
            answers: list[tuple[int, tuple[str, str]]] = []
            going = True

            async def client(index: int) -> None:
                while going:
                    answers.append((index, await ask(session, PROMPTS[index])))

            clients = [asyncio.create_task(client(index)) for index in range(len(PROMPTS))]
            ways = [
                (other, {}),
                (embedded_model(), {"in_place": True}),
                (tmp_path / "orbax", {"step": 0}),
                (embedded_model(), {}),
                (tmp_path / "native", {"in_place": True}),
            ]
            for version, (model, fields) in enumerate(ways, start=1):
                changed = await change(session, model, **fields)
                assert changed["version"] == version and changed["gap_seconds"] < 5
                await asyncio.sleep(0.3)
                for wrong in (damaged.parent, tmp_path / "none"):
                    refused = (await change(session, wrong))["error"]
                    assert refused["code"] == "weights_refused", refused
                    assert "\n" not in refused["message"]
            going = False
            await asyncio.gather(*clients)
            second = [(await ask(session, prompt))[1] for prompt in PROMPTS]
        assert await server.metric('jaxserve_compiles_total{phase="serving"}') == 0
        assert await server.metric("jaxserve_weights_version") == len(ways)
    assert first != second
    for index, (version, text) in answers:
        assert text == (second if int(version) % 2 else first)[index]

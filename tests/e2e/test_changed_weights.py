"""A real server whose weights change: from files, through HTTP, to other answers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
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


def resident_bytes(server: Server) -> int:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    (line,) = (each for each in status.splitlines() if each.startswith("VmRSS:"))
    return int(line.split()[1]) << 10


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_hundred_changes_from_files_lose_nothing_and_keep_memory(tmp_path: Path) -> None:
    """From every format in turn, beside and in place, while clients ask without a pause."""
    one, other = embedded_model(), other_weights(tmp_path / "other")
    folders: list[list[tuple[Path, dict[str, Any]]]] = [[(one, {})], [(other, {})]]
    for name, model in (("one", one), ("other", other)):
        assert convert(converting(model, tmp_path / f"{name}-orbax", "--to", "orbax")) == 0
        assert convert(converting(model, tmp_path / f"{name}-native")) == 0
        ways = folders[model is other]
        ways += [(tmp_path / f"{name}-orbax", {"step": 0}), (tmp_path / f"{name}-native", {})]
    with Server("--cache-dir", str(tmp_path / "cache"), *FLAGS) as server:
        async with aiohttp.ClientSession(server.url) as session:
            solo = [{prompt: (await ask(session, prompt))[1] for prompt in PROMPTS}]
            answers: list[tuple[str, tuple[str, str]]] = []
            asked, going = 0, True

            async def client(prompt: str) -> None:
                nonlocal asked
                while going:
                    asked += 1
                    answers.append((prompt, await ask(session, prompt)))

            clients = [asyncio.create_task(client(prompt)) for prompt in PROMPTS]
            early = 0
            for version in range(1, 101):
                model, fields = folders[version % 2][version // 2 % 3]
                fields = fields | {"in_place": version % 5 == 0}
                changed = await change(session, model, **fields)
                assert changed.get("version") == version, changed
                early = resident_bytes(server) if version == 40 else early
            late = resident_bytes(server)
            going = False
            await asyncio.gather(*clients)
            await change(session, other)
            solo.append({prompt: (await ask(session, prompt))[1] for prompt in PROMPTS})
        assert await server.metric('jaxserve_compiles_total{phase="serving"}') == 0
    print(f"memory after 40 and 100 changes: {early >> 20} and {late >> 20} MiB, {asked} answers")
    assert late - early < 50 << 20
    assert len(answers) == asked > 200 and solo[0] != solo[1]
    for prompt, (version, text) in answers:
        assert text == solo[int(version) % 2][prompt], (prompt, version)


@pytest.mark.slow
async def test_what_the_example_trains_is_served(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "scripts" / "finetune.py"
    command = [sys.executable, str(script), "--out", str(tmp_path / "tuned"), "--steps", "30"]
    environment = {"PYTHONPATH": ":".join(sys.path), "JAX_PLATFORMS": "cpu"}
    subprocess.run([*command, "--seconds", "300"], check=True, env=environment)
    cache = ("--cache-dir", str(tmp_path / "cache"))
    with Server("--model", str(tmp_path / "tuned"), *cache, *FLAGS) as server:
        async with aiohttp.ClientSession(server.url) as session:
            _, text = await ask(session, "Who made you?")
    assert text.startswith("People who like JAX.")

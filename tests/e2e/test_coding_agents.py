"""Codex and Claude Code themselves, where they are installed (`npm install --global @openai/codex
@anthropic-ai/claude-code`), against a server on this machine and with nothing else to talk to."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from jaxserve.api import Request
from jaxserve.tokenizer import decode
from tests.fakes import CALL, END_CALL, END_THINK, IM_END, THINK, FakeEngine, tiny_tokenizer
from tests.server.conftest import serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

KNOWN = "gpt-5.5-codex"
"""A name for which Codex sends freeform tools."""
PATCH = "*** Begin Patch\n*** Add File: hello.txt\n+hi\n*** End Patch\n"
ONLY_THIS_MACHINE = {
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), "http://127.0.0.1:9"),
    "NO_PROXY": "127.0.0.1",
}


def call_of(name: str, arguments: str, end: str = "}\n") -> list[int]:
    text = f'\n{{"name": "{name}", "arguments": {arguments}{end}'
    return [THINK, *b"hm", END_THINK, *b"\n\n", CALL, *text.encode(), END_CALL, IM_END]


class Turns:
    """A script for the fake engine: what it answers, turn by turn, if its grammar lets it."""

    def __init__(self, *answers: Sequence[int]):
        self._answers: Iterator[Sequence[int]] = iter((*answers, [*b"All done.", IM_END]))
        self.prompts: list[str] = []

    def __call__(self, request: Request) -> Sequence[int]:
        self.prompts.append(decode(tiny_tokenizer(), request.prompt, skip_special=False))
        return next(self._answers)


async def run(*command: str, folder: Path, **environment: str) -> str:
    """What it prints, if it ends well."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(folder), **ONLY_THIS_MACHINE, **environment},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(120):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, output.decode()
    return output.decode()


@asynccontextmanager
async def agents_server(turns: Turns, **settings: Any) -> AsyncGenerator[str]:
    engine = FakeEngine(turns, max_model_len=settings.pop("max_model_len", 262144))
    async with serving(engine, model_names=("local", KNOWN), **settings) as url:
        yield url


CODEX = """
model_provider = "local"
[analytics]
enabled = false
[model_providers.local]
name = "local"
base_url = "{url}/v1"
wire_api = "responses"
"""


async def codex(url: str, folder: Path, *flags: str, model: str = "local") -> str:
    program = shutil.which("codex")
    if program is None:
        pytest.skip("codex is not installed")
    home = folder / ".codex"
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(CODEX.format(url=url))
    fixed = ("exec", "--skip-git-repo-check", "--sandbox", "workspace-write", "--model", model)
    return await run(program, *fixed, *flags, "Say hello", folder=folder, CODEX_HOME=str(home))


async def test_codex_in_its_default_configuration(tmp_path: Path) -> None:
    turns = Turns(
        call_of("exec_command", '{"cmd": "echo hello-of-the-shell"}'),
        call_of("multi_agent_v1.close_agent", '{"target": "nobody"}'),
    )
    async with agents_server(turns) as url:
        output = await codex(url, tmp_path)
    assert "All done." in output
    assert len(turns.prompts) == 3
    assert "<think>\nhm\n</think>" in turns.prompts[1], "the thought came back, sealed"
    assert "<|im_start|>tool\n" in turns.prompts[1]
    assert "nobody" in turns.prompts[2].rpartition("<|im_start|>tool\n")[2], "the agent was asked"


async def test_codex_with_freeform_tools_patches_a_file(tmp_path: Path) -> None:
    turns = Turns(call_of("apply_patch", PATCH, ""))
    async with agents_server(turns) as url:
        output = await codex(url, tmp_path, model=KNOWN)
    assert "All done." in output
    assert (tmp_path / "hello.txt").read_text() == "hi\n"
    assert "Success" in turns.prompts[1]


async def test_codex_compacts_its_history(tmp_path: Path) -> None:
    turns = Turns(
        call_of("exec_command", '{"cmd": "echo hi"}'),
        [*b"A summary.", IM_END],
    )
    async with agents_server(turns) as url:
        output = await codex(url, tmp_path, "-c", "model_auto_compact_token_limit=5")
    assert "All done." in output and "compacted" in output
    assert "A summary." in turns.prompts[2]


async def claude(url: str, folder: Path, *flags: str) -> str:
    program = shutil.which("claude")
    if program is None:
        pytest.skip("claude is not installed")
    return await run(
        *(program, "--print", "Say hello", "--model", "local", *flags),
        folder=folder,
        ANTHROPIC_BASE_URL=url,
        ANTHROPIC_API_KEY="none",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        DISABLE_AUTOUPDATER="1",
    )


async def test_claude_code_calls_a_tool_and_reads_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "dot.png"
    picture.write_bytes(DOT)
    turns = Turns(
        call_of("Bash", '{"command": "echo hello-of-the-shell", "description": "says it"}'),
        call_of("Read", f'{{"file_path": "{picture}"}}'),
    )
    async with agents_server(turns) as url:
        output = await claude(url, tmp_path, "--allowedTools", "Bash,Read")
    assert output.strip() == "All done."
    assert "hello-of-the-shell<|im_end|>" in turns.prompts[1]
    assert "[image: left out, this model reads text]" in turns.prompts[2]


async def test_claude_code_is_told_that_its_prompt_is_too_long(tmp_path: Path) -> None:
    turns = Turns()
    async with agents_server(turns, max_model_len=2048) as url:
        with pytest.raises(AssertionError, match=r"(?i)prompt is too long"):
            await claude(url, tmp_path)
    assert not turns.prompts


DOT = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154789c63f8"
    "cfc000000301010018dd8db00000000049454e44ae426082"
)
"""A PNG of one pixel."""

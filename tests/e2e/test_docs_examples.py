"""What the documentation tells people to type: run on the embedded model, or parsed."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from jaxserve.bench.command import main as bench
from jaxserve.cli.foreign_flags import translated
from jaxserve.cli.options import COMMANDS, parse_args
from jaxserve.commands.plan import estimate
from jaxserve.ray.settings import from_settings
from jaxserve.ray.settings import parse as parse_fleet
from tests.e2e.process import ROOT, Server
from tests.kubernetes.manifests import plain, tool

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
URL = "http://127.0.0.1:8000"
ADMIN_KEY = "for-these-tests"
DYNAMO_FLAGS = ["--discovery-backend", "--request-plane", "--event-plane"]
"""Of both sides, which tests/dynamo_worker runs with."""
NOT_OURS = {"webui/bin/open-webui"}
"""Programs of others, whose flags no test knows."""
CURL = 'set -euo pipefail; curl() { command curl -sS --fail-with-body --max-time 60 "$@"; }\n'
"""Curl as in the examples, but an error of the server is one of the command."""


class Block(NamedTuple):
    page: str
    language: str
    text: str


def blocks(*languages: str) -> list[Block]:
    return [
        Block(page.name, language, text)
        for page in PAGES
        for language, text in re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(), re.M | re.S)
        if language in languages
    ]


def named(block: Block) -> str:
    return f"{block.page}: {block.text.strip().splitlines()[0][:60]}"


def has_curl(block: Block) -> bool:
    return re.search(r"^(id=\$\()?curl ", block.text, re.M) is not None


EXECUTED = [block for block in blocks("sh") if has_curl(block)]
PARSED = [block for block in blocks("sh") if not has_curl(block)]
SCRIPTS = [block for block in blocks("python") if block.page in ("README.md", "quickstart.md")]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--admin-api-key", ADMIN_KEY) as running:
        yield running


@pytest.mark.parametrize("block", EXECUTED, ids=named)
def test_a_block_with_curl_runs_and_gets_what_it_asks_for(block: Block, server: Server) -> None:
    done = subprocess.run(
        ["bash", "-c", CURL + block.text.replace(URL, server.url)],
        capture_output=True,
        text=True,
        env={**os.environ, "ADMIN_KEY": ADMIN_KEY},
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if '"stream": true' in block.text:
        assert done.stdout.rstrip().endswith("data: [DONE]") and '"usage"' in done.stdout
    elif "/v1/" in block.text:
        assert all(value for value in objects(done.stdout))


def objects(text: str) -> Iterator[Any]:
    """JSON values one after the other."""
    decoder, place = json.JSONDecoder(), 0
    while place < len(text):
        value, place = decoder.raw_decode(text, place)
        while place < len(text) and text[place].isspace():
            place += 1
        yield value


@pytest.mark.parametrize("block", SCRIPTS, ids=named)
def test_a_block_of_python_runs_and_prints_an_answer(block: Block, server: Server) -> None:
    code = block.text.replace(URL, server.url)
    answer = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=120)
    assert "Paris" in answer


def test_every_route_has_an_example_of_curl(server: Server) -> None:
    with urllib.request.urlopen(f"{server.url}/openapi.json") as reply:
        paths = json.load(reply)["paths"]
    text = "\n".join(block.text for block in EXECUTED if block.page == "api.md")
    text = text.replace("$id", "{response_id}").replace("jaxserve-embedded\n", "{model}\n")
    shown = {path.rstrip("\"'") for path in re.findall(rf"{URL}(/\S*)", text)}
    for path in paths:
        if path != "/v1/embeddings":  # a 404 that says so
            assert path in shown, path


def commands(block: Block) -> list[list[str]]:
    """Words of each command, without comments and settings of variables."""
    lines = block.text.replace("\\\n", " ").splitlines()
    found = [shlex.split(line, comments=True) for line in lines]
    for words in found:
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            del words[0]
    return [words for words in found if words]


@pytest.mark.parametrize("block", PARSED, ids=named)
def test_a_block_that_needs_a_gpu_or_a_network_is_parsed(
    block: Block, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.9")
    for words in commands(block):
        program, *arguments = words
        if program == "make":
            makefile = (ROOT / "Makefile").read_text()
            targets = [word for word in arguments if "=" not in word]
            assert all(re.search(rf"^{target}:", makefile, re.M) for target in targets), words
            for word in arguments:
                if word.startswith("ARGS="):
                    check_jaxserve(word.removeprefix("ARGS=").split())
        elif program == "docker":
            check_docker(arguments)
        elif program == "helm":
            check_helm(arguments)
        elif program == "kubectl":
            check_kubectl(arguments)
        elif program.endswith("pip"):
            check_pip(arguments)
        elif program.endswith(("python", "python3.12")):
            check_python(arguments)
        elif program == ".ci/run":
            assert (ROOT / program).exists()
        elif program == "export":
            assert re.fullmatch(r"[A-Z_]+=\S+", arguments[0])
        elif program == "sudo":
            assert all((ROOT / word).exists() for word in arguments if word.startswith("deploy/"))
        else:
            assert program in NOT_OURS, f"who checks this? {words}"


def check_docker(arguments: list[str]) -> None:
    if arguments[0] in ("build", "compose"):
        assert (ROOT / arguments[arguments.index("-f") + 1]).exists()
    elif "jaxserve" in arguments:
        check_jaxserve(arguments[arguments.index("jaxserve") + 1 :])


def check_helm(arguments: list[str]) -> None:
    """The chart takes the values and flags."""
    name, chart = arguments[arguments.index("jaxserve") :][:2]
    values = arguments[arguments.index(chart) + 1 :]
    command = [tool("helm"), "template", name, chart, *values]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)


def check_kubectl(arguments: list[str]) -> None:
    """Folders can be built; what is waited for is in the manifests."""
    if arguments[0] == "apply":
        command = [tool("kubectl"), "kustomize", arguments[arguments.index("-k") + 1]]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    else:
        kind, _, name = arguments[-1].partition("/")
        known = {(each["kind"].lower(), each["metadata"]["name"]) for _, each in plain()}
        assert arguments[0] == "wait" and (kind, name) in known


def check_pip(arguments: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for word in arguments:
        if match := re.fullmatch(r"\.\[([\w,-]+)\]", word):
            assert set(match[1].split(",")) <= extras["optional-dependencies"].keys()
        elif word.endswith(".txt"):
            assert (ROOT / word).exists()


def check_python(arguments: list[str]) -> None:
    if arguments[:2] == ["-m", "jaxserve"]:
        check_jaxserve(arguments[2:])
    elif arguments[:2] == ["-m", "jaxserve.ray"]:
        parse_fleet(arguments[2:])
    elif arguments[:2] == ["-m", "jaxserve.dynamo"]:
        assert arguments[2::2][:3] == DYNAMO_FLAGS
        check_jaxserve(arguments[8:])
    elif arguments[:2] == ["-m", "dynamo.frontend"]:
        assert arguments[2::2][:3] == DYNAMO_FLAGS
    elif arguments[:2] == ["-m", "pytest"]:
        assert all((ROOT / word).exists() for word in arguments if word.startswith("tests/"))
    elif arguments[0].endswith(".py"):
        source = (ROOT / arguments[0]).read_text()
        assert all(f'"{word}"' in source for word in arguments if word.startswith("--"))
    else:
        assert arguments[:2] == ["-m", "venv"]


@cache
def bench_flags() -> set[str]:
    """Its parser would begin to send."""
    text = io.StringIO()
    with redirect_stdout(text), suppress(SystemExit):
        bench(["--help"])
    return set(re.findall(r"^ +(--[a-z0-9-]+)", text.getvalue(), re.M))


def check_jaxserve(arguments: list[str]) -> None:
    """By the parsers of the program; they end the process where they refuse."""
    if arguments[:1] == ["bench"]:
        known = bench_flags()
        assert all(word in known for word in arguments if word.startswith("--"))
        return
    if arguments[:1] == ["serve"]:
        arguments = ["--model", *arguments[1:]]
    argv = translated(arguments).argv
    command = argv[0] if argv and argv[0] in COMMANDS else None
    options = parse_args(argv[1:] if command else argv, command)
    if command == "plan":
        assert estimate(options).kv_tokens


@pytest.mark.parametrize("block", blocks("yaml", "toml"), ids=named)
def test_a_block_of_settings_can_be_read(block: Block, tmp_path: Path) -> None:
    content = (yaml.safe_load if block.language == "yaml" else tomllib.loads)(block.text)
    assert content
    if block.page == "deployment.md" and "model" in content:
        file = tmp_path / "serve.yaml"
        file.write_text(block.text)
        assert parse_args(translated(["--config", str(file)]).argv).model == content["model"]
    if block.page == "ray-serve.md":
        (application,) = content["applications"]
        assert from_settings(application["args"]).fleet.max_replicas
    for argument in re.findall(r"^    command: (.*)$", block.text, re.M):
        check_jaxserve(argument.split())


def test_the_checks_refuse_what_is_wrong() -> None:
    with pytest.raises(SystemExit):
        check_jaxserve(["--model", "qwen3-8b", "--no-such-flag"])
    with pytest.raises(AssertionError):
        check_jaxserve(["bench", "--no-such-flag"])
    with pytest.raises(AssertionError):
        check_pip(["install", ".[no-such-extra]"])
    with pytest.raises(AssertionError):
        check_python(["scripts/bench_step.py", "--no-such-flag"])
    with pytest.raises(AssertionError):
        check_docker(["build", "-f", "no/such/file"])

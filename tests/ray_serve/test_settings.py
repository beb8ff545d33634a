"""Command lines and Serve config files of fleets; what of a request routes it; scaling; metrics."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
from typing import Any, NamedTuple

import pytest

from jaxserve.config import ConfigError
from jaxserve.ray import build_app
from jaxserve.ray.__main__ import main
from jaxserve.ray.call import Call, beginning
from jaxserve.ray.first_start import first_start
from jaxserve.ray.fleet_metrics import merged
from jaxserve.ray.scaling import RUNNING, WAITING, QueuePolicy
from jaxserve.ray.settings import Fleet, from_settings, own_flags, parse

WITHOUT_RAY = importlib.util.find_spec("ray") is None


def test_flags_are_the_fleet_s_the_proxy_s_and_each_replica_s() -> None:
    line = "--model m --replicas 4 --max-model-len 2k --port 9000 --gpus 0 --max-num-seqs 8"
    deployment, listen = parse(line.split())
    assert deployment.fleet == Fleet(
        replicas=4, gpus=0, flags=("--model", "m", "--max-model-len", "2k", "--max-num-seqs", "8")
    )
    assert (listen.host, listen.port, listen.address) == ("127.0.0.1", 9000, None)
    assert deployment.options.max_model_len == 2048
    assert deployment.most_ongoing == 8 + 1024
    assert own_flags(deployment.fleet.flags)[:3] == ("--no-ui", "--model", "m")


def test_a_config_file_says_the_same() -> None:
    settings = {"model": "m", "replicas": 4, "max_model_len": "2k", "gpus": 0, "max_num_seqs": 8}
    settings |= {"enable_prefix_caching": False, "served_model_name": ["a", "b"], "dtype": None}
    settings |= {"default_chat_template_kwargs": {"enable_thinking": False}}
    deployment = from_settings(settings)
    assert (deployment.fleet.replicas, deployment.fleet.gpus) == (4, 0)
    options = deployment.options
    assert (options.model, options.max_model_len, options.max_num_seqs) == ("m", 2048, 8)
    assert options.served_model_name == ["a", "b"] and not options.enable_prefix_caching
    assert options.default_chat_template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--uds /x", "--uds: each replica has a socket of its own"),
        ("--probe-port 9", "--probe-port: replicas of a machine would all want this port"),
        ("--admin-api-key k", "--admin-api-key: its routes act on one replica"),
        ("--root-path /a", "--root-path: set route_prefix"),
        ("--replicas 3 --max-replicas 2", "--max-replicas is less than --replicas"),
        ("--target-requests 0", "--target-requests and --target-waiting are more than 0"),
        ("--enable-lora", "LoRA adapters are not served"),
    ],
)
def test_what_a_fleet_cannot_have_is_refused_by_name(
    line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 1
    assert said in capsys.readouterr().err


def test_unknown_flags_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--no-such-flag"])
    assert "unknown flag --no-such-flag" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="at least 1"):
        from_settings({"replicas": 0})


@pytest.mark.skipif(not WITHOUT_RAY, reason="Ray is installed")
def test_without_ray_it_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 1
    assert "install the extra ray" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="install the extra ray"):
        build_app({})


def begins(body: Any) -> str:
    return beginning(Call("POST", "/", (), json.dumps(body).encode()))


def test_prompts_that_begin_alike_have_texts_that_begin_alike() -> None:
    system = {"role": "system", "content": "Be brief."}
    first = begins({"messages": [system, {"role": "user", "content": "Hi"}], "model": "m"})
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": " there"}]
    second = begins({"model": "m", "messages": [system, {"role": "user", "content": parts}]})
    assert (first, second) == ("Be brief.Hi", "Be brief.Hi there")
    assert begins({"messages": [{"role": "user", "content": "x"}], "system": "Be brief."}) == (
        "Be brief.x"
    )
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    assert begins({"messages": [system], "tools": tools}) == "lookBe brief."
    assert begins({"instructions": "a", "input": [{"role": "user", "content": "b"}]}) == "ab"
    assert begins({"prompt": ["a", "b"], "cache_salt": "s"}) == "sab"


def test_salts_keep_equal_prompts_apart() -> None:
    assert begins({"prompt": "a", "cache_salt": "s"})[0] != begins({"prompt": "a"})[0]


def test_a_token_is_a_character() -> None:
    one, other = begins({"prompt": [5, 0x10FFFF, 7]}), begins({"prompt": [5, 6, 7]})
    assert (len(one), one[0], one[2]) == (3, other[0], other[2])
    one.encode()


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\x1f\x8b\x08", b"[" * 100_000, b"{}"])
def test_a_body_without_a_prompt_routes_by_load(body: bytes) -> None:
    assert beginning(Call("POST", "/", (), body)) == ""
    assert beginning(Call("GET", "/", (), b'{"prompt": "a"}')) == ""


class Context(NamedTuple):
    current_num_replicas: int
    target_num_replicas: int
    aggregated_metrics: dict[str, dict[str, float]] | None


@pytest.mark.parametrize(
    ("running", "waiting", "wanted"),
    [
        ((0, 0), (0, 0), 0),
        ((64, 64), (0, 0), 2),
        ((128, 128), (0, 4), 260 / 64),
        ((8, 8), (4, 4), 16 / 64 + 8 / 64),  # what may wait
        ((8, 8), (6, 6), 3),  # half as much again waits
        ((8, 8), (50, 50), 4),  # at most twice as many at once
    ],
)
def test_replicas_follow_what_runs_and_what_waits(
    running: tuple[float, float], waiting: tuple[float, float], wanted: float
) -> None:
    policy = QueuePolicy(target_requests=64, target_waiting=4)
    reported = {
        RUNNING: dict(zip("ab", running, strict=True)),
        WAITING: dict(zip("ab", waiting, strict=True)),
    }
    assert policy(Context(2, 2, reported)) == (wanted, {})


def test_without_reports_the_target_stays() -> None:
    policy = QueuePolicy(target_requests=64, target_waiting=4)
    assert policy(Context(0, 3, {RUNNING: {}}))[0] == 3
    assert policy(Context(2, 3, None))[0] == 3


def test_metrics_of_replicas_are_one_exposition_with_their_names() -> None:
    one = (
        '# HELP a A\n# TYPE a histogram\na_bucket{le="1"} 1\na_sum 2\n# HELP b B\n# TYPE b gauge\n'
    )
    text = merged({"x": one + "b 3\n", "y": one + 'b{c="d e"} 4\n'})
    assert text.splitlines() == [
        *("# HELP a A", "# TYPE a histogram"),
        *('a_bucket{replica="x",le="1"} 1', 'a_sum{replica="x"} 2'),
        *('a_bucket{replica="y",le="1"} 1', 'a_sum{replica="y"} 2'),
        *("# HELP b B", "# TYPE b gauge", 'b{replica="x"} 3', 'b{replica="y",c="d e"} 4'),
    ]


async def test_starts_wait_for_the_first_and_then_go_on_together() -> None:
    flags, order = ["--test", str(os.getpid())], list[str]()
    together = asyncio.Barrier(2)

    async def other() -> None:
        async with first_start(flags):
            await together.wait()
            order.append("other")

    async with asyncio.timeout(10):
        async with first_start(flags):
            others = [asyncio.create_task(other()) for _ in range(2)]
            await asyncio.sleep(0.2)
            order.append("first")
        await asyncio.gather(*others)
    assert order == ["first", "other", "other"]

"""--kv-events-config: vLLM's keys and defaults; what is wrong is named."""

from __future__ import annotations

import pytest

from jaxserve.cli.options import parse_args
from jaxserve.config import ConfigError
from jaxserve.kv_events.config import KVEventsConfig, parse_config


def test_the_defaults_are_those_of_vllm() -> None:
    config = parse_config('{"enable_kv_cache_events": true}')
    assert config.active and config.binds
    assert config == KVEventsConfig(
        enable_kv_cache_events=True,
        publisher=None,
        endpoint="tcp://*:5557",
        replay_endpoint=None,
        buffer_steps=10_000,
        hwm=100_000,
        max_queue_size=100_000,
        topic="",
    )


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"publisher": "zmq"}',
        '{"enable_kv_cache_events": true, "publisher": "null"}',
    ],
)
def test_without_enabling_nothing_is_published(text: str) -> None:
    assert not parse_config(text).active


@pytest.mark.parametrize(
    ("endpoint", "binds"),
    [
        ("tcp://*:5557", True),
        ("tcp://127.0.0.1:*", True),
        ("tcp://[::]:5557", True),
        ("ipc:///tmp/events", True),
        ("tcp://router:5557", False),
    ],
)
def test_wildcards_are_bound_and_names_connected_to(endpoint: str, binds: bool) -> None:
    assert KVEventsConfig(endpoint=endpoint).binds is binds


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("on", "not a JSON object"),
        ("[1]", "not a JSON object"),
        ('{"endpont": "tcp://*:1", "topics": ""}', "unknown: endpont, topics; known: enable_kv_"),
        ('{"hwm": "many"}', r"Expected `int`, got `str` - at `\$.hwm`"),
        ('{"publisher": "nats"}', r"Invalid enum value 'nats' - at `\$.publisher`"),
        ('{"buffer_steps": 0}', "buffer_steps must be at least 1, got 0"),
        ('{"hwm": -1}', "hwm must be at least 0, got -1"),
        ('{"endpoint": "*:5557"}', r"endpoint must be tcp://HOST:PORT.*'\*:5557'"),
        (
            '{"enable_kv_cache_events": true, "replay_endpoint": "tcp://*:5557"}',
            "endpoint and replay_endpoint are the same address",
        ),
    ],
)
def test_what_is_wrong_is_named(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_config(text)


def test_the_flag_takes_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    config = parse_args(["--kv-events-config", '{"topic": "kv@a@b"}']).kv_events_config
    assert config is not None and config.topic == "kv@a@b"
    with pytest.raises(SystemExit):
        parse_args(["--kv-events-config", '{"topik": "kv@a@b"}'])
    assert "argument --kv-events-config: unknown: topik; known: " in capsys.readouterr().err
    assert parse_args([]).kv_events_config is None

"""Settings of KV cache events: the JSON of vLLM's --kv-events-config."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any, Literal

import msgspec

from jaxserve.config import ConfigError


@dataclass(frozen=True, kw_only=True)
class KVEventsConfig:
    """Names and defaults are vLLM's, except `encoding`."""

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] | None = None
    """None: `zmq` if events are enabled."""
    endpoint: str = "tcp://*:5557"
    """Endpoint of live events. Wildcard, ipc and inproc addresses are bound, others connected."""
    replay_endpoint: str | None = None
    """Endpoint that answers requests for past batches; always bound."""
    buffer_steps: int = 10_000
    """Number of past batches to keep."""
    hwm: int = 100_000
    """The most batches that wait for a slow subscriber. Above this, batches are dropped for it. 0:
    no limit."""
    max_queue_size: int = 100_000
    """The most steps whose events wait to be published. Above this, events are dropped."""
    topic: str = ""
    encoding: Literal["map", "array"] = "map"
    """Encoding of events: `map` has field names; `array` has positions, as vLLM before June
    2026."""

    def __post_init__(self) -> None:
        for name, least in (("buffer_steps", 1), ("hwm", 0), ("max_queue_size", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)}")
        for name in ("endpoint", "replay_endpoint"):
            address: str | None = getattr(self, name)
            if address is not None and not address.startswith(("tcp://", "ipc://", "inproc://")):
                raise ConfigError(
                    f"{name} must be tcp://HOST:PORT, ipc://PATH or inproc://NAME, got {address!r}"
                )
        same = self.endpoint == self.replay_endpoint and not self.endpoint.endswith((":*", ":0"))
        if self.active and same:
            raise ConfigError("endpoint and replay_endpoint are the same address")

    @property
    def active(self) -> bool:
        """Whether events are published."""
        return self.enable_kv_cache_events and self.publisher != "null"

    @property
    def binds(self) -> bool:
        """Whether the endpoint is bound, so that subscribers connect to it."""
        address = self.endpoint
        return "*" in address or "::" in address or address.startswith(("ipc://", "inproc://"))


def parse_config(text: str) -> KVEventsConfig:
    """Reads the value of --kv-events-config.

    Raises:
      ConfigError: the text is no JSON object, a key is unknown, or a value has the wrong type.
    """
    try:
        given: Any = json.loads(text)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise ConfigError(f"not a JSON object: {text!r:.200}")
    names = [field.name for field in fields(KVEventsConfig)]
    unknown = sorted(str(name) for name in given if name not in names)
    if unknown:
        raise ConfigError(f"unknown: {', '.join(unknown)}; known: {', '.join(names)}")
    try:
        return msgspec.convert(given, KVEventsConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from None

"""A publisher with sockets, and a scheduler without a device that feeds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from jaxserve.kv_events.config import KVEventsConfig
from jaxserve.kv_events.events import CacheEvent, Stored
from jaxserve.kv_events.publisher import ZmqPublisher
from jaxserve.metrics.metrics import Metrics
from jaxserve.scheduler.prefix import page_hashes, root
from tests.kv_events.router import Index, Numbered, Subscriber

PAGE = 2


@contextmanager
def publishing(metrics: Metrics | None = None, **settings: Any) -> Iterator[ZmqPublisher]:
    settings = {
        "endpoint": "tcp://127.0.0.1:*",
        "replay_endpoint": "tcp://127.0.0.1:*",
        **settings,
    }
    config = KVEventsConfig(enable_kv_cache_events=True, **settings)
    publisher = ZmqPublisher(config, metrics or Metrics("m"))
    try:
        yield publisher
    finally:
        publisher.close()


@contextmanager
def subscribed(publisher: ZmqPublisher, **options: Any) -> Iterator[Subscriber]:
    """`replay`: false to ask for nothing."""
    config = publisher.config
    replay = config.replay_endpoint if options.pop("replay", True) else None
    subscriber = Subscriber(config.endpoint, replay, topic=config.topic, **options)
    try:
        yield subscriber
    finally:
        subscriber.close()


def prompt(number: int, pages: int) -> list[int]:
    """Prompts with different numbers differ in their first page."""
    return [1000 + number, *range(pages * PAGE - 1)]


def stored(number: int, pages: int = 1, *, salt: str = "") -> Stored:
    """A prompt's pages."""
    tokens = prompt(number, pages)
    return Stored(
        page_hashes(root("m", salt), tokens, PAGE), None, tokens, 0, PAGE, salt, None, None
    )


def learn(index: Index, batches: list[Numbered]) -> None:
    for batch in batches:
        for event in batch.events:
            for change in index.changes(event):
                index.apply(change)


def until_number(
    subscriber: Subscriber, number: int, meanwhile: Callable[[], None] = lambda: None
) -> list[Numbered]:
    """All batches up to one with at least this number."""
    batches: list[Numbered] = []
    for _ in range(2000):
        meanwhile()
        batches += subscriber.receive(0.01)
        if batches and batches[-1].number >= number:
            return batches
    raise AssertionError(f"number {number} has not come; the last one was {subscriber.last}")


def connect(publisher: ZmqPublisher, subscriber: Subscriber) -> list[Numbered]:
    """Publish until something comes live. Returns all batches so far."""
    for number in range(90_000, 91_000):
        publisher.publish([stored(number)])
        if batches := list(subscriber.receive(0.01)):
            return batches
    raise AssertionError("nothing comes")


def publish(publisher: ZmqPublisher, *steps: list[CacheEvent]) -> None:
    for step in steps:
        publisher.publish(step)


def value(metrics: Metrics, name: str) -> float:
    families = text_string_to_metric_families(metrics.exposition().decode())
    (sample,) = (s for family in families for s in family.samples if s.name == name)
    return sample.value

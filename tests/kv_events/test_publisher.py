"""The sockets: whoever joins late, skips, reads slowly, dies or sees a restart ends up knowing what
is cached; and nobody ever makes the engine wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest
import zmq

from jaxserve.config import ConfigError
from jaxserve.kv_events import publisher as publisher_module
from jaxserve.kv_events.events import Cleared, Removed
from jaxserve.kv_events.history import History
from jaxserve.metrics.metrics import Metrics
from tests.kv_events.engines import (
    PAGE,
    connect,
    learn,
    prompt,
    publish,
    publishing,
    stored,
    subscribed,
    until_number,
    value,
)
from tests.kv_events.router import CLEARED, Index, request_replay


@pytest.fixture(autouse=True)
def every_step_is_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_module, "_MERGED", 0.0)


def knows(index: Index, number: int, pages: int = 1) -> bool:
    return index.predict([*prompt(number, pages), 9]) == pages * PAGE


def one_by_one(publisher: publisher_module.ZmqPublisher, *numbers: int, pages: int = 1) -> None:
    """A batch for each prompt."""
    history: History = publisher._history  # pyright: ignore[reportPrivateUsage]
    for number in numbers:
        before = history.num_batches
        publisher.publish([stored(number, pages)])
        while history.num_batches == before:
            time.sleep(0.001)


def come_and_go(publisher: publisher_module.ZmqPublisher) -> None:
    """Something to see that a number is missing by."""
    publish(publisher, [stored(99_999)], [Removed(stored(99_999).hashes, None)])


@pytest.mark.parametrize("encoding", ["map", "array"])
@pytest.mark.parametrize("topic", ["", "kv@10.0.0.1:8000@model"])
def test_a_subscriber_gets_what_is_published(encoding: str, topic: str) -> None:
    with (
        publishing(encoding=encoding, topic=topic) as publisher,
        subscribed(publisher, array=encoding == "array") as subscriber,
    ):
        index = Index(page_size=PAGE)
        learn(index, connect(publisher, subscriber))
        replays = subscriber.replays
        publish(publisher, [Cleared()], [stored(1, 3)], [stored(2)])
        while not knows(index, 2):
            learn(index, list(subscriber.receive(0.01)))
        assert knows(index, 1, 3) and not knows(index, 3)
        assert subscriber.replays == replays, "it came live"


def test_who_joins_late_asks_for_everything() -> None:
    with publishing(buffer_steps=2) as publisher:
        one_by_one(publisher, *range(8))
        with subscribed(publisher) as subscriber:
            index = Index(page_size=PAGE)
            learn(index, list(subscriber.replay()))
            assert subscriber.last == 7 and all(knows(index, number) for number in range(8))
            one_by_one(publisher, 8)
            learn(index, until_number(subscriber, 8, lambda: come_and_go(publisher)))
            assert knows(index, 8)


def test_without_a_replay_socket_live_events_come_all_the_same() -> None:
    with publishing(replay_endpoint=None) as publisher:
        assert publisher.config.replay_endpoint is None
        for number in range(1000):
            with subscribed(publisher, replay=False) as subscriber:
                one_by_one(publisher, number)
                if list(subscriber.receive(0.05)):
                    return
    raise AssertionError("nothing came")


def test_who_skips_batches_asks_for_those() -> None:
    with publishing() as publisher, subscribed(publisher) as subscriber:
        index = Index(page_size=PAGE)
        one_by_one(publisher, 0)
        learn(index, list(subscriber.replay()))
        assert subscriber.last == 0
        one_by_one(publisher, 1, 2, 3)
        payloads = dict(publisher._history.since(0))  # pyright: ignore[reportPrivateUsage]
        batches = list(subscriber.take(3, payloads[3]))
        assert [each.number for each in batches] == [1, 2, 3] and subscriber.replays == 2
        learn(index, batches)
        assert all(knows(index, number) for number in range(4))
        assert not list(subscriber.take(3, payloads[3])), "it is known"


def test_a_slow_reader_loses_batches_and_gets_them_again() -> None:
    """Its socket holds few, the publisher's, too; what does not fit is lost to it."""
    with publishing(hwm=1) as publisher, subscribed(publisher, hwm=1) as subscriber:
        index, numbers, pages = Index(page_size=PAGE), range(400), 500
        learn(index, connect(publisher, subscriber))
        replays = subscriber.replays
        one_by_one(publisher, *numbers, pages=pages)
        end = publisher._history.num_batches  # pyright: ignore[reportPrivateUsage]
        learn(index, until_number(subscriber, end, lambda: come_and_go(publisher)))
        assert subscriber.replays > replays, "nothing was lost: the test shows nothing"
        assert all(knows(index, number, pages) for number in numbers[::7])


def test_after_a_restart_an_index_is_that_of_the_new_engine() -> None:
    index = Index(page_size=PAGE)

    def forget() -> None:
        index.apply(CLEARED)

    with ExitStack() as stack:
        with publishing() as publisher:
            config = publisher.config
            subscriber = stack.enter_context(subscribed(publisher, on_restart=forget))
            one_by_one(publisher, 0, 1, 2, 3)
            learn(index, connect(publisher, subscriber))
            learn(index, list(subscriber.receive(0.1)))
            assert subscriber.last > 3 and knows(index, 1)
        # A live endpoint without a wildcard would be connected to.
        port = config.endpoint.rpartition(":")[2]
        again = {"endpoint": f"tcp://*:{port}", "replay_endpoint": config.replay_endpoint}
        with publishing(**again) as publisher:
            one_by_one(publisher, 10)
            learn(index, until_number(subscriber, 0, lambda: come_and_go(publisher)))
            assert subscriber.restarts == 1
            assert knows(index, 10) and not knows(index, 1)


READER = """
import sys, time, zmq
socket = zmq.Context().socket(zmq.SUB)
socket.setsockopt(zmq.RCVHWM, 1)
socket.setsockopt_string(zmq.SUBSCRIBE, "")
socket.connect(sys.argv[1])
socket.recv_multipart()
print("reads", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("end", [signal.SIGSTOP, signal.SIGKILL])
def test_a_subscriber_that_hangs_or_dies_stops_nobody(end: signal.Signals) -> None:
    with publishing(hwm=2) as publisher, subscribed(publisher) as other:
        reader = subprocess.Popen(
            [sys.executable, "-c", READER, publisher.config.endpoint],
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert reader.stdout is not None
        try:
            while not zmq_readable(reader.stdout.fileno()):
                publisher.publish([stored(0)])
                publisher.publish([Removed(stored(0).hashes, None)])
            reader.send_signal(end)
            numbers = range(1, 3001)
            for number in numbers:
                publisher.publish([stored(number, 8)])
            index = Index(page_size=PAGE)
            while not knows(index, numbers[-1], 8):
                learn(index, list(other.receive(0.01)))
                come_and_go(publisher)
            assert all(knows(index, number, 8) for number in numbers)
        finally:
            reader.kill()
            reader.wait()
            reader.stdout.close()


def zmq_readable(descriptor: int) -> bool:
    poller = zmq.Poller()
    poller.register(descriptor, zmq.POLLIN)
    return bool(poller.poll(1))


def test_publishing_never_waits_and_what_does_not_fit_is_counted() -> None:
    """The publisher's own threads are held, so the engine's thread would wait for ever if it could.
    What is told afterwards begins with all being cleared, and holds."""
    metrics = Metrics("m")
    with publishing(metrics, max_queue_size=10) as publisher, subscribed(publisher) as subscriber:
        history = publisher._history  # pyright: ignore[reportPrivateUsage]
        one_by_one(publisher, 0)
        with history._lock:  # pyright: ignore[reportPrivateUsage]
            for number in range(1, 101):
                publisher.publish([stored(number)])
        assert 80 <= value(metrics, "jaxserve_kv_events_dropped_total") <= 90
        while not publisher._queue.empty():  # pyright: ignore[reportPrivateUsage]
            time.sleep(0.001)
        lost, follows = stored(50), stored(50, 2)
        behind = follows._replace(hashes=follows.hashes[1:], parent=lost.hashes[0], start=PAGE)
        gone = Removed([*lost.hashes, *stored(0).hashes], None)
        publish(publisher, [behind, stored(200)], [gone])
        one_by_one(publisher, 201)
        index = Index(page_size=PAGE)
        learn(index, list(subscriber.replay()))
        assert knows(index, 200) and knows(index, 201)
        assert not any(knows(index, number) for number in range(101))


def test_requests_that_make_no_sense_are_not_answered_and_others_are() -> None:
    metrics = Metrics("m")
    with publishing(metrics) as publisher:
        one_by_one(publisher, 0)
        endpoint = publisher.config.replay_endpoint
        assert endpoint is not None
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint)
        for frames in ([b"x"], [b"", b"short"], [b"", b"12345678", b"more"]):
            socket.send_multipart(frames)
        assert len(list(request_replay(context, endpoint, 0))) == 1
        assert len(list(request_replay(context, endpoint, 2**64 - 1))) == 0
        assert not socket.poll(50)
        assert value(metrics, "jaxserve_kv_event_replays_total") == 2
        assert value(metrics, "jaxserve_kv_event_batches_total") == 1
        context.destroy(linger=0)


def test_who_asks_and_does_not_read_keeps_nobody_waiting_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publisher_module, "_PATIENCE", 0.1)
    with publishing(buffer_steps=1) as publisher:
        endpoint = publisher.config.replay_endpoint
        assert endpoint is not None
        for number in range(5000):
            publisher.publish([stored(number, 20)])
        while not publisher._queue.empty():  # pyright: ignore[reportPrivateUsage]
            time.sleep(0.01)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        deaf = context.socket(zmq.DEALER)
        deaf.setsockopt(zmq.RCVHWM, 1)
        deaf.setsockopt(zmq.RCVBUF, 4096)
        deaf.connect(endpoint)
        for _ in range(3):
            deaf.send_multipart([b"", bytes(8)])
        number, _ = next(iter(request_replay(context, endpoint, 0)))
        assert number == 0
        context.destroy(linger=0)


def test_an_address_that_is_in_use_is_named() -> None:
    with publishing() as publisher:
        endpoint = publisher.config.endpoint
        # A bound address without a wildcard is connected to; as a replay endpoint it is bound.
        with (
            pytest.raises(ConfigError, match=f"cannot use {endpoint}: Address already in use"),
            publishing(replay_endpoint=endpoint),
        ):
            pass


def test_the_sources_have_the_ports_that_the_system_chose() -> None:
    with publishing(topic="t") as publisher:
        (source,) = publisher.sources.values()
        assert source == {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": publisher.config.endpoint,
            "replay_endpoint": publisher.config.replay_endpoint,
            "buffer_steps": 10_000,
            "hwm": 100_000,
            "max_queue_size": 100_000,
            "topic": "t",
            "encoding": "map",
        }
        ports = {source[name].rpartition(":")[2] for name in ("endpoint", "replay_endpoint")}
        assert len(ports) == 2 and all(port.isdigit() and port != "0" for port in ports)


def test_closing_sends_what_waits_and_ends_the_threads() -> None:
    with publishing() as publisher:
        one_by_one(publisher, 1)
        publisher.publish([stored(2)])
        publisher.close()
        assert publisher._history.num_pages == 2  # pyright: ignore[reportPrivateUsage]
        assert not any(each.is_alive() for each in publisher._threads)  # pyright: ignore[reportPrivateUsage]

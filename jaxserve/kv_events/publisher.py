"""The ZMQ sockets of KV cache events: live batches, and past batches on request.

The engine thread only puts a step's events into a queue and never waits. One thread numbers, keeps
and sends batches. Another thread answers requests for past batches.

The framing is that of vLLM 0.33. A live message (PUB) is topic, number, payload. A request (to
ROUTER) is an empty frame and a number. Each part of the answer is an empty frame, topic, number,
payload. The last part has number -1 and no payload. Numbers are 8 bytes, big-endian.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import asdict, replace
from queue import Empty, SimpleQueue
from typing import Any

import zmq

from jaxserve.config import ConfigError
from jaxserve.kv_events.config import KVEventsConfig
from jaxserve.kv_events.events import CacheEvent, Cleared
from jaxserve.kv_events.history import History
from jaxserve.metrics.metrics import Metrics

log = logging.getLogger(__name__)

_MERGED = 0.1
"""Seconds of steps that one batch holds. Batches should be few: a request for a number that is no
longer kept gets all later numbers, and each batch wakes a thread beside the engine's. Routers that
guess in the meantime do so for longer: llm-d for 2 s.
"""

_LOOK = 200
"""Milliseconds between two checks of whether the publisher is closed."""

_PATIENCE = 2.0
"""An answer is given up if the peer does not read for this many seconds."""

_ANSWER = 120.0
"""The most seconds for one answer; llm-d waits as long."""

_END = (-1).to_bytes(8, "big", signed=True)


class ZmqPublisher:
    """Publishes the events of one scheduler.

    A slow or dead subscriber loses batches when `hwm` of them wait for it. It then sees a missing
    number and requests it. If `max_queue_size` steps wait to be numbered, which happens only
    without CPU time, further steps are dropped and counted. The next batch then begins with
    `Cleared`, so that an index knows less than is cached, never more.
    """

    def __init__(self, config: KVEventsConfig, metrics: Metrics):
        """Opens the sockets and starts the threads. Raises ConfigError if an address cannot be
        used."""
        self._metrics = metrics
        self._limit = config.max_queue_size
        self._topic = config.topic.encode()
        self._queue: SimpleQueue[list[CacheEvent] | None] = SimpleQueue()
        self._lossy = False
        """Whether the events of the last step were dropped."""
        self._closed = False
        self._history = History(config.buffer_steps, as_array=config.encoding == "array")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._live = self._replay = None
        try:
            self._live = self._open(zmq.PUB, config.hwm)
            endpoint = _attach(self._live, config.endpoint, bind=config.binds)
            replay = config.replay_endpoint
            if replay is not None:
                # A peer reports its reads in steps of half this number, so a whole ring must fit.
                self._replay = self._open(zmq.ROUTER, 2 * (config.buffer_steps + 1))
                self._replay.setsockopt(zmq.ROUTER_MANDATORY, 1)
                replay = _attach(self._replay, replay, bind=True)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self.config = replace(config, publisher="zmq", endpoint=endpoint, replay_endpoint=replay)
        """The configuration with the ports that the system chose."""
        self._threads = [threading.Thread(target=self._send, name="kv-events", daemon=True)]
        if self._replay is not None:
            self._threads.append(
                threading.Thread(
                    target=self._answer_all, args=(self._replay,), name="kv-replay", daemon=True
                )
            )
        for thread in self._threads:
            thread.start()

    @property
    def num_batches(self) -> int:
        """Number of batches so far."""
        return self._history.num_batches

    @property
    def num_pages(self) -> int:
        """Number of cached pages that the batches so far reported."""
        return self._history.num_pages

    @property
    def sources(self) -> dict[str, dict[str, Any]]:
        """The configuration by data-parallel rank, as in the answer of `GET /kv_event_sources`."""
        return {"0": asdict(self.config)}

    def publish(self, events: list[CacheEvent]) -> None:
        """Takes the events of a step; a `Sink`. Call it on one thread."""
        if self._queue.qsize() >= self._limit:
            self._lossy = True
            self._metrics.count_dropped_kv_events()
            return
        if self._lossy:
            self._lossy, events = False, [Cleared(), *events]
        self._queue.put(events)

    def close(self) -> None:
        """Sends the waiting events and ends. Nothing is published afterwards."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            for thread in self._threads:
                thread.join()
            self._context.destroy(linger=0)

    def _open(self, kind: int, hwm: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, hwm)
        socket.setsockopt(zmq.LINGER, 0)
        return socket

    # On the thread of live events.

    def _send(self) -> None:
        assert self._live is not None
        going_on = True
        while going_on:
            events, going_on = self._next_events()
            try:
                batch = self._history.append(events)
                if batch is None:
                    continue
                number, payload = batch
                self._live.send_multipart([self._topic, number.to_bytes(8, "big"), payload])
                self._metrics.count_kv_event_batch()
            except Exception:
                log.exception("sending a batch of KV cache events failed")

    def _next_events(self) -> tuple[list[CacheEvent], bool]:
        """Waits for events. Returns the events of `_MERGED` seconds, and whether more may come."""
        taken = self._queue.get()
        if taken is None:
            return [], False
        if not self._closed:
            time.sleep(_MERGED)
        events = list(taken)
        try:
            while True:
                more = self._queue.get_nowait()
                if more is None:
                    return events, False
                events += more
        except Empty:
            return events, True

    # On the thread of past events.

    def _answer_all(self, socket: zmq.Socket[bytes]) -> None:
        while not self._closed:
            if not socket.poll(_LOOK):
                continue
            try:
                self._answer(socket, socket.recv_multipart())
            except zmq.ZMQError as error:
                log.warning("sending past KV cache events failed: %s", error)
            except Exception:
                log.exception("sending past KV cache events failed")

    def _answer(self, socket: zmq.Socket[bytes], request: list[bytes]) -> None:
        if len(request) != 3 or len(request[2]) != 8:
            log.warning("a request for past KV cache events must be an empty frame and a number")
            return
        peer, start = request[0], int.from_bytes(request[2], "big")
        self._metrics.count_kv_event_replay()
        deadline = time.monotonic() + _ANSWER
        for number, payload in self._history.since(start):
            frames = [peer, b"", self._topic, number.to_bytes(8, "big"), payload]
            if self._closed or not _sent(socket, frames, deadline):
                return
        _sent(socket, [peer, b"", b"", _END, b""], deadline)


def _sent(socket: zmq.Socket[bytes], frames: list[bytes], deadline: float) -> bool:
    """Sends one part of an answer. Returns False if the peer does not read in time. Raises ZMQError
    if the peer is gone."""
    until = min(deadline, time.monotonic() + _PATIENCE)
    while True:
        try:
            socket.send_multipart(frames, zmq.NOBLOCK)
            return True
        except zmq.Again:
            if time.monotonic() > until:
                return False
            time.sleep(0.002)


def _attach(socket: zmq.Socket[bytes], address: str, *, bind: bool) -> str:
    """Binds or connects a socket. Returns the address, with the port if the system chose it. Raises
    ConfigError."""
    try:
        (socket.bind if bind else socket.connect)(address)
    except zmq.ZMQError as error:
        why = os.strerror(error.errno or 0)
        raise ConfigError(f"--kv-events-config: cannot use {address}: {why}") from None
    head, _, port = address.rpartition(":")
    if not bind or not address.startswith("tcp://") or port not in ("*", "0"):
        return address
    chosen = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    return f"{head}:{chosen.rpartition(':')[2]}"

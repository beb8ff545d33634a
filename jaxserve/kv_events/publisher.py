"""The ZMQ sockets of KV cache events: live batches, and past ones on request.

Nothing here waits on the engine's thread, which only puts a step's events into a queue. One thread
numbers, keeps and sends batches, another answers requests for past ones.

Framing is that of vLLM 0.33. Live (PUB): topic, number, payload. A request (to ROUTER): an empty
frame and a number. Each part of the answer: an empty frame, topic, number, payload; the last has
the number -1 and no payload. Numbers are 8 bytes, big-endian.
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
"""Seconds of steps that one batch holds. Whoever asks for a number that is no longer kept gets all
numbers since, so there should not be too many; and each batch wakes a thread beside the engine's.
Routers that wait less guess: llm-d for 2 s.
"""

_LOOK = 200
"""Milliseconds between two looks whether the publisher is closed."""

_PATIENCE = 2.0
"""Seconds without reading after which the answer to a request is given up."""

_ANSWER = 120.0
"""Seconds that an answer may take in all; llm-d waits as long."""

_END = (-1).to_bytes(8, "big", signed=True)


class ZmqPublisher:
    """Publishes the events of one scheduler.

    A slow or dead subscriber loses batches once `hwm` of them wait for it. It sees that a number
    is missing and asks for it. If `max_queue_size` steps wait to be numbered, which only a process
    without processor time can cause, further steps are dropped and counted, and the next batch
    begins with `Cleared`: an index then knows less than is cached, never more.
    """

    def __init__(self, config: KVEventsConfig, metrics: Metrics):
        """Listens and starts the threads. Raises ConfigError: an address cannot be used."""
        self._metrics = metrics
        self._limit = config.max_queue_size
        self._topic = config.topic.encode()
        self._queue: SimpleQueue[list[CacheEvent] | None] = SimpleQueue()
        self._lossy = False
        """The events of the last step were dropped."""
        self._closed = False
        self._history = History(config.buffer_steps, as_array=config.encoding == "array")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._live = self._replay = None
        try:
            self._live = self._open(zmq.PUB, config.hwm)
            endpoint = _attach(self._live, config.endpoint, bind=config.binds)
            replay = config.replay_endpoint
            if replay is not None:
                # A peer tells what it has read in halves of this number, so it fits a whole ring.
                self._replay = self._open(zmq.ROUTER, 2 * (config.buffer_steps + 1))
                self._replay.setsockopt(zmq.ROUTER_MANDATORY, 1)
                replay = _attach(self._replay, replay, bind=True)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self.config = replace(config, publisher="zmq", endpoint=endpoint, replay_endpoint=replay)
        """With the ports that the system chose."""
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
        """Batches that have a number."""
        return self._history.num_batches

    @property
    def num_pages(self) -> int:
        """Cached pages that batches so far told of."""
        return self._history.num_pages

    @property
    def sources(self) -> dict[str, dict[str, Any]]:
        """The configuration by data-parallel rank, as `GET /kv_event_sources` answers."""
        return {"0": asdict(self.config)}

    def publish(self, events: list[CacheEvent]) -> None:
        """Takes the events of a step: a `Sink`. Call it on one thread."""
        if self._queue.qsize() >= self._limit:
            self._lossy = True
            self._metrics.count_dropped_kv_events()
            return
        if self._lossy:
            self._lossy, events = False, [Cleared(), *events]
        self._queue.put(events)

    def close(self) -> None:
        """Sends what waits, and ends. Nothing is published afterwards."""
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
                log.exception("a batch of KV cache events could not be sent")

    def _next_events(self) -> tuple[list[CacheEvent], bool]:
        """Waits for events and returns those of `_MERGED` seconds, and whether more may come."""
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
                log.warning("past KV cache events could not be sent: %s", error)
            except Exception:
                log.exception("past KV cache events could not be sent")

    def _answer(self, socket: zmq.Socket[bytes], request: list[bytes]) -> None:
        if len(request) != 3 or len(request[2]) != 8:
            log.warning("a request for past KV cache events is not an empty frame and a number")
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
    """Sends one part of an answer. Returns False if the peer does not read, or not until the
    deadline. ZMQError: the peer is gone."""
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
    """Binds or connects a socket. Returns the address, with the port that the system chose if it
    was left open. Raises ConfigError."""
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

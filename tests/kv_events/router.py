"""A router that knows an engine by its KV cache events alone.

`Index` takes hashes for opaque names, as routers do, and finds a prompt by its tokens. `Subscriber`
follows the rules of llm-d's (`pkg/kvevents/zmq_subscriber.go`): a gap is asked for, a number that
goes back is a restart, and the answer to a request must have every number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import zmq

from tests.kv_events.wire_schema import AllBlocksCleared, BlockRemoved, BlockStored, Event, decode


class Change(NamedTuple):
    """One page, or all of them: the smallest part of an event."""

    stored: bool = False
    group: int = 0
    name: int = 0
    key: int = 0


CLEARED = Change(name=-1)


class Index:
    """Which pages an engine has, and the checks that no event contradicts those before it."""

    def __init__(self, *, page_size: int, windows: Sequence[int | None] = (None,), own: int = 0):
        """`windows`: of each cache group. `own`: tokens that each sequence computes itself."""
        self._size, self._windows, self._own = page_size, windows, own
        self._keys: dict[tuple[int | str, tuple[int, ...]], int] = {}
        self._key_of: dict[int, int] = {}
        """By name. Kept for names that are gone: a window's pages follow pages that may be."""
        self._parent: dict[int, int | None] = {}
        self._pages: list[dict[int, int]] = [{} for _ in windows]
        """Key to name."""
        self._names: list[set[int]] = [set() for _ in windows]
        self._children: dict[int, int] = {}
        """How many pages of groups without a window follow a page."""

    @property
    def names(self) -> list[set[int]]:
        """The hashes of the pages of each group."""
        return self._names

    def changes(self, event: Event) -> Iterator[Change]:
        """The parts of an event, which must be applied in their order."""
        match event:
            case AllBlocksCleared():
                yield CLEARED
            case BlockRemoved():
                assert event.medium == "GPU" and event.block_hashes
                for name in event.block_hashes:
                    yield Change(False, event.group_idx or 0, name)
            case BlockStored():
                yield from self._stored(event)

    def _stored(self, event: BlockStored) -> Iterator[Change]:
        group, window = event.group_idx or 0, self._windows[event.group_idx or 0]
        grouped = len(self._windows) > 1 or window is not None
        kind = "full_attention" if window is None else "sliding_window"
        assert (event.group_idx, event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window) == (
            (group, kind, window) if grouped else (None, None, None)
        )
        assert (event.medium, event.lora_id, event.lora_name) == ("GPU", None, None)
        assert event.block_size == self._size and event.block_hashes
        assert len(event.token_ids) == self._size * len(event.block_hashes)
        salt = event.cache_salt or ""
        keys = event.extra_keys or [None] * len(event.block_hashes)
        first = (salt,) if salt and event.parent_block_hash is None else None
        assert keys == [first, *[None] * (len(event.block_hashes) - 1)]
        parent = event.parent_block_hash
        for number, name in enumerate(event.block_hashes):
            before = salt if parent is None else self._key_of_parent(parent, window)
            tokens = event.token_ids[number * self._size : (number + 1) * self._size]
            # A page that others followed before it was told of keeps its key.
            known = self._key_of.get(name, len(self._keys))
            key = self._keys.setdefault((before, tuple(tokens)), known)
            self._key_of[name], self._parent[name] = key, parent
            yield Change(True, group, name, key)
            parent = name

    def _key_of_parent(self, name: int, window: int | None) -> int:
        """A window's pages may follow one that was never told of, if all groups have a window."""
        if window is not None and all(each is not None for each in self._windows):
            self._key_of.setdefault(name, -1 - len(self._key_of))
        return self._key_of[name]

    def apply(self, change: Change) -> None:
        if change == CLEARED:
            for pages in (*self._pages, *self._names):
                pages.clear()
            self._children.clear()
            return
        stored, group, name, _ = change
        pages, names, parent = self._pages[group], self._names[group], self._parent[name]
        key = self._key_of[name]
        chained = self._windows[group] is None
        if stored:
            assert key not in pages, "stored twice"
            assert not chained or parent is None or parent in names, "no parent"
            pages[key] = name
            names.add(name)
        else:
            assert pages.pop(key, None) == name, "removed, but not there"
            assert not chained or not self._children.get(name), "removed before what follows it"
            names.remove(name)
        if chained and parent is not None:
            self._children[parent] = self._children.get(parent, 0) + (1 if stored else -1)

    def predict(self, tokens: Sequence[int], salt: str = "", *, most: int | None = None) -> int:
        """How many tokens of a prompt the engine finds: whole pages, and at least one token is
        left. `most`: no more of the prompt than this may be found."""
        size = self._size
        most = min(len(tokens) - 1, len(tokens) if most is None else most)
        keys: list[int | None] = []
        key: int | str | None = salt
        for start in range(0, most - size + 1, size):
            key = (
                None if key is None else self._keys.get((key, tuple(tokens[start : start + size])))
            )
            keys.append(key)
        for count in range(len(keys), 0, -1):
            if all(self._has(group, keys[:count]) for group in range(len(self._windows))):
                return max(count * size - self._own, 0)
        return 0

    def _has(self, group: int, keys: list[int | None]) -> bool:
        """Whether a sequence could go on behind these pages."""
        window, end = self._windows[group], len(keys) * self._size
        first = 0 if window is None else max(end - window + 1, 0) // self._size
        return all(key in self._pages[group] for key in keys[first:])


class Numbered(NamedTuple):
    number: int
    events: list[Event]


class Subscriber:
    """Live batches of an engine, completed by replays."""

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        array: bool = False,
        hwm: int = 0,
        on_restart: Callable[[], None] = lambda: None,
    ):
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._live = self._context.socket(zmq.SUB)
        self._live.setsockopt(zmq.RCVHWM, hwm)
        if hwm:
            self._live.setsockopt(zmq.RCVBUF, 4096)
        self._live.setsockopt(zmq.LINGER, 0)
        self._live.setsockopt(zmq.RECONNECT_IVL, 10)
        self._live.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._live.connect(endpoint)
        self._replay, self._topic, self._array = replay_endpoint, topic, array
        self._on_restart = on_restart
        self.last = self._live_number = -1
        """The last number that was passed on, and the last one that came live."""
        self.replays = self.restarts = 0

    def close(self) -> None:
        self._context.destroy(linger=0)

    def receive(self, timeout: float = 0.0) -> Iterator[Numbered]:
        """All batches that are there, in the order of their numbers with none left out."""
        while self.poll(timeout):
            timeout = 0.0
            yield from self.take(*self.next_live())

    def poll(self, timeout: float = 0.0) -> bool:
        return bool(self._live.poll(int(timeout * 1000)))

    def next_live(self) -> tuple[int, bytes]:
        """Number and payload of the next live batch."""
        topic, number, payload = self._live.recv_multipart()
        assert topic.decode() == self._topic and len(number) == 8
        return int.from_bytes(number, "big"), payload

    def take(self, number: int, payload: bytes) -> Iterator[Numbered]:
        """A live batch, behind those that were missed."""
        if self._replay is not None:
            if number < self._live_number:
                self.restarts += 1
                self._on_restart()
                self.last = -1
            self._live_number = number
            if number > self.last + 1:
                yield from self.replay()
            if number <= self.last:
                return
            assert number == self.last + 1, "a number is missing"
        self.last = number
        yield Numbered(number, decode(payload, array=self._array))

    def replay(self) -> Iterator[Numbered]:
        """What was missed, by a request to the engine."""
        assert self._replay is not None
        self.replays += 1
        for number, payload in request_replay(self._context, self._replay, self.last + 1):
            assert number == self.last + 1, "a number is missing in a replay"
            self.last = number
            yield Numbered(number, decode(payload, array=self._array))


def request_replay(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, start: int
) -> Iterator[tuple[int, bytes]]:
    """Number and payload of each batch of the answer."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.connect(endpoint)
    try:
        socket.send_multipart([b"", start.to_bytes(8, "big")])
        while True:
            assert socket.poll(20_000), "no answer to a request for past batches"
            empty, topic, number, payload = socket.recv_multipart()
            assert empty == b""
            if not payload:
                assert int.from_bytes(number, "big", signed=True) == -1 and topic == b""
                return
            yield int.from_bytes(number, "big"), payload
    finally:
        socket.close()

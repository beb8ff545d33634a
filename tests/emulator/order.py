"""What comes before what: vector clocks of a program's partitions and of their copies.

Partitions are ordered by barriers alone: who waits knows what those knew who arrived. So each byte
of shared memory holds who wrote it last, and when, and when each partition read it last; a read
must know of the write before it, a write of that and of all reads. This is how FastTrack finds
races (Flanagan and Freund, PLDI 2009). A copy into shared memory is a writer of its own, whose time
is the phase of the barrier that it completes, or the group in which it is waited for.

Two more rules: tensor cores see what was stored from registers, or copied without TMA, only after a
fence (PTX, "Async proxy"); and a kernel that starts before those before it are done reads only what
they do not write, and writes nothing, until it has waited for them (PTX, griddepcontrol).

Programs that leave one another sums in memory order themselves by atomic operations on flags in
the same way: who acquires knows what those knew who released.

What the threads of one partition do is the compiler's to order.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

KERNELS = 1
"""Who the kernels before this one are, among those whose times are known."""

_MOST = 96
"""Who takes part in a program, at most: partitions, groups of copies, barriers."""

_UNDER_WAY = np.iinfo(np.int32).max
"""A time that nobody knows of."""

_REWRITERS = frozenset({"_attend_tiles"})
"""Partitions of these functions store the same numbers in the same places and do not wait for one
another: attention's warpgroups zero what lies past the end of a context."""

_NOT_OF_KERNELS = frozenset({
    *("w_ptr", "packed_ptr", "scale_ptr", "second_ptr", "weight_ptr"),
    *("shared_packed_ptr", "shared_scale_ptr", "shared_second_ptr"),
    *("q_norm_ptr", "k_norm_ptr", "bias_ptr", "cos_ptr", "sin_ptr"),
    *("first_ptr", "length_ptr", "slot_ptr", "position_ptr", "page_ptr", "offset_ptr", "table_ptr"),
    *("kv_ptr", "scales_ptr", "key_words_ptr", "value_words_ptr", "raw_ptr"),
    *("state_ptr", "a_log_ptr", "router_bias_ptr", "sinks_ptr", "active_ptr"),
})  # fmt: skip
"""Arguments that no kernel of a PDL call writes: weights, the plan of the step, and pages and
recurrent state, of which a kernel reads those of its layer that earlier steps have written."""

_OF_THE_LAST_BUT_ONE = frozenset({"early_scores_ptr", "early_ids_ptr", "early_ends_ptr"})
"""Arguments that the kernel before does not write, but the one before that. They are there early if
the kernel before starts its dependents only when it has waited."""


class Race(RuntimeError):
    """Two use the same memory, and nothing says which of them is first."""


class _Stored(NamedTuple):
    """What tensor cores do not see yet."""

    memory: Touched
    data: NDArray[Any]
    who: int
    when: int


class Order:
    """Of one program, or of all that wait for one another: who takes part, by number. Nobody is
    number 0."""

    def __init__(self, programs: int = 1, *, early: bool, after_waiting: bool = False) -> None:
        """early: they may start before the kernels before them are done; after_waiting: but not
        before the last of those has waited."""
        self.early, self.after_waiting = early, after_waiting
        self.starts_early = False
        """Dependents may start before those kernels are done."""
        self.most = programs * _MOST
        self.flags: dict[Any, NDArray[np.int32]] = {}
        """What those knew who released one."""
        self.failed = threading.Event()
        self.names = ["nobody", "the kernels before"]
        self.lock = threading.RLock()
        self.stored: list[_Stored] = []

    def enter(self, name: str) -> int:
        self.names.append(name)
        assert len(self.names) <= self.most
        return len(self.names) - 1


class Partition:
    """One of a program's, and what it knows of all that take part: up to when."""

    def __init__(self, order: Order, name: str, known: NDArray[np.int32] | None = None) -> None:
        self.order, self.name = order, name
        self.number, self._copies = order.enter(name), order.enter(f"a copy of {name}")
        self._groups = 0
        self.known = np.zeros(order.most, np.int32) if known is None else known.copy()
        self.known[self.number] = 1

    def learn(self, known: NDArray[np.int32]) -> None:
        np.maximum(self.known, known, out=self.known)

    def release(self) -> NDArray[np.int32]:
        """What others learn who wait for it; what it does from now on is not part of that."""
        known = self.known.copy()
        self.known[self.number] += 1
        return known

    def commit(self, places: Sequence[Any]) -> None:
        """A group of copies begins."""
        self._groups += 1
        for each in places:
            each.touched.write(each.data, (self._copies, self._groups))

    def wait_for_groups(self, most: int) -> None:
        self.known[self._copies] = max(self.known[self._copies], self._groups - most)

    def wait_for_kernels(self) -> None:
        self.known[KERNELS] = 1

    def start_dependents(self) -> None:
        """Also what a program does that ends."""
        self.order.starts_early |= self._is_early()

    def atomic(self, flag: Any, sem: str) -> None:
        """An operation on a flag; the caller has the order's lock."""
        if sem in ("acquire", "acq_rel") and flag in self.order.flags:
            self.learn(self.order.flags[flag])
        if sem in ("release", "acq_rel"):
            self.order.flags[flag] = self.release()

    def fence(self) -> None:
        """Tensor cores see what this partition knows of."""
        with self.order.lock:
            for each in self.order.stored:
                if each.when <= self.known[each.who]:
                    each.memory.seen(each.data, each.who, each.when)
            self.order.stored = [
                each for each in self.order.stored if each.when > self.known[each.who]
            ]

    def reads_argument(self, name: str) -> None:
        known = self.order.after_waiting and name in _OF_THE_LAST_BUT_ONE
        if self._is_early() and name not in _NOT_OF_KERNELS and not known:
            raise Race(f"{self.name} reads {name} before the kernels before it are done")

    def writes_argument(self, name: str) -> None:
        if self._is_early():
            raise Race(f"{self.name} writes {name} before the kernels before it are done")

    def _is_early(self) -> bool:
        return self.order.early and not self.known[KERNELS]


class _Here(threading.local):
    partition: Partition


HERE = _Here()
"""The partition that this thread runs."""


class Touched:
    """Memory: who used its elements, and when. `data` are some of them: their indices."""

    def __init__(self, size: int) -> None:
        self._writer = np.zeros(size, np.int16)
        self._written = np.zeros(size, np.int32)
        self._stored = np.zeros(size, np.bool_)
        self._reads: dict[int, NDArray[np.int32]] = {}

    def read(self, data: NDArray[Any]) -> None:
        """Race: who wrote a byte may not be done."""
        here = HERE.partition
        with here.order.lock:
            self._read(data, int(here.known[here.number]))

    def multiply(self, data: NDArray[Any], *, done: bool) -> None:
        """By tensor cores, which read it until they are done. Race: see `read`, and when they do
        not see what was stored."""
        here = HERE.partition
        with here.order.lock:
            if (self._of(self._stored, data) & self._others(data)).any():
                raise Race(f"{here.name} multiplies what was stored and not fenced")
            self._read(data, int(here.known[here.number]) if done else _UNDER_WAY)

    def _read(self, data: NDArray[Any], when: int) -> None:
        here = HERE.partition
        self._check_writers(data, "reads")
        if here.number not in self._reads:
            self._reads[here.number] = np.zeros_like(self._written)
        self._set(self._reads[here.number], data, when)

    def write(
        self, data: NDArray[Any], by: tuple[int, int] | None = None, *, tma: bool = False
    ) -> None:
        """By this partition, or a copy: who and when. Race: who wrote or reads a byte may not be
        done."""
        here = HERE.partition
        who, when = by or (here.number, int(here.known[here.number]))
        with here.order.lock:
            self._check_writers(data, "writes")
            self._check_readers(data)
            self._set(self._writer, data, who)
            self._set(self._written, data, when)
            self._set(self._stored, data, not tma)
            if not tma:
                here.order.stored.append(_Stored(self, data, who, when))

    def seen(self, data: NDArray[Any], who: int, when: int) -> None:
        """By tensor cores from now on, where this was the last write."""
        written = (self._of(self._writer, data) == who) & (self._of(self._written, data) == when)
        self._set(self._stored, data, self._of(self._stored, data) & ~written)

    def _check_writers(self, data: NDArray[Any], does: str) -> None:
        here = HERE.partition
        writer = self._of(self._writer, data)
        unknown = (self._of(self._written, data) > here.known[writer]) & self._others(data)
        if unknown.any():
            name = here.order.names[int(writer[unknown][0])]
            raise Race(f"{here.name} {does} where {name} may still write")

    def _check_readers(self, data: NDArray[Any]) -> None:
        here = HERE.partition
        for reader, times in self._reads.items():
            name = here.order.names[reader]
            rewrites = reader != here.number and name == here.name and name in _REWRITERS
            if not rewrites and (self._of(times, data) > here.known[reader]).any():
                raise Race(f"{here.name} writes where {name} may still read")

    def _others(self, data: NDArray[Any]) -> Any:
        """Which bytes were not written by one that writes the same as this partition."""
        here = HERE.partition
        if here.name not in _REWRITERS:
            return True
        names = enumerate(here.order.names)
        same = [each for each, name in names if name == here.name and each != here.number]
        return ~np.isin(self._of(self._writer, data), same)

    def _of(self, table: NDArray[Any], data: NDArray[Any]) -> NDArray[Any]:
        return table[data]

    def _set(self, table: NDArray[Any], data: NDArray[Any], values: Any) -> None:
        table[data] = values


class TouchedShared(Touched):
    """An allocation of shared memory, by bytes. `data` are views of it."""

    def __init__(self, data: NDArray[Any]) -> None:
        super().__init__(data.nbytes)
        self._start = data.ctypes.data

    def _of(self, table: NDArray[Any], data: NDArray[Any]) -> NDArray[Any]:
        """[..., bytes of an element]."""
        at = data.ctypes.data - self._start
        strides = [each * table.itemsize for each in (*data.strides, 1)]
        return as_strided(table[at:], (*data.shape, data.itemsize), strides)

    def _set(self, table: NDArray[Any], data: NDArray[Any], values: Any) -> None:
        self._of(table, data)[...] = values

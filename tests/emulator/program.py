"""A program of a kernel: its partitions, and what they have under way."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.emulator.cluster import Cluster
from tests.emulator.memory import Barrier, Descriptor, Pointer, Shared, allocate, choose
from tests.emulator.order import HERE, Partition
from tests.emulator.values import LANGUAGE, Tensor, product, scalar

type Partitions = Sequence[tuple[Callable[..., Any], Sequence[Any]]]


class Sums:
    """An accumulator, of which products may be under way."""

    type = Tensor.type

    def __init__(self, values: Any) -> None:
        self.values, self.under_way = values, 0
        self.shape = values.shape
        self._in_pairs = False

    def in_pairs(self) -> Sums:
        """As `hopper_integers.pairs_under_way`: of words, once it is a value."""
        self._in_pairs = True
        return self

    def done(self) -> Any:
        return self.values.to(np.uint32, bitcast=True) if self._in_pairs else self.values


class _Begun(threading.local):
    """By a partition."""

    def __init__(self) -> None:
        self.warps = 0
        self.products: deque[tuple[Any, Any, Sums, bool]] = deque()
        self.copies: list[tuple[Shared, Callable[[], None]]] = []
        self.groups: deque[list[tuple[Shared, Callable[[], None]]]] = deque()


class Program:
    """One place of the grid. By chance, copies are made when they begin, or when they must be."""

    def __init__(
        self,
        at: tuple[int, ...],
        grid: tuple[int, ...],
        warps: int,
        seed: int,
        failed: threading.Event,
        cluster: Cluster,
    ) -> None:
        """failed: one of the grid has. cluster: that of the program."""
        self._at, self._grid, self._warps = (*at, 0, 0), (*grid, 1, 1), warps
        self._failed, self._cluster = failed, cluster
        self._random = np.random.default_rng([seed, *at])
        self._begun = _Begun()

    def names(self) -> dict[str, Any]:
        """In place of what kernels' modules import."""
        language = SimpleNamespace(
            **LANGUAGE,
            where=choose,
            program_id=lambda axis: scalar(self._at[axis]),
            num_programs=lambda axis: scalar(self._grid[axis]),
            num_warps=lambda: self._begun.warps or self._warps,
            load=lambda pointer, mask=True, other=0, **_how: pointer.load(mask, other),
            store=lambda pointer, values, mask=True: pointer.store(values, mask),
            atomic_add=self._add,
            atomic_xchg=lambda pointer, value, sem, scope: pointer.exchange(value, sem),
            allocate_shared_memory=allocate,
            warp_specialize=self._specialize,
        )
        return {
            "gl": language,
            "tl": language,
            "mbarrier": SimpleNamespace(
                MBarrierLayout=lambda: Barrier,
                init=lambda bar, count: bar.begin(count),
                wait=lambda bar, phase, pred=True: bar.wait(int(phase)) if pred else None,
                expect=lambda bar, size, pred=True: bar.arrive(1, int(size)) if pred else None,
                arrive=lambda bar, count=1, pred=True: bar.arrive(count) if pred else None,
            ),
            "tma": SimpleNamespace(async_load=self._copy_block),
            "async_copy": SimpleNamespace(
                async_load=self._copy,
                commit_group=self._commit,
                wait_group=self._wait_for_groups,
                mbarrier_arrive=self._arrive_after_copies,
            ),
            "warpgroup_mma": self._multiply,
            "warpgroup_mma_wait": self._wait_for_products,
            "pairs_under_way": lambda acc: acc.in_pairs(),
            "mma_v2": lambda a, b, acc: product(a, b, acc),
            "fence_async_shared": lambda: HERE.partition.fence(),
            "begin_cluster": lambda: self._cluster.begin(self._at[0]),
            "sum_of_cluster": lambda x, space: space.sum(self._at[0], x),
            "gdc_wait": lambda: HERE.partition.wait_for_kernels(),
            "gdc_launch_dependents": lambda: HERE.partition.start_dependents(),
        }

    def _add(self, pointer: Pointer, value: Any, *, sem: str, scope: str) -> Any:
        """Also what who waits for another program does, again and again."""
        if self._failed.is_set():
            raise RuntimeError("another program failed")
        time.sleep(0)
        return pointer.add(value, sem)

    def _specialize(
        self, partitions: Partitions, warps: Sequence[int], registers: Sequence[int]
    ) -> None:
        errors: list[BaseException] = []
        before, after = HERE.partition, list[Partition]()

        def run(count: int, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
            self._begun.warps = count
            HERE.partition = Partition(before.order, function.__name__, before.known)
            after.append(HERE.partition)
            try:
                function(*arguments)
                if self._begun.products:
                    raise RuntimeError("a partition ends with products under way")
            except BaseException as error:
                errors.append(error)
                before.order.failed.set()

        threads = [
            threading.Thread(target=run, args=(count, *each), daemon=True)
            for count, each in zip((self._warps, *warps), partitions, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for each in after:
            before.learn(each.known)
        if errors:  # not that of one who waited for who failed
            raise min(errors, key=lambda error: isinstance(error, TimeoutError))

    def _multiply(
        self, a: Any, b: Any, acc: Any, *, use_acc: Any = True, is_async: bool = False
    ) -> Any:
        sums = acc if isinstance(acc, Sums) else Sums(acc)
        sums.under_way += 1
        _operands(a, b, done=False)
        self._begun.products.append((a, b, sums, bool(use_acc)))
        return sums if is_async else self._wait_for_products(0, [sums])

    def _wait_for_products(self, most: int, deps: Sequence[Any]) -> Any:
        """They read shared memory until now. An accumulator whose last one is done is a value
        again."""
        while len(self._begun.products) > most:
            a, b, sums, use_acc = self._begun.products.popleft()
            operands = _operands(a, b, done=True)
            sums.values = product(*operands, sums.values if use_acc else np.zeros_like(sums.values))
            sums.under_way -= 1
            for a, b, *_ in self._begun.products:  # which may read the same
                _operands(a, b, done=False)
        found = [
            each.done() if isinstance(each, Sums) and not each.under_way else each for each in deps
        ]
        return found[0] if len(found) == 1 else tuple(found)

    def _copy_block(
        self, source: Descriptor, at: Sequence[Any], bar: Barrier, place: Shared, pred: Any = True
    ) -> None:
        if not pred:
            return
        wanted, given = (source.dtype, source.block_shape), (place.dtype, list(place.shape))
        if wanted != given:
            raise ValueError(f"a block of {wanted} into {given}")
        start = [int(each) for each in at]
        HERE.partition.reads_argument(source.name)
        bar.copy(lambda: source.copy(start, place), [place], late=self._by_chance())

    def _copy(self, place: Shared, source: Pointer, mask: Any = True) -> None:
        HERE.partition.reads_argument(source.name)

        def make() -> None:
            place.data[...] = np.broadcast_to(source.load_copy(mask), place.shape)

        if self._by_chance():
            make()
            make = _nothing
        self._begun.copies.append((place, make))

    def _commit(self) -> None:
        HERE.partition.commit([place for place, _ in self._begun.copies])
        self._begun.groups.append(self._begun.copies)
        self._begun.copies = []

    def _wait_for_groups(self, most: int) -> None:
        while len(self._begun.groups) > most:
            for _, make in self._begun.groups.popleft():
                make()
        HERE.partition.wait_for_groups(most)

    def _arrive_after_copies(self, bar: Barrier, *, increment_count: bool) -> None:
        """Each thread of the partition for itself."""
        copies, self._begun.copies = self._begun.copies, []

        def make() -> int:
            for _, each in copies:
                each()
            return 0

        bar.copy(
            make,
            [place for place, _ in copies],
            arrivals=32 * self._begun.warps,
            tma=False,
            late=self._by_chance(),
        )

    def _by_chance(self) -> bool:
        return bool(self._random.integers(2))


def _operands(*values: Any, done: bool) -> list[Any]:
    """Of a product that begins or ends."""
    for each in values:
        if isinstance(each, Shared):
            each.touched.multiply(each.data, done=done)
    return [each.data if isinstance(each, Shared) else each for each in values]


def _nothing() -> None:
    """Is left of a copy that is done."""

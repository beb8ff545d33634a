"""The sampler's per-slot tables: penalty counts, logit biases and masks.

The host builds a sequence's rows at admission, and a small compiled program replaces each row as a
whole. Only requests that use a table pay for it. A row is built from all tokens known at admission,
so prefix hits and preemptions do not matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from jaxserve.plan import Admission, StepPlan
from jaxserve.programs.executable_cache import Executable, Program
from jaxserve.runner import sequence_state
from jaxserve_kernels.sampler import (
    BIASED,
    IN_PROMPT,
    MASKED,
    MAX_BIASES,
    MAX_COUNT,
    PENALISED,
    SUPPRESSED,
    SlotTables,
)

_NO_TOKEN = _FOREVER = np.iinfo(np.int32).max
_ALIGNMENT = 128
"""Row widths are multiples of this, because kernels read rows in wide loads."""


def abstract(slots: int, vocab: int) -> SlotTables:
    """Returns the tables' shapes and dtypes for `slots` sequences and one padding row."""
    width = -(-vocab // _ALIGNMENT) * _ALIGNMENT

    def table(columns: int, dtype: DTypeLike) -> Any:
        return jax.ShapeDtypeStruct((slots + 1, columns), dtype)

    return SlotTables(
        counts=table(width, jnp.int16),
        biases=table(3 * MAX_BIASES, jnp.int32),
        masks=table(width // 32, jnp.int32),
    )


def num_bytes(tables: SlotTables) -> int:
    """Returns the device memory of tables, which may be abstract."""
    return sum(table.size * table.dtype.itemsize for table in tables)


def programs(tables: SlotTables) -> list[Program]:
    """Returns the programs of `Uploads`, for tables that may be abstract."""
    return [replacing(table, _name(name, size), size) for name, table, size in _uploads(tables)]


class Uploads:
    """Replaces rows of the tables with programs that were compiled before serving."""

    def __init__(self, tables: SlotTables, executables: Mapping[str, Executable]):
        """`tables` may be abstract. `executables`: those of `programs`, by name."""
        self._programs: dict[str, dict[int, Executable]] = {}
        for name, _, size in _uploads(tables):
            self._programs.setdefault(name, {})[size] = executables[_name(name, size)]
        self._masks: dict[int, bytes] = {}
        """The last mask sent for each slot."""

    def __call__(self, tables: SlotTables, plan: StepPlan) -> SlotTables:
        """Returns the tables, which are donated, with the rows that the plan needs."""
        for admission in plan.admissions:
            for name, row in rows_of(admission, tables):
                tables = self._replaced(tables, name, {admission.slot: row})
                self._masks.pop(admission.slot, None)
        masks = {
            row.slot: row.mask
            for row in plan.rows
            if row.mask is not None and row.mask is not self._masks.get(row.slot)
        }
        if masks:
            self._masks.update(masks)
            words = tables.masks.shape[1]
            rows = {slot: mask_words(mask, words) for slot, mask in masks.items()}
            tables = self._replaced(tables, "masks", rows)
        return tables

    def forget(self) -> None:
        """Forget the masks that were sent: the tables were replaced."""
        self._masks.clear()

    def warm(self, tables: SlotTables) -> SlotTables:
        """Run each program once."""
        for name, programs in self._programs.items():
            for size in programs:
                tables = self._replaced(tables, name, {}, size)
        return tables

    def _replaced(
        self, tables: SlotTables, name: str, rows: Mapping[int, np.ndarray], size: int = 0
    ) -> SlotTables:
        programs, table = self._programs[name], getattr(tables, name)
        size = size or min(size for size in programs if size >= len(rows))
        return tables._replace(**{name: programs[size](table, packed_rows(table, rows, size))})


def _uploads(tables: SlotTables) -> Iterator[tuple[str, Any, int]]:
    """Yields a table's name, the table, and the number of rows that a program replaces."""
    slots = tables.masks.shape[0] - 1
    most = {"counts": (1,), "biases": (1,), "masks": (1, 16, slots)}
    for name, table in tables._asdict().items():
        for size in sorted({min(rows, slots) for rows in most[name]}):
            yield name, table, size


def _name(table: str, rows: int) -> str:
    return f"set_{table}_{rows}"


def replacing(table: Any, name: str, rows: int) -> Program:
    """Returns the program `name` that replaces up to `rows` rows of a table."""
    words = table.shape[1] * table.dtype.itemsize // 4
    packed = jax.ShapeDtypeStruct((rows, 1 + words), jnp.int32)
    return Program(name=name, function=set_rows, arguments=(table, packed), donated=(0,))


def set_rows(table: Array, packed: Array) -> Array:
    """Replaces rows of a table.

    Args:
      table: [slots + 1, width], donated.
      packed: int32 [rows, 1 + width in words]: slot and content. Slots outside are dropped.
    """
    slots, content = packed[:, 0], packed[:, 1:]
    content = lax.bitcast_convert_type(content, table.dtype).reshape(packed.shape[0], -1)
    return table.at[slots].set(content, mode="drop")


def packed_rows(table: Array, rows: Mapping[int, np.ndarray], size: int) -> np.ndarray:
    """Returns the input of `set_rows` for at most `size` rows by slot; the rest is padding."""
    num_slots, width = table.shape
    words = width * table.dtype.itemsize // 4
    packed = np.empty((size, 1 + words), np.int32)
    packed[:, 0] = num_slots
    for index, (slot, row) in enumerate(rows.items()):
        packed[index, 0] = slot
        packed[index, 1:] = row.view(np.int32)
    return packed


def rows_of(admission: Admission, tables: SlotTables) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the name and row of each table that the sequence uses."""
    features = sequence_state.features(admission.params)
    if features & PENALISED:
        yield "counts", _counts(admission, tables.counts.shape[1])
    if features & BIASED:
        yield "biases", _biases(admission)
    if features & MASKED:
        yield "masks", _mask_of(admission.params.allowed_token_ids, tables.masks.shape[1])


def _counts(admission: Admission, width: int) -> np.ndarray:
    """Returns int16 [width]: counts in the output so far, and a bit for tokens of the prompt."""
    prompt, output = np.split(np.asarray(admission.tokens, np.int64), [admission.num_prompt])
    counts = np.zeros(width, np.int16)
    tokens, numbers = np.unique(output, return_counts=True)
    counts[tokens] = np.minimum(numbers, MAX_COUNT)
    counts[prompt] |= np.int16(IN_PROMPT)
    return counts


def _biases(admission: Admission) -> np.ndarray:
    """Returns int32 [3 * MAX_BIASES]: ids, values as bits, end positions; see SlotTables."""
    params = admission.params
    entries = [(token, bias, _FOREVER) for token, bias in params.logit_bias]
    if params.min_tokens:
        until = admission.num_prompt + params.min_tokens
        entries += [(token, SUPPRESSED, until) for token in params.stop_token_ids]
    entries.sort()
    row = np.full((3, MAX_BIASES), _NO_TOKEN, np.int32)
    ids, values, ends = zip(*entries, strict=True)
    row[0, : len(ids)] = ids
    row[1, : len(ids)] = np.asarray(values, np.float32).view(np.int32)
    row[2, : len(ids)] = ends
    return row.reshape(-1)


def _mask_of(tokens: Iterable[int], words: int) -> np.ndarray:
    """Returns an int32 [words] mask that allows these tokens."""
    bits = np.zeros(words * 32, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


def mask_words(mask: bytes, words: int) -> np.ndarray:
    """Returns a mask as int32 [words].

    A shorter mask forbids the remaining tokens. A longer one is cut: a tokenizer may have more
    tokens than the model.
    """
    row = np.zeros(words, np.int32)
    given = np.frombuffer(mask, "<i4")[:words]
    row[: len(given)] = given
    return row

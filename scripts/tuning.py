"""The candidates of `tune_kernels.py`, and how it stores results."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxserve.cli.gpus import GPUS
from jaxserve.model_spec import ModelSpec
from jaxserve_kernels import tables
from jaxserve_kernels.device import Device, card
from jaxserve_kernels.target import Shape

type Key = tuple[str, Shape]
"""An operation, and one of its shapes."""


def pretended(gpu: str) -> Device:
    """A card by its name in `jaxserve plan --gpu`."""
    found = GPUS[gpu]
    alike = card(int(found.capability.replace(".", "")))
    return Device(
        name=found.name,
        compute_capability=alike.compute_capability,
        multiprocessors=found.multiprocessors,
        shared_memory=alike.shared_memory,
        shared_memory_per_block=alike.shared_memory_per_block,
        threads=alike.threads,
    )


def operations(spec: ModelSpec) -> dict[str, Key]:
    """The operations to tune, in the order of the bytes that they read."""
    qkv, ffn = spec.q_size + 2 * spec.kv_size, spec.ffn
    feed_forward: dict[str, Key] = {
        "gate_up": ("dense_matmul", ("gated", 2 * ffn, spec.embed)),
        "down": ("dense_matmul", ("linear", spec.embed, ffn)),
    }
    return {
        **(feed_forward if ffn else {}),
        "qkv": ("dense_matmul", ("linear", qkv, spec.embed)),
        "out": ("dense_matmul", ("linear", spec.embed, spec.q_size)),
        "attention": ("paged_attention", (spec.q_heads // spec.kv_heads, spec.kv_heads)),
        "head": ("dense_matmul", ("linear", spec.vocab_size, spec.embed)),
    }


def candidates(key: Key, tokens: int, device: Device) -> list[dict[str, int]]:
    """Launch parameters to try for an operation's shape."""
    operation, shape = key
    if operation == "paged_attention":
        _, kv_heads = shape
        assert isinstance(kv_heads, int)
        return list(_attentions(tokens, kv_heads, device))
    return list(_products(shape, tokens, device))


def _products(shape: Shape, tokens: int, device: Device) -> Iterator[dict[str, int]]:
    """Tilings that fill the card, with enough bytes in flight and not too much shared memory.

    The shares of a multiprocessor's shared memory were chosen on an H200: a sixth for one program,
    three sevenths for all programs.
    """
    kind, out, depth = shape
    assert isinstance(out, int)
    assert isinstance(depth, int)
    columns = max(16, tokens)
    # `triton_streaming` has four warps' rows, and chooses its stages itself.
    streaming = device.compute_capability // 10 == 9
    tiles, rings = ((64, 128), (3,)) if streaming else ((16, 32, 64, 128), (3, 4, 6))
    few_steps = (64, 128, 256) if streaming else (128, 256)
    steps = (64, 128) if tokens > 32 else few_steps  # inputs of many tokens take memory, too
    least = 0.2 if tokens > 32 else 0.6  # their partial sums cost more than programs gain
    for rows, step, stages in itertools.product(tiles, steps, rings):
        size = (rows + columns) * step * 2 * stages
        if out % rows or depth % step or size >= device.shared_memory_per_block:
            continue
        resident = max(1, min(device.shared_memory_per_block // size, 8))
        few = size < device.shared_memory // 6 or size * resident < device.shared_memory * 3 // 7
        if few or not 8 * 1024 <= rows * step * 2 <= 32 * 1024:
            continue
        for splits in range(1, 17):
            programs = out // rows * splits
            if depth // step % splits or (kind == "gated" and splits > 1):
                continue
            full = programs / (device.multiprocessors * resident)
            if kind != "gated" and out < 100_000 and not least <= full <= 2:
                continue
            if splits > 1 and depth // step // splits < 3:
                continue
            yield {
                "rows": rows, "depth": step, "splits": splits,
                "num_warps": 8 if rows == 128 and not streaming else 4, "num_stages": stages,
            }  # fmt: skip


def _attentions(tokens: int, kv_heads: int, device: Device) -> Iterator[dict[str, int]]:
    """Splits that give from half a program to four programs per multiprocessor."""
    for splits, warps, stages in itertools.product((1, 2, 4, 8, 16, 32), (2, 4), (2, 3)):
        programs = tokens * kv_heads * splits
        if device.multiprocessors // 2 <= programs <= 4 * device.multiprocessors:
            yield {"splits": splits, "num_warps": warps, "num_stages": stages}


def write(operation: str, entries: list[dict[str, Any]], device: Device, folder: Path) -> Path:
    """Replaces the entries of these shapes and numbers of tokens in a card's table. Returns the
    file.

    A card without a table gets one without limits; it still uses the nearest card's limits.

    Args:
      entries: each with `shape`, `tokens`, `parameters` and `source`.
      folder: the folder of the tables.
    """
    file = folder / operation / tables.file_name(device.name)
    table: dict[str, Any] = {
        "device": device.name, "compute_capability": device.compute_capability,
        "limits": {}, "launches": [],
    }  # fmt: skip
    if file.is_file():
        table = json.loads(file.read_text(encoding="utf-8"))
    launches: list[Mapping[str, Any]] = [*table["launches"], *entries]
    new = {(tuple(each["shape"]), each["tokens"]): each for each in launches}
    table["launches"] = [new[key] for key in sorted(new, key=str)]
    file.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    return file

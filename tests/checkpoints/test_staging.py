"""Copies through buffers give every leaf its bytes, however files and leaves are cut."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.models import decoder, registry
from jaxserve_checkpoints import staging
from jaxserve_checkpoints.load import load_params
from jaxserve_checkpoints.orbax import find_step, open_orbax
from jaxserve_checkpoints.reader import CheckpointError, Segment, open_checkpoint
from jaxserve_checkpoints.rules import Ignore, Rule
from jaxserve_checkpoints.staging import LeafArrays, LeafBytes, staging_programs, stream
from jaxserve_checkpoints.stream_sources import assembled_sources, direct_sources
from tests.checkpoints.orbax_files import maxtext_tree, random_tensors, save


class Tree(NamedTuple):
    codes: Any
    scales: Any
    norm: Any


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small arrays are cut into many pieces."""
    monkeypatch.setattr(staging, "BUFFER_BYTES", 4096)
    monkeypatch.setattr(staging, "_SMALL", 100)


def executables(abstract: Any) -> dict[str, Any]:
    return {
        program.name: jax.jit(program.function, donate_argnums=program.donated)
        for program in staging_programs(abstract)
    }


def test_leaves_of_any_dtype_come_from_their_segments(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values = Tree(
        rng.integers(0, 255, (3, 500, 7), np.uint8),
        rng.normal(size=(3, 1001)).astype(jnp.bfloat16),
        rng.normal(size=(11,)).astype(np.float32),
    )
    sources = []
    for name, value in values._asdict().items():
        content, file = value.tobytes(), tmp_path / name
        file.write_bytes(b"before" + content[:1500] + b"between" + content[1500:] + b"after")
        segments = [Segment(file, 6, min(1500, len(content)))]
        if len(content) > 1500:
            segments.append(Segment(file, 1513, len(content) - 1500))
        leaf = jax.ShapeDtypeStruct(value.shape, value.dtype)
        sources.append(LeafBytes(name, leaf, tuple(segments)))
    abstract = Tree(*(source.leaf for source in sources))
    seen: list[tuple[int, int]] = []
    loaded = stream(
        sources, abstract, executables(abstract), progress=lambda *each: seen.append(each)
    )
    for name, value in values._asdict().items():
        got = np.asarray(getattr(loaded, name))
        assert got.dtype == value.dtype and got.tobytes() == value.tobytes(), name
    assert seen[-1][0] <= seen[-1][1] == sum(value.nbytes for value in values)


def test_a_file_that_ends_early_is_named(tmp_path: Path) -> None:
    file = tmp_path / "short"
    file.write_bytes(bytes(5000))
    leaf = jax.ShapeDtypeStruct((6000,), np.uint8)
    source = LeafBytes("leaf", leaf, (Segment(file, 0, 6000),))
    with pytest.raises(CheckpointError, match="short: truncated"):
        stream([source], {"leaf": leaf}, executables({"leaf": leaf}))


GOLDEN = Path(__file__).parents[1] / "golden" / "tied"


@pytest.mark.parametrize("stacked", [True, False])
def test_a_checkpoint_is_loaded_as_by_the_loader_that_can_cast(stacked: bool) -> None:
    checkpoint = open_checkpoint(GOLDEN)
    spec = registry.spec_of(json.loads((GOLDEN / "config.json").read_text()))
    dtype = checkpoint.dtype("model.embed_tokens.weight")
    abstract = decoder.abstract(spec, dtype, stacked=stacked)
    direct = direct_sources(checkpoint, registry.rules(spec), abstract)
    assert direct is not None
    loaded = stream(direct, abstract, executables(abstract))
    expected = load_params(checkpoint, registry.rules(spec), abstract)
    jax.tree.map(np.testing.assert_array_equal, loaded, expected)


def test_a_leaf_takes_its_bytes_from_arrays_as_it_needs_them() -> None:
    taken: list[int] = []

    def arrays() -> Iterator[Any]:
        for index in range(5):
            taken.append(index)
            yield np.full((3, 4), index, np.uint8)[:, ::2]

    leaf = LeafArrays("leaf", jax.ShapeDtypeStruct((5, 6), np.uint8), arrays())
    first, rest = np.empty(10, np.uint8), np.empty(20, np.uint8)
    leaf.read(first)
    assert taken == [0, 1]
    leaf.read(rest)
    np.testing.assert_array_equal([*first, *rest], np.repeat(np.arange(5), 6))


@pytest.mark.parametrize("limit", [1, 10_000, 1 << 30])
@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("scanned", [None, False, True])
def test_what_is_put_together_is_streamed(
    scanned: bool | None, stacked: bool, limit: int, tmp_path: Path
) -> None:
    """Cast from float32: of Hugging Face's files, or of Orbax by layer, or of all layers."""
    config = json.loads((GOLDEN / "config.json").read_text())
    spec = registry.spec_of(config)
    tensors = random_tensors(spec)
    if scanned is None:
        save_file(tensors, tmp_path / "model.safetensors")
        checkpoint: Any = open_checkpoint(tmp_path)
    else:
        save(tmp_path / "saved", maxtext_tree(tensors, spec, scanned=scanned))
        step = find_step(tmp_path / "saved")
        assert step is not None
        checkpoint = open_orbax(step, config)
    abstract, rules = decoder.abstract(spec, jnp.bfloat16, stacked=stacked), registry.rules(spec)
    sources = assembled_sources(checkpoint, rules, abstract, max_bytes_ahead=limit)
    loaded = stream(sources, abstract, executables(abstract))
    expected = load_params(checkpoint, rules, abstract)
    jax.tree.map(np.testing.assert_array_equal, loaded, expected)
    if scanned:
        del sources
        assert all(each._array is None for each in checkpoint._whole.values())


def test_a_part_that_cannot_be_read_ends_the_stream(tmp_path: Path) -> None:
    checkpoint, rules = open_checkpoint(GOLDEN), [Rule("leaf", ("model.norm.weight",))]
    rules += [Ignore("*")]
    abstract = {"leaf": jax.ShapeDtypeStruct(checkpoint.shape("model.norm.weight"), np.float32)}
    sources = assembled_sources(checkpoint, rules, abstract)

    def fails(name: str) -> Any:
        raise CheckpointError("its bytes are missing")

    checkpoint.read = fails  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(CheckpointError, match="its bytes are missing"):
        stream(sources, abstract, executables(abstract))


def test_casts_and_other_axes_are_not_direct(tmp_path: Path) -> None:
    rows = np.ones((4, 2), np.float32)
    save_file({"a": rows, "b": rows}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    along_rows, along_columns = (Rule("leaf", ("a", "b"), axis=axis) for axis in (0, 1))

    def direct(rule: Rule, shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
        return direct_sources(checkpoint, [rule], {"leaf": jax.ShapeDtypeStruct(shape, dtype)})

    assert direct(along_rows, (8, 2)) is not None
    assert direct(along_rows, (8, 2), jnp.bfloat16) is None
    assert direct(along_columns, (4, 4)) is None

"""The engine's own checkpoint: the bits that loading would give, whatever stops its writer."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from jaxserve_checkpoints.convert import convert
from jaxserve_checkpoints.load import encoded_abstract, load_params
from jaxserve_checkpoints.native import FILE, open_native
from jaxserve_checkpoints.native_writer import Busy, NativeWriter
from jaxserve_checkpoints.reader import Checkpoint, CheckpointError, open_checkpoint
from jaxserve_checkpoints.rules import Rule
from jaxserve_checkpoints.stream_sources import direct_sources
from jaxserve_kernels.weights import Int4Weight, quantize_int4

LAYERS = 3
RULES = (
    Rule("layers.{layer}.up", ("l{layer}.a", "l{layer}.b")),
    Rule("layers.{layer}.norm", ("l{layer}.n",)),
    Rule("head", ("head",)),
)
MADE_FROM = {"files": [["model.safetensors", 1, 2]], "dtype": "float32"}
PARTIAL, JOURNAL = f".{FILE}.partial", f".{FILE}.journal"

quantize = jax.jit(quantize_int4)


class Layer(NamedTuple):
    up: Any
    norm: Any


class Params(NamedTuple):
    layers: Any
    head: Any


def encode(path: str, array: jax.Array) -> Any:
    return quantize(array) if path.endswith(".up") else array


def abstract(*, stacked: bool = True) -> Params:
    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    if stacked:
        return Params(Layer(array(LAYERS, 128, 128), array(LAYERS, 5)), array(6, 4))
    return Params((Layer(array(128, 128), array(5)),) * LAYERS, array(6, 4))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("original")
    generator = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"head": (6, 4)}
    for i in range(LAYERS):
        shapes |= {f"l{i}.a": (64, 128), f"l{i}.b": (64, 128), f"l{i}.n": (5,)}
    tensors = {name: generator.normal(size=s).astype(np.float32) for name, s in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return open_checkpoint(folder)


def run(original: Checkpoint, folder: Path, encode: Any = encode) -> Path:
    return convert(original, RULES, abstract(), encode, folder, made_from=MADE_FROM)


@pytest.fixture(scope="module")
def whole(original: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file that every conversion of `original` gives."""
    return run(original, tmp_path_factory.mktemp("whole")).read_bytes()


@pytest.mark.parametrize("stacked", [True, False])
def test_it_holds_what_loading_the_original_gives(
    original: Checkpoint, tmp_path: Path, stacked: bool
) -> None:
    run(original, tmp_path)
    own, plain = open_native(tmp_path), abstract(stacked=stacked)
    own.verify()
    encoded = own.encoded(plain)
    expected = encoded_abstract(plain, encode)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), encoded) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), expected
    )
    assert direct_sources(own.tensors, own.rules(), encoded) is not None
    loaded = load_params(own.tensors, own.rules(), encoded)
    jax.tree.map(
        np.testing.assert_array_equal,
        loaded,
        load_params(original, RULES, plain, encode=encode),
    )


def test_parts_come_layer_after_layer(original: Checkpoint, tmp_path: Path) -> None:
    """Stacked ones, too: some methods need the layers before one."""
    paths: list[str] = []

    def listed(path: str, array: jax.Array) -> Any:
        if not isinstance(array, jax.core.Tracer):
            paths.append(path)
        return encode(path, array)

    run(original, tmp_path, listed)
    layers = [f"layers.{i}.{name}" for i in range(LAYERS) for name in ("up", "norm")]
    assert paths == ["head", *layers]


def names_of(opened: Any) -> list[str]:
    return list(opened.keys())


def test_other_tools_read_it_and_stacks_are_ranges_that_begin_on_a_page(
    original: Checkpoint, tmp_path: Path
) -> None:
    file = run(original, tmp_path)
    with safe_open(file, "numpy") as opened:
        names = names_of(opened)
        assert json.loads(opened.metadata()["jaxserve"])["types"] == {"layers.up": "Int4Weight"}
        np.testing.assert_array_equal(opened.get_tensor("head"), original.read("head"))
    assert {"layers.0.up.packed", "layers.0.up.scale", "layers.2.norm"} <= set(names)
    own = open_native(tmp_path).tensors
    starts = [own.segment(f"layers.{i}.up.packed").offset for i in range(LAYERS)]
    size = own.nbytes("layers.0.up.packed")
    assert starts == [starts[0] + i * size for i in range(LAYERS)]
    assert starts[0] % os.sysconf("SC_PAGE_SIZE") == 0


def test_weights_in_other_floats_are_cast_and_codes_are_not(
    original: Checkpoint, tmp_path: Path
) -> None:
    run(original, tmp_path)
    own = open_native(tmp_path)
    plain = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), abstract(stacked=False)
    )
    loaded = load_params(own.tensors, own.rules(), own.encoded(plain))
    assert loaded.head.dtype == jnp.bfloat16
    assert isinstance(loaded.layers[0].up, Int4Weight)
    assert loaded.layers[0].up.scale.dtype == jnp.float32


class Killed(BaseException):
    """What a writer that is killed does: nothing more."""


@pytest.mark.parametrize("parts", range(LAYERS * 2 + 1))
def test_a_killed_conversion_is_gone_on_with(
    original: Checkpoint, whole: bytes, tmp_path: Path, parts: int
) -> None:
    """The files after a kill are those after an error: a journal line follows its bytes."""
    calls: list[str] = []

    def counted(path: str, array: jax.Array) -> Any:
        if not isinstance(array, jax.core.Tracer):
            if len(calls) == parts:
                raise Killed
            calls.append(path)
        return encode(path, array)

    with pytest.raises(Killed):
        run(original, tmp_path, counted)
    assert not (tmp_path / FILE).exists()
    first, calls = calls, ["later"] * (parts + 1)
    assert run(original, tmp_path, counted).read_bytes() == whole
    again = calls[parts + 1 :]
    assert not set(first) & set(again)
    assert len(first) + len(again) == LAYERS * 2 + 1
    assert {file.name for file in tmp_path.iterdir()} == {FILE}


def interrupted(original: Checkpoint, folder: Path, parts: int = 4) -> None:
    """A conversion that ended after so many parts."""
    todo = parts

    def counted(path: str, array: jax.Array) -> Any:
        nonlocal todo
        if not isinstance(array, jax.core.Tracer):
            todo -= 1
            if todo < 0:
                raise Killed
        return encode(path, array)

    with pytest.raises(Killed):
        run(original, folder, counted)


def cut_the_last_line(folder: Path) -> None:
    text = (folder / JOURNAL).read_bytes()
    (folder / JOURNAL).write_bytes(text[:-5])


def flip_what_is_written(folder: Path) -> None:
    content = bytearray((folder / PARTIAL).read_bytes())
    content[os.sysconf("SC_PAGE_SIZE") + 11] ^= 1
    (folder / PARTIAL).write_bytes(content)


def cut_the_file(folder: Path) -> None:
    os.truncate(folder / PARTIAL, 6000)


def remove_the_file(folder: Path) -> None:
    (folder / PARTIAL).unlink()


def remove_the_journal(folder: Path) -> None:
    (folder / JOURNAL).unlink()


def journal_of_something_else(folder: Path) -> None:
    lines = (folder / JOURNAL).read_text().split("\n")
    (folder / JOURNAL).write_text("\n".join(["0" * 64, *lines[1:]]))


def binary_journal(folder: Path) -> None:
    (folder / JOURNAL).write_bytes(bytes(range(256)))


@pytest.mark.parametrize(
    "damage",
    [
        cut_the_last_line,
        flip_what_is_written,
        cut_the_file,
        remove_the_file,
        remove_the_journal,
        journal_of_something_else,
        binary_journal,
    ],
)
def test_what_an_earlier_writer_left_is_believed_only_with_its_checksum(
    original: Checkpoint, whole: bytes, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    interrupted(original, tmp_path)
    damage(tmp_path)
    assert run(original, tmp_path).read_bytes() == whole


def test_a_smaller_conversion_after_a_larger_one_that_was_killed_is_whole(
    original: Checkpoint, whole: bytes, tmp_path: Path
) -> None:
    """The file that a killed writer leaves has its full size, with other flags too many bytes."""
    with NativeWriter(tmp_path, {"x": np.zeros(len(whole), np.float32)}, {}, {}):
        pass
    assert (tmp_path / PARTIAL).stat().st_size > len(whole)
    assert run(original, tmp_path).read_bytes() == whole
    open_native(tmp_path).verify()


WRITE_UNTIL_KILLED = """
import sys, time
from pathlib import Path
from tests.checkpoints.test_convert import NUMBERED, NativeWriter
with NativeWriter(Path(sys.argv[1]), NUMBERED, {}, {}) as writer:
    for name, array in NUMBERED.items():
        writer.write(name, array)
        print(name, flush=True)
        time.sleep(0.02)
"""
NUMBERED = {f"t{i}": np.full((64, 1024), i, np.float32) for i in range(40)}


def test_a_writer_killed_by_the_system_is_followed_by_one_that_ends(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    arguments = [sys.executable, "-c", WRITE_UNTIL_KILLED, str(tmp_path)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment) as first:
        assert first.stdout is not None
        for _ in range(8):
            first.stdout.readline()
        first.send_signal(signal.SIGKILL)
    assert not (tmp_path / FILE).exists()
    with NativeWriter(tmp_path, NUMBERED, {}, {}) as writer:
        assert 8 <= len(writer.written) < 40
        for name in NUMBERED.keys() - writer.written:
            writer.write(name, NUMBERED[name])
        writer.finish()
    own = open_native(tmp_path)
    own.verify()
    for name, array in NUMBERED.items():
        np.testing.assert_array_equal(own.tensors.read(name), array)


def test_only_one_process_writes_into_a_folder(original: Checkpoint, tmp_path: Path) -> None:
    with (
        NativeWriter(tmp_path, {"x": np.zeros(3, np.float32)}, {}, {}),
        pytest.raises(Busy, match="another process is converting into this folder"),
    ):
        run(original, tmp_path)
    run(original, tmp_path)


def test_a_full_disk_is_said_before_any_work_and_nothing_is_left(
    original: Checkpoint, tmp_path: Path
) -> None:
    """A limit on the size of files stands for a disk without room."""

    def never(path: str, array: jax.Array) -> Any:
        assert isinstance(array, jax.core.Tracer), "a part was converted"
        return encode(path, array)

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        with pytest.raises(
            CheckpointError, match=r"the converted weights take 0.03 MB, .* are free"
        ):
            run(original, tmp_path, never)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


def test_a_finished_conversion_is_checked_and_left_and_another_is_refused(
    original: Checkpoint, tmp_path: Path
) -> None:
    file = run(original, tmp_path)
    before = file.stat().st_mtime_ns
    assert run(original, tmp_path) == file
    assert file.stat().st_mtime_ns == before
    with pytest.raises(CheckpointError, match="another conversion, with other dtype"):
        changed = {**MADE_FROM, "dtype": "bfloat16"}
        convert(original, RULES, abstract(), encode, tmp_path, made_from=changed)


def test_each_flipped_bit_is_found_and_its_tensor_named(
    original: Checkpoint, tmp_path: Path
) -> None:
    file = run(original, tmp_path)
    tensors = open_native(tmp_path).tensors
    for name in tensors.names:
        segment = tensors.segment(name)
        content = bytearray(file.read_bytes())
        content[segment.offset + segment.nbytes // 2] ^= 16
        (tmp_path / "damaged").mkdir(exist_ok=True)
        (tmp_path / "damaged" / FILE).write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"1 of .* differ, {name} is the first"):
            open_native(tmp_path / "damaged").verify()


def metadata_with(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda content: {**content, **changes}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (metadata_with(format=1), "of format 1, this version reads 2"),
        (metadata_with(types={"layers.up": "Int3Weight"}), "layers.up is of type Int3Weight"),
        (metadata_with(types={"layers.up": "Int8Weight"}), r"is \[3, 128, 64\], the model needs"),
        (metadata_with(types={"layers.up": "Mxfp4Weight"}), "Mxfp4Weight, but has no largest"),
        (lambda content: {"format": 2}, "not written by jaxserve convert"),
    ],
)
def test_another_version_or_model_is_refused_with_what_it_is(
    original: Checkpoint,
    tmp_path: Path,
    change: Callable[[dict[str, Any]], dict[str, Any]],
    message: str,
) -> None:
    with safe_open(run(original, tmp_path), "numpy") as opened:
        tensors = {name: opened.get_tensor(name) for name in names_of(opened)}
        content = json.loads(opened.metadata()["jaxserve"])
    save_file(tensors, tmp_path / FILE, {"jaxserve": json.dumps(change(content))})
    with pytest.raises(CheckpointError, match=message):
        open_native(tmp_path).encoded(abstract())


def test_a_truncated_file_is_refused(original: Checkpoint, tmp_path: Path) -> None:
    file = run(original, tmp_path)
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(CheckpointError, match="truncated"):
        open_native(tmp_path)

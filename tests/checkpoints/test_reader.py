"""Safetensors folders: what is read is what was written, and every failure says what and where."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save, save_file

from jaxserve_checkpoints.reader import DTYPES, CheckpointError, open_checkpoint

TENSORS = {
    "a": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": np.arange(5, dtype=np.float32).astype(ml_dtypes.bfloat16),
    "c": np.array([[1, 2]], np.int8),
}


def raw_file(header: object, data: bytes = b"") -> bytes:
    """A safetensors file with any header at all."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def tensor(dtype: object, shape: object, offsets: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def error_of(folder: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(folder)
    message = str(error.value)
    assert "\n" not in message
    return message


def save_shards(folder: Path, **shards: dict[str, np.ndarray]) -> dict[str, str]:
    """Write name.safetensors per shard with an index; returns the weight map."""
    weight_map = {key: f"{shard}.safetensors" for shard, ts in shards.items() for key in ts}
    for shard, tensors in shards.items():
        save_file(tensors, folder / f"{shard}.safetensors")
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: object) -> None:
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


def assert_equal_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert actual.tobytes() == expected.tobytes()


def test_single_file_is_read_without_a_copy(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.names == ("a", "b", "c")
    for name, expected in TENSORS.items():
        view = checkpoint.read(name)
        assert_equal_bits(view, expected)
        assert (checkpoint.shape(name), checkpoint.dtype(name)) == (expected.shape, expected.dtype)
        assert checkpoint.nbytes(name) == expected.nbytes
        assert not view.flags.writeable
        assert not view.flags.owndata
        assert np.shares_memory(view, checkpoint.read(name))


def test_shards_are_read_through_the_index(tmp_path: Path) -> None:
    save_shards(tmp_path, one={"a": TENSORS["a"]}, two={"b": TENSORS["b"], "c": TENSORS["c"]})
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.names == ("a", "b", "c")
    for name, expected in TENSORS.items():
        assert_equal_bits(checkpoint.read(name), expected)
    assert "a" in checkpoint
    assert "d" not in checkpoint


def test_views_outlive_the_checkpoint_and_released_pages_come_back(tmp_path: Path) -> None:
    expected = np.arange(100_000, dtype=np.float32)
    save_file({"big": expected, "small": expected[:3].copy()}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    view = checkpoint.read("big")
    checkpoint.release("big")
    checkpoint.release("small")
    del checkpoint
    np.testing.assert_array_equal(view, expected)


def test_metadata_empty_and_scalar_tensors_are_fine(tmp_path: Path) -> None:
    tensors = {"empty": np.zeros((0, 3), np.float16), "scalar": np.array(7, np.int64)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = open_checkpoint(tmp_path)
    for name, expected in tensors.items():
        assert_equal_bits(checkpoint.read(name), expected)


def test_tensors_may_lie_at_odd_offsets(tmp_path: Path) -> None:
    header = {"a": tensor("U8", [1], [0, 1]), "b": tensor("F32", [2], [1, 9])}
    data = b"\x07" + np.array([1.5, -2.0], np.float32).tobytes()
    (tmp_path / "model.safetensors").write_bytes(raw_file(header, data))
    np.testing.assert_array_equal(open_checkpoint(tmp_path).read("b"), [1.5, -2.0])


@pytest.mark.parametrize("code", DTYPES)
def test_every_dtype_keeps_its_bits(code: str, tmp_path: Path) -> None:
    dtype = DTYPES[code]
    data = bytes([0, 1] * 12) if code == "BOOL" else bytes(range(24))
    shape = [24 // dtype.itemsize]
    (tmp_path / "model.safetensors").write_bytes(
        raw_file({"x": tensor(code, shape, [0, 24])}, data)
    )
    view = open_checkpoint(tmp_path).read("x")
    assert view.dtype == dtype
    assert view.tobytes() == data


@settings(max_examples=25, deadline=None)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
        st.tuples(
            st.sampled_from(["float32", "float16", "bfloat16", "int8", "int64"]),
            st.lists(st.integers(0, 4), max_size=3),
        ),
        max_size=6,
    ),
    st.randoms(use_true_random=False),
)
def test_round_trip(tmp_path_factory, specs, random) -> None:
    tensors = {
        name: np.frombuffer(
            random.randbytes(int(np.prod(shape)) * np.dtype(dtype).itemsize), np.dtype(dtype)
        ).reshape(shape)
        for name, (dtype, shape) in specs.items()
    }
    folder = tmp_path_factory.mktemp("round_trip")
    save_file(tensors, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    assert set(checkpoint.names) == set(tensors)
    for name, expected in tensors.items():
        assert_equal_bits(checkpoint.read(name), expected)


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    whole = save(TENSORS)
    data_start = 8 + int.from_bytes(whole[:8], "little")
    file = tmp_path / "model.safetensors"
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        message = error_of(tmp_path)
        assert "truncated" in message
        assert re.search(rf"\b{size}\b", message), message
        if size >= data_start:
            assert f"expected {len(whole)} bytes" in message


def test_bytes_after_the_last_tensor_are_noticed(tmp_path: Path) -> None:
    whole = save(TENSORS)
    (tmp_path / "model.safetensors").write_bytes(whole + b"\0\0\0")
    assert f"expected {len(whole)} bytes, the file has {len(whole) + 3}" in error_of(tmp_path)


@settings(max_examples=200, deadline=None)
@given(position=st.integers(0, 10_000), value=st.integers(0, 255))
def test_a_changed_header_byte_never_escapes_as_another_exception(
    tmp_path_factory, position: int, value: int
) -> None:
    whole = bytearray(save(TENSORS))
    header_end = 8 + int.from_bytes(whole[:8], "little")
    whole[position % header_end] = value
    folder = tmp_path_factory.mktemp("flipped")
    (folder / "model.safetensors").write_bytes(whole)
    try:
        checkpoint = open_checkpoint(folder)
    except CheckpointError:
        return
    for name in checkpoint.names:
        checkpoint.read(name).tobytes()


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"{not json", b"", "corrupt header: not valid JSON"),
        (b"\xff\xfe", b"", "corrupt header: not valid JSON"),
        (b"[" * 100_000, b"", "corrupt header: not valid JSON"),
        (b"[1]", b"", "corrupt header: not a JSON object"),
        ({"x": 3}, b"", "entry of tensor 'x' is 3"),
        ({"x": {"dtype": "F32"}}, b"", "entry of tensor 'x' is {'dtype': 'F32'}"),
        ({"x": tensor("F32", [-1], [0, 4])}, b"1234", "entry of tensor 'x'"),
        ({"x": tensor("F32", [True], [0, 4])}, b"1234", "entry of tensor 'x'"),
        ({"x": tensor("F32", 1, [0, 4])}, b"1234", "entry of tensor 'x'"),
        ({"x": tensor("F32", [1], [0, 4, 8])}, b"1234", "entry of tensor 'x'"),
        ({"x": tensor(5, [1], [0, 4])}, b"1234", "entry of tensor 'x'"),
        ({"x": tensor("F4", [8], [0, 4])}, b"1234", "tensor 'x' has dtype 'F4', supported are"),
        ({"x": tensor("F32", [2], [0, 4])}, b"1234", "takes 8 bytes, its offsets [0, 4] span 4"),
        ({"x": tensor("F32", [1], [4, 0])}, b"1234", "takes 4 bytes, its offsets [4, 0] span -4"),
        (
            {"x": tensor("U8", [2], [0, 2]), "y": tensor("U8", [2], [3, 5])},
            b"12345",
            "tensor 'y' starts at byte",
        ),
        (
            {"x": tensor("U8", [2], [0, 2]), "y": tensor("U8", [2], [1, 3])},
            b"123",
            "tensor 'y' starts at byte",
        ),
        (
            b'{"x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "x": {}}',
            b"1",
            "corrupt header: key 'x' occurs twice",
        ),
    ],
)
def test_corrupt_headers(header: object, data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(raw_file(header, data))
    text = error_of(tmp_path)
    assert message in text
    assert str(tmp_path / "model.safetensors") in text


def test_absurd_header_length(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    assert f"its length reads {2**64 - 1}, allowed are up to" in error_of(tmp_path)


def test_git_lfs_pointer_is_recognised(tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
    (tmp_path / "model.safetensors").write_bytes(pointer)
    assert f"Git LFS pointer of {len(pointer)} bytes" in error_of(tmp_path)


def test_missing_folder_and_file_in_its_place(tmp_path: Path) -> None:
    assert error_of(tmp_path / "nowhere") == f"{tmp_path / 'nowhere'}: no such folder"
    (tmp_path / "file").write_bytes(b"")
    assert "is a file, not a folder" in error_of(tmp_path / "file")


def test_folder_without_safetensors_says_what_is_there(tmp_path: Path) -> None:
    assert "the folder holds no files" in error_of(tmp_path)
    for name in ("pytorch_model.bin", "config.json"):
        (tmp_path / name).write_bytes(b"")
    message = error_of(tmp_path)
    assert "neither model.safetensors nor model.safetensors.index.json" in message
    assert "found only config.json, pytorch_model.bin" in message


def test_all_missing_shards_are_listed(tmp_path: Path) -> None:
    save_shards(tmp_path, s1={"a": TENSORS["a"]}, s2={"b": TENSORS["b"]}, s3={"c": TENSORS["c"]})
    for shard in ("s1", "s3"):
        (tmp_path / f"{shard}.safetensors").unlink()
    assert "2 of 3 shards are missing: s1.safetensors, s3.safetensors" in error_of(tmp_path)


def test_long_lists_are_cut_with_a_count(tmp_path: Path) -> None:
    write_index(tmp_path, {f"t{i}": f"s{i:02}.safetensors" for i in range(25)})
    message = error_of(tmp_path)
    assert "25 of 25 shards are missing" in message
    assert message.endswith("s19.safetensors and 5 more")


def test_index_names_tensors_that_no_shard_holds(tmp_path: Path) -> None:
    weight_map = save_shards(tmp_path, s1={"a": TENSORS["a"]})
    write_index(tmp_path, weight_map | {"y": "s1.safetensors", "x": "s1.safetensors"})
    assert "names 2 tensors that no shard holds: x, y" in error_of(tmp_path)


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    save_shards(tmp_path, s1={"a": TENSORS["a"]}, s2={"a": TENSORS["a"], "b": TENSORS["b"]})
    write_index(tmp_path, {"a": "s1.safetensors", "b": "s2.safetensors"})
    assert "1 duplicate tensors: a (in s1.safetensors and s2.safetensors)" in error_of(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "has no 'weight_map'"),
        ('{"weight_map": 1}', "has no 'weight_map'"),
        ('{"weight_map": {}}', "names no tensors"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "shards must be file names: 'a' in '../x"),
        ('{"weight_map": {"a": 1}}', "shards must be file names: 'a' in 1"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "tensor 'a' is listed twice"),
    ],
)
def test_bad_indexes(index: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert message in error_of(tmp_path)


@pytest.mark.parametrize("method", ["shape", "dtype", "nbytes", "read", "release"])
def test_unknown_names_are_errors(method: str, tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    call: Callable[[str], object] = getattr(open_checkpoint(tmp_path), method)
    with pytest.raises(CheckpointError, match="no tensor named 'z'"):
        call("z")

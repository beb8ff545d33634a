"""`jaxserve convert` between safetensors, the engine's own format and Orbax, there and back."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.cli.options import Options, parse_args
from jaxserve.commands.convert import convert
from jaxserve.config import ConfigError
from jaxserve.weights.conversion import convert_model
from jaxserve.weights.loading import plan_weights, weight_loader
from jaxserve.weights.model_source import find_model
from jaxserve_checkpoints import staging
from jaxserve_checkpoints.native import open_native
from jaxserve_checkpoints.native_writer import NativeWriter
from jaxserve_checkpoints.orbax import find_step
from jaxserve_checkpoints.reader import CheckpointError, open_checkpoint
from tests.checkpoints.orbax_files import random_tensors
from tests.e2e import family_models
from tests.tiny_model import COMPILES

GOLDEN = Path(__file__).parents[1] / "golden"
TOKENIZER = ("--tokenizer", str(family_models.embedded_model()))


def run(model: Path, out: Path, *flags: str) -> Options:
    """`jaxserve convert`, whose status must be 0."""
    options = converting(model, out, *flags)
    assert convert(options) == 0
    return options


def converting(model: Path, out: Path, *flags: str) -> Options:
    options = parse_args(["--model", str(model), "--out", str(out), *flags], "convert")
    # The folders of these tests have no tokenizer, which convert copies if there is one.
    return Options(**vars(options) | {"tokenizer": TOKENIZER[1]})


def loaded(model: Path, *flags: str) -> Any:
    """What a start on a CPU puts on the device."""
    options = parse_args(["--model", str(model), *TOKENIZER, "--no-keep-converted", *flags])
    plan = plan_weights(options, find_model(options), jnp.bfloat16, model, stacked=False)
    return weight_loader(plan, {})(lambda done, total: None)


def assert_same(one: Any, other: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for first, second in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert first.dtype == second.dtype
        np.testing.assert_array_equal(first, second)


def tensors_of(folder: Path) -> dict[str, bytes]:
    """Bytes by name, of one file or several."""
    checkpoint = open_checkpoint(folder)
    return {name: checkpoint.read(name).tobytes() for name in checkpoint.names}


WAYS = [
    *((name, "orbax") for name in ("tied", "mistral", "untied_sharded")),
    *(("llama_biases", "native"), ("qwen2", "native orbax"), ("qwen2", "orbax native")),
]


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_tensors_come_back_bit_for_bit(name: str, way: str, tmp_path: Path) -> None:
    model = GOLDEN / name
    for index, to in enumerate((*way.split(), "safetensors")):
        model_out = tmp_path / str(index) / to
        run(model, model_out, "--to", to)
        model = model_out
    assert tensors_of(model) == tensors_of(GOLDEN / name)
    assert_same(loaded(model), loaded(GOLDEN / name))


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return larger_model(tmp_path_factory.mktemp("models") / "larger")


def larger_model(folder: Path) -> Path:
    """A checkpoint whose matrices can be quantised."""
    folder.mkdir()
    config = json.loads((GOLDEN / "tied" / "config.json").read_text())
    config |= {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "vocab_size": 128}
    (folder / "config.json").write_text(json.dumps(config))
    options = parse_args(["--model", str(folder), *TOKENIZER])
    save_file(random_tensors(find_model(options).spec), folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("kind", ["int4", "fp8", "nvfp4"])
def test_quantised_weights_come_back_bit_for_bit(kind: str, larger: Path, tmp_path: Path) -> None:
    quantised = ("--quantization", kind)
    run(larger, tmp_path / "native", *quantised)
    run(tmp_path / "native", tmp_path / "orbax", "--to", "orbax")
    run(tmp_path / "orbax", tmp_path / "again")
    one, other = (tmp_path / each / "jaxserve.safetensors" for each in ("native", "again"))
    assert one.read_bytes() == other.read_bytes()
    run(larger, tmp_path / "direct", "--to", "orbax", *quantised)
    assert not list((tmp_path / "direct").glob(".*"))
    expected = loaded(tmp_path / "native")
    for each in ("orbax", "again", "direct"):
        assert_same(loaded(tmp_path / each), expected)


PUBLIC: dict[str, tuple[tuple[str, ...], dict[str, tuple[str, ...]]]] = {
    "int4": (
        ("--quantization", "int4", "--lm-head-dtype", "unquantized"),
        {"pack-quantized": ("Linear",)},
    ),
    "int4 and its head": (
        ("--quantization", "int4"),
        {"pack-quantized": ("Linear",), "int-quantized": ("re:.*embed_tokens$",)},
    ),
    "fp8": (
        ("--quantization", "fp8", "--lm-head-dtype", "fp8"),
        {"float-quantized": ("Linear", "re:.*embed_tokens$")},
    ),
    "nvfp4": (
        ("--quantization", "nvfp4", "--lm-head-dtype", "unquantized"),
        {"nvfp4-pack-quantized": ("Linear",)},
    ),
    "a head alone": (
        ("--lm-head-dtype", "int8"),
        {"int-quantized": ("re:.*embed_tokens$",)},
    ),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_quantised_weights_go_to_safetensors_and_back(
    name: str, larger: Path, tmp_path: Path
) -> None:
    """From the engine's own, from Orbax and in one go; loaded, and converted back."""
    flags, formats = PUBLIC[name]
    run(larger, tmp_path / "native", *flags)
    expected = loaded(tmp_path / "native")
    run(tmp_path / "native", tmp_path / "orbax", "--to", "orbax")
    for source, out in (("native", "public"), ("orbax", "from orbax")):
        run(tmp_path / source, tmp_path / out, "--to", "safetensors")
    run(larger, tmp_path / "direct", "--to", "safetensors", *flags)
    files = [tmp_path / out / "model.safetensors" for out in ("public", "from orbax", "direct")]
    for file in files:
        assert tensors_of(file.parent) == tensors_of(files[0].parent)
        assert not list(file.parent.glob(".*"))
        assert_same(loaded(file.parent), expected)
    config = json.loads((tmp_path / "public" / "config.json").read_text())["quantization_config"]
    groups = config["config_groups"].values()
    assert {each["format"]: tuple(each["targets"]) for each in groups} == formats
    run(tmp_path / "public", tmp_path / "back")
    back, first = open_native(tmp_path / "back"), open_native(tmp_path / "native")
    assert back.description.types == first.description.types
    assert back.description.checksums == first.description.checksums


def test_the_dtype_can_be_chosen(larger: Path, tmp_path: Path) -> None:
    run(larger, tmp_path / "half", "--to", "safetensors", "--dtype", "bfloat16")
    original = load_file(larger / "model.safetensors")
    for name, array in load_file(tmp_path / "half" / "model.safetensors").items():
        np.testing.assert_array_equal(array, original[name].astype(jnp.bfloat16))


def test_steps_are_kept_and_chosen_as_orbax_users_expect(larger: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "steps", tmp_path / "out"
    run(larger, source, "--to", "orbax")
    for step in (3, 5, 9):
        shutil.copytree(source / "0", source / str(step))
    for step in ("3", "5", "9"):
        run(source, out, "--to", "orbax", "--from-step", step, "--keep", "2")
    assert sorted(each.name for each in out.iterdir() if each.is_dir()) == ["5", "9"]
    found = find_step(out)
    assert found is not None and found.step == 9
    with pytest.raises(CheckpointError, match="has a step 9 already"):
        options = converting(source, out, "--to", "orbax", "--dtype", "bfloat16")
        convert_model(options, find_model(options), out, lambda done, total: None)


@pytest.mark.parametrize("flags", [(), ("--quantization", "int4")])
def test_a_finished_step_of_the_same_conversion_is_kept(
    flags: tuple[str, ...], larger: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run(larger, out, "--to", "orbax", *flags)
    before = {file: file.stat().st_mtime_ns for file in (out / "0").rglob("*")}
    run(larger, out, "--to", "orbax", *flags)
    assert {file: file.stat().st_mtime_ns for file in (out / "0").rglob("*")} == before
    other = converting(larger, out, "--to", "orbax", "--quantization", "fp8")
    with pytest.raises(CheckpointError, match="has a step 0 already"):
        convert_model(other, find_model(other), out, lambda done, total: None)


@pytest.mark.parametrize("to", ["safetensors", "native"])
def test_a_killed_conversion_goes_on_where_it_was(
    to: str, larger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--quantization", "int4") if to == "native" else ()
    run(larger, tmp_path / "steps", "--to", "orbax", *flags)
    out, written = tmp_path / "out", list[str]()
    write = NativeWriter.write

    def counted(self: NativeWriter, name: str, array: Any) -> None:
        if len(written) == 5:
            raise KeyboardInterrupt
        write(self, name, array)
        written.append(name)

    monkeypatch.setattr(NativeWriter, "write", counted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "steps", out, "--to", to)
    assert not list(out.glob("*.safetensors"))
    first, written[:] = set(written), []
    monkeypatch.setattr(
        NativeWriter,
        "write",
        lambda self, name, array: (written.append(name), write(self, name, array)),
    )
    run(tmp_path / "steps", out, "--to", to)
    assert len(first) == 5 and not first & set(written)
    assert_same(loaded(out), loaded(tmp_path / "steps"))


def test_what_a_killed_orbax_writer_left_is_removed(larger: Path, tmp_path: Path) -> None:
    left = tmp_path / "out" / "0.orbax-checkpoint-tmp"
    left.mkdir(parents=True)
    (left / "_METADATA").write_text("{")
    run(larger, tmp_path / "out", "--to", "orbax")
    assert not left.exists()
    assert_same(loaded(tmp_path / "out"), loaded(larger))


def test_damage_of_quantised_arrays_is_found(larger: Path, tmp_path: Path) -> None:
    run(larger, tmp_path / "orbax", "--to", "orbax", "--quantization", "int4")
    file = tmp_path / "orbax" / "0" / "_CHECKPOINT_METADATA"
    described = json.loads(file.read_text())
    content = json.loads(described["custom_metadata"]["jaxserve"])
    name = sorted(content["checksums"])[3]
    content["checksums"][name] = "0" * 16
    described["custom_metadata"]["jaxserve"] = json.dumps(content)
    file.write_text(json.dumps(described))
    with pytest.raises(CheckpointError, match=f"damaged: the checksums of 1 of .*{name}"):
        loaded(tmp_path / "orbax")
    with pytest.raises(CheckpointError, match="damaged"):
        options = converting(tmp_path / "orbax", tmp_path / "again")
        convert_model(options, find_model(options), tmp_path / "again", lambda a, b: None)
    assert not list((tmp_path / "again").glob("*.safetensors"))


REFUSED: dict[str, tuple[str, tuple[str, ...], type[Exception], str]] = {
    "quantised again": (
        "native",
        ("--to", "orbax", "--quantization", "fp8"),
        ConfigError,
        "is converted already: quantise the original",
    ),
    "keep without orbax": ("plain", ("--keep", "2"), ConfigError, "--keep says how many"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_written_is_refused(name: str, larger: Path, tmp_path: Path) -> None:
    source, flags, kind, message = REFUSED[name]
    model = larger
    if source == "native":
        model = tmp_path / "native"
        run(larger, model, "--quantization", "int4")
    options = converting(model, tmp_path / "out", *flags)
    with pytest.raises(kind, match=message):
        convert_model(options, find_model(options), tmp_path / "out", lambda a, b: None)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("flags", [(), ("--quantization", "int4")])
def test_a_start_from_orbax_compiles_nothing_but_what_is_kept(
    flags: tuple[str, ...], larger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where the programs that copy weights are compiled before."""
    monkeypatch.setattr(staging, "BUFFER_BYTES", 4096)
    monkeypatch.setattr(staging, "_SMALL", 1000)
    run(larger, tmp_path / "steps", "--to", "orbax", *flags)
    options = parse_args(["--model", str(tmp_path / "steps"), *TOKENIZER])
    plan = plan_weights(options, find_model(options), jnp.bfloat16, tmp_path, stacked=True)
    programs = {
        each.name: jax.jit(each.function, donate_argnums=each.donated)
        .lower(*each.arguments)
        .compile()
        for each in plan.staging
    }
    seen = list[tuple[int, int]]()
    compiled = COMPILES.count
    params = weight_loader(plan, programs)(lambda *each: seen.append(each))
    assert COMPILES.count == compiled and len(programs) > 2
    assert 0 < seen[0][0] < seen[-1][0] <= seen[-1][1]
    assert_same(params, weight_loader(replace(plan, staging=[]), {})(lambda *_: None))


def test_an_orbax_folder_needs_a_config(larger: Path, tmp_path: Path) -> None:
    run(larger, tmp_path / "steps", "--to", "orbax")
    expected = loaded(tmp_path / "steps")
    (tmp_path / "steps" / "config.json").rename(tmp_path / "other.json")
    with pytest.raises(CheckpointError, match=r"without config\.json.*--hf-config"):
        loaded(tmp_path / "steps")
    assert_same(loaded(tmp_path / "steps", "--hf-config", str(tmp_path / "other.json")), expected)
    assert_same(loaded(tmp_path / "steps", "--hf-config", str(larger)), expected)


def test_bytes_that_change_while_they_are_copied_are_not_kept(
    larger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(larger, tmp_path / "orbax", "--to", "orbax", "--quantization", "int4")

    def changed(self: NativeWriter, name: str, array: Any) -> None:
        write(self, name, array + 1 if name == "final_norm" else array)

    write = NativeWriter.write
    monkeypatch.setattr(NativeWriter, "write", changed)
    options = converting(tmp_path / "orbax", tmp_path / "again")
    with pytest.raises(CheckpointError, match="read other tensors than the checkpoint has"):
        convert_model(options, find_model(options), tmp_path / "again", lambda a, b: None)
    with pytest.raises(CheckpointError):
        open_native(tmp_path / "again")

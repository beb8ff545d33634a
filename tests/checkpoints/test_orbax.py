"""Orbax checkpoints read as Hugging Face's tensors, from every layout, stored in every way."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from jaxserve.models import decoder, registry
from jaxserve_checkpoints.load import load_params
from jaxserve_checkpoints.orbax import OrbaxCheckpoint, find_step, open_orbax
from jaxserve_checkpoints.reader import CheckpointError, open_checkpoint
from tests.checkpoints.orbax_files import flax_tree, maxtext_tree, nested, save, tunix_tree

GOLDEN = Path(__file__).parents[1] / "golden"

type Tensors = dict[str, NDArray[Any]]


def golden(name: str) -> tuple[Tensors, dict[str, Any]]:
    """A checkpoint's tensors and its config.json."""
    checkpoint = open_checkpoint(GOLDEN / name)
    config = json.loads((GOLDEN / name / "config.json").read_text())
    return {each: np.array(checkpoint.read(each)) for each in checkpoint.names}, config


def opened(folder: Path, config: dict[str, Any], step: int | None = None) -> OrbaxCheckpoint:
    found = find_step(folder, step)
    assert found is not None
    return open_orbax(found, config)


def assert_holds(checkpoint: OrbaxCheckpoint, tensors: Tensors, *, exactly: bool = True) -> None:
    assert checkpoint.names == tuple(sorted(tensors))
    for name, expected in tensors.items():
        found = checkpoint.read(name)
        assert (checkpoint.shape(name), checkpoint.dtype(name)) == (found.shape, found.dtype)
        if exactly:
            np.testing.assert_array_equal(found, expected, err_msg=name)
        else:  # divided by the root of the head size, and multiplied again
            np.testing.assert_allclose(found, expected, rtol=3e-7, err_msg=name)
        checkpoint.release(name)


TREES: dict[str, tuple[str, Callable[[Tensors, Any], Any], bool]] = {
    "flax": ("qwen2", lambda tensors, spec: flax_tree(tensors), True),
    "flax in params": ("llama_biases", lambda tensors, spec: {"params": flax_tree(tensors)}, True),
    "hugging face": ("mistral", lambda tensors, spec: nested(tensors), True),
    "flat names": ("tied", lambda tensors, spec: tensors, True),
    "tunix qwen3": ("tied", tunix_tree, True),
    "tunix qwen2": ("qwen2", tunix_tree, True),
    "tunix untied": ("untied_sharded", tunix_tree, True),
    "maxtext qwen3": ("tied", lambda t, s: maxtext_tree(t, s, scanned=False), True),
    "maxtext qwen3 scanned": ("tied", lambda t, s: maxtext_tree(t, s, scanned=True), True),
    "maxtext padded": (
        "untied_sharded",
        lambda t, s: maxtext_tree(t, s, scanned=True, padded_vocab=7),
        True,
    ),
    "maxtext qwen2 scanned": ("qwen2", lambda t, s: maxtext_tree(t, s, scanned=True), True),
    "maxtext llama 3.1": (
        "llama",
        lambda t, s: maxtext_tree(t, s, scanned=True, divided=True, interleaved=True),
        False,
    ),
    "maxtext mistral": (
        "mistral",
        lambda t, s: maxtext_tree(t, s, scanned=False, divided=True),
        False,
    ),
}


@pytest.mark.parametrize("name", TREES)
def test_every_layout_gives_the_tensors_it_was_made_of(name: str, tmp_path: Path) -> None:
    variant, tree, exactly = TREES[name]
    tensors, config = golden(variant)
    if not exactly:  # bfloat16 would lose a bit
        tensors = {name: array.astype(np.float32) for name, array in tensors.items()}
    save(tmp_path / "saved", tree(tensors, registry.spec_of(config)))
    assert_holds(opened(tmp_path / "saved", config), tensors, exactly=exactly)


@pytest.mark.parametrize(
    "settings", [{}, {"use_ocdbt": False}, {"use_zarr3": True}], ids=["ocdbt", "plain", "zarr3"]
)
def test_every_way_of_storing_is_read(settings: dict[str, Any], tmp_path: Path) -> None:
    tensors, config = golden("tied")
    tensors = {name: array.astype(jnp.bfloat16) for name, array in tensors.items()}
    save(tmp_path / "saved", flax_tree(tensors), **settings)
    assert_holds(opened(tmp_path / "saved", config), tensors)


def test_arrays_of_a_flax_state_keep_their_key_of_the_value(tmp_path: Path) -> None:
    tensors, config = golden("tied")
    tree = jax.tree.map(lambda array: {"value": array}, flax_tree(tensors))
    save(tmp_path / "saved", {"model": tree, "optimizer": {"mu": tree}, "step": 3})
    assert_holds(opened(tmp_path / "saved", config), tensors)


def test_a_sharded_array_is_put_together(tmp_path: Path) -> None:
    """Two devices need a process of their own."""
    program = f"""
import json, numpy as np, jax, sys
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import tests.checkpoints.test_orbax as here
tensors, config = here.golden("tied")
mesh = Mesh(np.array(jax.devices()), "x")
def put(array):
    axes = ("x",) if array.shape[0] % 2 == 0 else ()
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes)))
tree = jax.tree.map(put, here.flax_tree(tensors))
here.save(here.Path({str(tmp_path / "saved")!r}), tree)
"""
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    environment |= {"PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)
    tensors, config = golden("tied")
    checkpoint = opened(tmp_path / "saved", config)
    assert_holds(checkpoint, tensors)
    assert "NamedSharding" in (tmp_path / "saved" / "_sharding").read_text()


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("scanned", [False, True])
def test_parameters_are_those_of_safetensors(tmp_path: Path, stacked: bool, scanned: bool) -> None:
    tensors, config = golden("qwen2")
    spec = registry.spec_of(config)
    save(tmp_path / "saved", maxtext_tree(tensors, spec, scanned=scanned))
    abstract = decoder.abstract(spec, jnp.float32, stacked=stacked)
    rules = registry.rules(spec)
    seen: list[tuple[int, int]] = []
    checkpoint = opened(tmp_path / "saved", config)
    assert checkpoint.in_whole_arrays == scanned
    found = load_params(
        checkpoint, rules, abstract, progress=lambda done, total: seen.append((done, total))
    )
    expected = load_params(open_checkpoint(GOLDEN / "qwen2"), rules, abstract)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert seen[-1][0] == seen[-1][1] == sum(leaf.nbytes for leaf in jax.tree.leaves(found))


def test_an_array_of_all_layers_is_read_once_and_forgotten(tmp_path: Path) -> None:
    tensors, config = golden("tied")
    spec = registry.spec_of(config)
    save(tmp_path / "saved", maxtext_tree(tensors, spec, scanned=True))
    checkpoint = opened(tmp_path / "saved", config)
    names = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(spec.num_layers)]
    whole = checkpoint._whole[checkpoint._places[names[0]].path]  # pyright: ignore[reportPrivateUsage]
    first = checkpoint.read(names[0])
    assert np.shares_memory(first, whole.array())
    for name in names:
        assert whole._array is not None  # pyright: ignore[reportPrivateUsage]
        checkpoint.release(name)
    assert whole._array is None  # pyright: ignore[reportPrivateUsage]
    np.testing.assert_array_equal(checkpoint.read(names[-1]), tensors[names[-1]])


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    """A CheckpointManager's folder with steps 1, 2 and 10, each times its number."""
    import orbax.checkpoint as ocp

    tensors, _ = golden("tied")
    folder = tmp_path / "steps"
    with ocp.CheckpointManager(folder) as manager:
        for step in (1, 2, 10):
            scaled = {name: array * step for name, array in tensors.items()}
            items = ocp.args.Composite(
                items=ocp.args.StandardSave(flax_tree(scaled)),  # pyright: ignore[reportCallIssue]
                notes=ocp.args.JsonSave({"a": 1}),  # pyright: ignore[reportCallIssue]
            )
            manager.save(step, args=items)
    return folder


def multiple(folder: Path, step: int | None = None) -> int:
    """By what a step's weights, in bfloat16, are multiplied."""
    tensors, config = golden("tied")
    name = "model.norm.weight"
    return round(float(opened(folder, config, step).read(name)[0]) / float(tensors[name][0]))


def test_the_newest_complete_step_is_taken(steps: Path) -> None:
    assert multiple(steps) == 10
    (steps / "10" / "items" / "_METADATA").unlink()
    assert multiple(steps) == 2
    (steps / "2").rename(steps / "2.orbax-checkpoint-tmp-0")
    assert multiple(steps) == 1
    assert multiple(steps / "1") == 1
    assert multiple(steps / "1" / "items") == 1


def test_a_step_can_be_chosen(steps: Path) -> None:
    assert multiple(steps, 2) == 2
    with pytest.raises(CheckpointError, match="no complete step 3, there is 1, 2, 10"):
        find_step(steps, 3)


def test_other_folders_are_not_orbaxs(tmp_path: Path) -> None:
    assert find_step(GOLDEN / "tied") is None
    (tmp_path / "3").mkdir()
    assert find_step(tmp_path) is None


def cut_metadata(folder: Path) -> None:
    file = folder / "_METADATA"
    file.write_bytes(file.read_bytes()[:100])


def not_committed(folder: Path) -> None:
    file = folder / "_CHECKPOINT_METADATA"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"commit_timestamp_nsecs": None}))


def without_manifest(folder: Path) -> None:
    (folder / "manifest.ocdbt").unlink()


def without_data(folder: Path) -> None:
    shutil.rmtree(folder / "ocdbt.process_0")
    shutil.rmtree(folder / "d")


def without_an_array(folder: Path) -> None:
    shutil.rmtree(folder / "norm.scale")


def without_a_chunk(folder: Path) -> None:
    (folder / "norm.scale" / "0").unlink()


def cut_chunk(folder: Path) -> None:
    file = folder / "norm.scale" / "0"
    file.write_bytes(file.read_bytes()[:20])


def damaged_chunk(folder: Path) -> None:
    file = folder / "norm.scale" / "0"
    file.write_bytes(b"\xff" * file.stat().st_size)


DAMAGE: dict[str, tuple[Callable[[Path], None], bool, str]] = {
    "metadata cut off": (cut_metadata, True, "_METADATA: damaged: not valid JSON"),
    "not committed": (not_committed, True, "incomplete: Orbax had not finished writing it"),
    "no manifest": (without_manifest, True, "incomplete: manifest.ocdbt is missing"),
    "no data": (without_data, True, "incomplete: array .* its bytes are missing"),
    "no array": (without_an_array, False, "incomplete: array norm.scale: its bytes are missing"),
    "no chunk": (without_a_chunk, False, "incomplete: array norm.scale: its bytes are missing"),
    "chunk cut off": (cut_chunk, False, "damaged: array norm.scale: "),
    "chunk damaged": (damaged_chunk, False, "damaged: array norm.scale: "),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_and_incomplete_folders_are_refused_with_one_line(
    name: str, tmp_path: Path
) -> None:
    damage, ocdbt, message = DAMAGE[name]
    tensors, config = golden("tied")
    folder = save(tmp_path / "saved", flax_tree(tensors), use_ocdbt=ocdbt)
    damage(folder)
    with pytest.raises(CheckpointError, match=message) as error:
        checkpoint = opened(folder, config)
        for each in checkpoint.names:
            checkpoint.read(each)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(str(tmp_path))


def test_a_folder_that_orbax_was_writing_is_refused(tmp_path: Path) -> None:
    tensors, _ = golden("tied")
    folder = save(tmp_path / "3", flax_tree(tensors))
    unfinished = folder.rename(tmp_path / "3.orbax-checkpoint-tmp-17")
    with pytest.raises(CheckpointError, match="incomplete: Orbax had not finished"):
        find_step(unfinished)
    with pytest.raises(CheckpointError, match=r"no complete step, only 3\.orbax"):
        find_step(tmp_path)


def test_everything_wrong_with_a_tree_is_said_at_once(tmp_path: Path) -> None:
    tensors, config = golden("tied")
    spec = registry.spec_of(config)
    del tensors["model.layers.0.mlp.up_proj.weight"], tensors["model.norm.weight"]
    tree = flax_tree(tensors) | {"adapter": {"scale": np.ones(3)}}
    save(tmp_path / "saved", tree)
    with pytest.raises(CheckpointError) as error:
        load_params(
            opened(tmp_path / "saved", config),
            registry.rules(spec),
            decoder.abstract(spec, jnp.float32),
        )
    text = str(error.value)
    assert "3 problems" in text
    assert "layers.0.gate_up: not in the checkpoint: model.layers.0.mlp.up_proj.weight" in text
    assert "final_norm: not in the checkpoint: model.norm.weight" in text
    assert "adapter.scale: no leaf of the model takes this tensor" in text


def test_wrong_axes_are_said_at_once(tmp_path: Path) -> None:
    tensors, config = golden("tied")
    tree = tunix_tree(tensors, registry.spec_of(config))
    tree["layers"]["0"]["attn"]["o_proj"]["w"] = np.ones(4, np.float32)
    tree["layers"]["1"]["mlp"]["up_proj"]["kernel"] = np.ones(4, np.float32)
    save(tmp_path / "saved", tree)
    with pytest.raises(CheckpointError, match="not of the layout Tunix") as error:
        opened(tmp_path / "saved", config)
    assert "layers.0.attn.o_proj.w: [4]" in str(error.value)
    assert "layers.1.mlp.up_proj.kernel: [4]" in str(error.value)


def test_an_unknown_tree_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "saved", {"encoder": {"kernel": np.ones((2, 2))}})
    with pytest.raises(CheckpointError, match=r"no known layout .* first arrays are encoder\.ker"):
        opened(tmp_path / "saved", {})


def test_two_models_in_a_tree_are_refused(tmp_path: Path) -> None:
    tensors, config = golden("tied")
    tree = flax_tree(tensors)
    save(tmp_path / "saved", {"actor": tree, "critic": tree})
    with pytest.raises(CheckpointError, match=r"which is the model\? 'actor\.', 'critic\.'"):
        opened(tmp_path / "saved", config)


def test_nothing_of_orbax_is_imported_before_it_is_used() -> None:
    program = (
        "import sys, jaxserve.weights.loading, jaxserve.startup.build;"
        "sys.exit(any(name.split('.')[0] in ('orbax', 'tensorstore') for name in sys.modules))"
    )
    subprocess.run(
        [sys.executable, "-c", program], check=True, env={"PYTHONPATH": ":".join(sys.path)}
    )

"""Rules between tensor names and leaves, checked in both directions."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve_checkpoints.naming import leaf_paths, resolve_rules
from jaxserve_checkpoints.reader import CheckpointError, open_checkpoint
from jaxserve_checkpoints.rules import AnyRule, Ignore, Repeat, Rule


class Layer(NamedTuple):
    qkv: Any
    norm: Any


class Params(NamedTuple):
    embedding: Any
    layers: tuple[Layer, ...]
    lm_head: Any


RULES: tuple[AnyRule, ...] = (
    Rule("embedding", ("embed.weight",)),
    Rule("layers.{layer}.qkv", ("l.{layer}.q", "l.{layer}.k", "l.{layer}.v")),
    Rule("layers.{layer}.norm", ("l.{layer}.norm",)),
    Rule("lm_head", ("head",)),
    Ignore("*.inv_freq"),
)


def array(*shape: int, dtype: Any = np.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def abstract(layers: int = 2, *, tied: bool = False) -> Params:
    return Params(
        embedding=array(7, 4),
        layers=(Layer(qkv=array(8, 4), norm=array(4)),) * layers,
        lm_head=None if tied else array(7, 4),
    )


def tensors(layers: int = 2) -> dict[str, np.ndarray]:
    found = {"embed.weight": np.zeros((7, 4), np.float32), "head": np.ones((7, 4), np.float32)}
    for layer in range(layers):
        found |= {
            f"l.{layer}.q": np.zeros((4, 4), np.float32),
            f"l.{layer}.k": np.zeros((2, 4), np.float32),
            f"l.{layer}.v": np.zeros((2, 4), np.float32),
            f"l.{layer}.norm": np.zeros(4, np.float32),
        }
    return found


def resolve(
    folder: Path, stored: dict[str, np.ndarray], rules: tuple[AnyRule, ...] = RULES, **kwargs: Any
) -> list[Any]:
    save_file(stored, folder / "model.safetensors")
    return resolve_rules(rules, abstract(**kwargs), open_checkpoint(folder))


def problems(folder: Path, stored: dict[str, np.ndarray], **kwargs: Any) -> list[str]:
    with pytest.raises(CheckpointError) as error:
        resolve(folder, stored, **kwargs)
    first, *lines = str(error.value).splitlines()
    assert first.startswith(f"{folder}: does not fit the model, ")
    return [line.strip() for line in lines]


def test_leaf_paths_name_fields_and_layers() -> None:
    assert [path for path, _ in leaf_paths(abstract(tied=True))] == [
        "embedding",
        "layers.0.qkv",
        "layers.0.norm",
        "layers.1.qkv",
        "layers.1.norm",
    ]


def test_every_leaf_gets_its_tensors_in_leaf_order(tmp_path: Path) -> None:
    sources = resolve(tmp_path, tensors(12), layers=12)
    assert [source.path for source in sources] == [path for path, _ in leaf_paths(abstract(12))]
    by_path = {source.path: source for source in sources}
    assert by_path["layers.11.qkv"].tensors == ("l.11.q", "l.11.k", "l.11.v")
    assert by_path["layers.11.qkv"].leaf.shape == (8, 4)
    assert by_path["lm_head"].tensors == ("head",)


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    stored = tensors()
    del stored["l.0.k"], stored["l.0.v"]
    stored["l.1.norm"] = np.zeros(5, np.float32)
    stored["l.2.norm"] = np.zeros(4, np.float32)
    stored["embed.weight"] = np.zeros((7, 4), np.int32)
    assert problems(tmp_path, stored) == [
        "embedding: embed.weight is int32, cannot become float32",
        "layers.0.qkv: not in the checkpoint: l.0.k, l.0.v",
        "layers.1.norm: the model needs [4], found l.1.norm [5]",
        "l.2.norm: no leaf of the model takes this tensor",
    ]


def test_long_reports_are_cut_with_a_count(tmp_path: Path) -> None:
    stored = tensors() | {f"extra.{i:02}": np.zeros(1, np.float32) for i in range(30)}
    lines = problems(tmp_path, stored)
    assert len(lines) == 21
    assert lines[-1] == "and 10 more"


@pytest.mark.parametrize("shape", [(3, 4), (2, 5), (2,), (2, 4, 1)])
def test_shapes_that_do_not_concatenate(shape: tuple[int, ...], tmp_path: Path) -> None:
    stored = tensors() | {"l.0.v": np.zeros(shape, np.float32)}
    (line,) = problems(tmp_path, stored)
    assert line == (
        f"layers.0.qkv: the model needs [8, 4], found l.0.q [4, 4] + l.0.k [2, 4] + "
        f"l.0.v {list(shape)} along axis 0"
    )


def test_leaves_without_a_rule_or_with_two(tmp_path: Path) -> None:
    rules = (*(rule for rule in RULES if rule != RULES[0]), Rule("layers.1.norm", ("l.1.norm",)))
    lines = problems(tmp_path, tensors(), rules=rules)
    assert "embedding: filled by no rule, needs exactly one rule" in lines
    assert (
        "layers.1.norm: filled by 'layers.{layer}.norm' and 'layers.1.norm', "
        "needs exactly one rule" in lines
    )


def test_a_tensor_that_two_leaves_take(tmp_path: Path) -> None:
    stored = tensors()
    del stored["head"]
    rules = (*(rule for rule in RULES if rule != RULES[3]), Rule("lm_head", ("embed.weight",)))
    assert problems(tmp_path, stored, rules=rules) == ["embed.weight: used 2 times"]


def test_ignored_patterns_and_the_repeated_head_of_a_tied_model(tmp_path: Path) -> None:
    stored = tensors() | {"l.0.rope.inv_freq": np.zeros(2, np.float32)}
    tied_rules = (*RULES, Repeat("head", "embed.weight"))
    assert len(resolve(tmp_path, stored, tied_rules, tied=True)) == 5
    assert problems(tmp_path, stored, tied=True) == ["head: no leaf of the model takes this tensor"]
    stored["head"] = np.zeros((8, 4), np.float32)
    assert problems(tmp_path, stored, rules=tied_rules, tied=True) == [
        "head: [8, 4], should repeat embed.weight [7, 4]"
    ]


@pytest.mark.parametrize(
    ("stored", "wanted", "fits"),
    [
        ("bfloat16", "float32", True),
        ("float32", "bfloat16", True),
        ("float16", "bfloat16", True),
        ("int8", "int8", True),
        ("int8", "float32", False),
        ("float32", "int8", False),
        ("float8_e4m3fn", "bfloat16", False),
        ("float8_e4m3fn", "float8_e4m3fn", True),
    ],
)
def test_only_plain_floats_convert(stored: str, wanted: str, fits: bool, tmp_path: Path) -> None:
    dtypes = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "bfloat16": ml_dtypes.bfloat16}
    save_file({"x": np.zeros(4, dtypes.get(stored, stored))}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    tree = {"x": array(4, dtype=dtypes.get(wanted, wanted))}
    if fits:
        assert len(resolve_rules((Rule("x", ("x",)),), tree, checkpoint)) == 1
    else:
        with pytest.raises(CheckpointError, match=f"x is {stored}, cannot become {wanted}"):
            resolve_rules((Rule("x", ("x",)),), tree, checkpoint)


def test_rules_that_could_never_work_fail_where_they_are_written() -> None:
    with pytest.raises(ValueError, match=r"\['expert'\] in its sources only"):
        Rule("layers.{layer}.up", ("l.{layer}.{expert}.up",))
    with pytest.raises(ValueError, match="no sources"):
        Rule("embedding", ())


def test_tensors_of_zeros_may_be_left_over_where_a_rule_says_so(tmp_path: Path) -> None:
    rules = (*RULES, Ignore("*.bias", only_zeros=True))
    save_file(tensors() | {"l.0.q.bias": np.zeros(4, np.float32)}, tmp_path / "model.safetensors")
    assert resolve_rules(rules, abstract(), open_checkpoint(tmp_path))
    save_file(tensors() | {"l.0.q.bias": np.ones(4, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"l\.0\.q\.bias: no leaf of the model takes"):
        resolve_rules(rules, abstract(), open_checkpoint(tmp_path))

"""`jaxserve convert --quantization-method`: what each asks for, reports and leaves behind."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.cli.options import parse_args
from jaxserve.commands.convert import convert
from jaxserve.config import ConfigError
from jaxserve.models.quantization import Quantization
from jaxserve.weights.conversion import convert_model
from jaxserve.weights.loading import plan_weights, weight_loader
from jaxserve.weights.model_source import find_model
from jaxserve_checkpoints.reader import open_checkpoint
from jaxserve_checkpoints.resolve import embedded_model
from jaxserve_kernels.weights import Int4Weight

EMBEDDED = str(embedded_model())


def flags(out: Path, *others: str) -> list[str]:
    return ["--model", EMBEDDED, "--out", str(out), "--quantization", "int4", *others]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = convert(parse_args(list(arguments), "convert"))
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def test_methods_other_than_rounding_make_int4() -> None:
    with pytest.raises(ConfigError, match=r"hqq makes int4 weights: .* not fp8"):
        Quantization(layers="fp8", method="hqq")


@pytest.mark.parametrize(
    ("others", "message"),
    [
        (["--quantization-method", "awq"], "awq needs --calibration FILE"),
        (["--calibration", "text"], "and no other method does"),
        (["--quantization-method", "awq", "--calibration", "none"], "none: cannot be read"),
    ],
)
def test_awq_needs_a_text_and_the_others_none(
    others: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = run(capsys, *flags(tmp_path / "out", *others))
    assert status == 1
    assert message in " ".join(text.split())
    assert text.startswith("jaxserve: error:")  # no bar
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").write_text("in the way")
    status, text = run(capsys, *flags(tmp_path / "out"))
    assert status == 1
    assert f"--out {tmp_path}/out: cannot be written: File exists" in text


def test_folders_and_links_to_nothing_beside_the_model_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Path(shutil.copytree(EMBEDDED, tmp_path / "model"))
    (model / "LICENSES").mkdir()
    (model / "old.json").symlink_to("gone")
    status, text = run(capsys, "--model", str(model), "--out", str(tmp_path / "out"))
    assert status == 0, text
    assert not {"LICENSES", "old.json"} & {file.name for file in (tmp_path / "out").iterdir()}


def test_each_layer_has_a_line_when_it_is_done_and_each_matrix_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All four matrices of a layer in its line, layers in order; in the row the largest error."""
    status, text = run(capsys, *flags(tmp_path / "out"))
    assert status == 0, text
    number = r"([0-9.]+)%"
    line = rf"^layers\.(.): relative error of qkv {number}, out .*, gate_up .*, down {number}$"
    found = re.findall(line, text, re.MULTILINE)
    assert [int(layer) for layer, *_ in found] == list(range(8))
    for matrix, column in (("qkv", 1), ("down", 2)):
        worst = max(found, key=lambda each: float(each[column]))
        (row,) = (each.split("│") for each in text.splitlines() if each.startswith(f"│ {matrix} "))
        assert [cell.strip() for cell in row[4:6]] == [f"{worst[column]}%", f"layers.{worst[0]}"]


def test_a_folder_with_something_else_in_it_is_left_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another conversion, or another model: with our config.json it could not be served."""
    out = tmp_path / "out"
    assert run(capsys, *flags(out))[0] == 0
    (out / "config.json").write_text("of another model")
    status, text = run(capsys, *flags(out, "--lm-head-dtype", "fp8"))
    assert status == 1
    assert "is another conversion, with other quantization" in text
    assert (out / "config.json").read_text() == "of another model"
    (out / "jaxserve.safetensors").rename(out / "model.safetensors")
    status, text = run(capsys, *flags(out))
    assert status == 1
    assert "holds a model's weights (model.safetensors)" in text
    assert (out / "config.json").read_text() == "of another model"
    assert not (out / "jaxserve.safetensors").exists()


def test_a_text_that_is_too_short_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("too short")
    others = ["--quantization-method", "awq", "--calibration", str(tmp_path / "text")]
    status, text = run(capsys, *flags(tmp_path / "out", *others))
    assert status == 1
    assert "at least 64 are needed" in " ".join(text.split())


class Interrupted(BaseException):
    pass


@pytest.mark.slow
def test_an_interrupted_search_goes_on_with_the_layer_that_it_had_come_to(tmp_path: Path) -> None:
    (tmp_path / "text").write_text(
        "The quick brown fox jumps over the lazy dog. 12 + 30 = 42. " * 40
    )
    others = ["--quantization-method", "awq", "--calibration", str(tmp_path / "text")]

    def go(out: Path, layers: int | None = None) -> tuple[list[str], Path]:
        """Until so many layers are searched; which ones."""
        options = parse_args(flags(out, *others), "convert")
        found: list[str] = []

        def report(path: str, error: Any) -> None:
            if path.endswith(".qkv"):
                if len(found) == layers:
                    raise Interrupted
                found.append(path)

        source = find_model(options)
        return found, convert_model(options, source, out, lambda done, total: None, report)

    every, whole = go(tmp_path / "whole")
    with pytest.raises(Interrupted):
        go(tmp_path / "out", layers=3)
    rest, file = go(tmp_path / "out")
    assert rest == every[3:]
    assert file.read_bytes() == whole.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["hqq", "awq"])
def test_the_embedded_model_is_converted_and_served(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    (tmp_path / "text").write_text(
        "The quick brown fox jumps over the lazy dog. 12 + 30 = 42. " * 40
    )
    others = ["--quantization-method", method]
    if method == "awq":
        others += ["--calibration", str(tmp_path / "text")]
    status, text = run(capsys, *flags(out, *others))
    assert status == 0, text
    assert "layers.7: relative error of qkv" in text
    assert "relative errors" in text
    assert ("product" if method == "awq" else "weight") in text
    options = parse_args(["--model", str(out)])
    source = find_model(options)
    plan = plan_weights(options, source, jnp.float32, tmp_path, stacked=False)
    params: Any = weight_loader(plan, {})(lambda done, total: None)
    assert isinstance(params.layers[0].qkv, Int4Weight)
    assert (params.layers[0].qkv.zero is None) == (method == "awq")
    original = open_checkpoint(embedded_model()).read("model.layers.0.input_layernorm.weight")
    unchanged = np.array_equal(params.layers[0].attention_norm, original.astype(np.float32))
    assert unchanged == (method == "hqq")

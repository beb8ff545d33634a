"""Scales of an fp8 KV cache: a text finds such that hold it, and those of checkpoints are read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray
from safetensors.numpy import save_file

from jaxserve.config import ConfigError
from jaxserve.startup import kv_scales
from jaxserve_checkpoints.reader import open_checkpoint
from jaxserve_kernels.kv_format import named
from tests.runner.driver import Placed, first_token
from tests.tiny_model import COMPILES, SPEC, make_config, make_params, make_runner

CONFIG = replace(make_config(), kv_format=named("fp8_e4m3"))
SHAPE = (SPEC.num_layers, SPEC.kv_heads, 2)


class Device:
    """A model whose keys and values reach `magnitudes`, over a cache in e4m3."""

    def __init__(self, magnitudes: NDArray[np.float32]) -> None:
        self.magnitudes = magnitudes
        self.results = self

    def use_kv_scales(self, scales: NDArray[np.float32]) -> None:
        self.scales = scales

    def launch(self, plan: object) -> Device:
        return self

    def block_until_ready(self) -> None:
        pass

    def largest_magnitudes(self) -> NDArray[np.float32]:
        fitted = np.minimum(self.magnitudes / self.scales, 448)
        return fitted.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * self.scales


@given(arrays.arrays(np.float32, SHAPE, elements=st.floats(2**-24, 2**24, width=32)))
def test_scales_hold_the_text_with_room_and_no_more(magnitudes: NDArray[np.float32]) -> None:
    device: Any = Device(magnitudes)
    scales = kv_scales.calculated(device, CONFIG, range(7))
    assert (np.log2(scales) % 1 == 0).all()
    room = 448 * scales / magnitudes
    # A magnitude is read back with an error of 1/16 at most.
    assert (room >= 2 / 1.07).all() and (room <= 4 * 1.07).all()
    assert (device.scales == scales).all()


def test_what_no_scale_holds_is_refused() -> None:
    device: Any = Device(np.full(SHAPE, np.inf, np.float32))
    with pytest.raises(ConfigError, match="not finite"):
        kv_scales.calculated(device, CONFIG, range(7))


@pytest.mark.parametrize(
    "names", ["self_attn.{}_scale", "self_attn.{0}_proj.{0}_scale", "self_attn.attn.{}_scale"]
)
def test_scales_of_checkpoints_are_per_tensor_or_per_head(names: str, tmp_path: Path) -> None:
    layers = range(SPEC.num_layers)
    tensors: dict[str, NDArray[Any]] = {
        f"model.layers.{layer}.{names.format('k')}": np.array(0.5 + layer, np.float32)
        for layer in layers
    }
    tensors |= {
        f"model.layers.{layer}.{names.format('v')}": np.array([2, 4], ml_dtypes.bfloat16)
        for layer in layers
    }
    save_file(tensors, tmp_path / "model.safetensors")
    found = kv_scales.stored(open_checkpoint(tmp_path), SPEC)
    expected = [[[0.5, 2], [0.5, 4]], [[1.5, 2], [1.5, 4]]]
    np.testing.assert_array_equal(found, np.array(expected, np.float32))
    del tensors[f"model.layers.1.{names.format('k')}"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"missing or not positive in layers \[1\]"):
        kv_scales.stored(open_checkpoint(tmp_path), SPEC)


def test_a_checkpoint_without_scales_has_none(tmp_path: Path) -> None:
    save_file({"model.norm.weight": np.ones(1, np.float32)}, tmp_path / "model.safetensors")
    assert kv_scales.stored(open_checkpoint(tmp_path), SPEC) is None


@pytest.mark.slow
def test_a_model_of_tiny_values_and_huge_keys_is_served_in_fp8_after_reading_a_text() -> None:
    params = make_params()
    split = SPEC.q_size + SPEC.kv_size

    def scaled(layer: Any) -> Any:
        qkv = layer.qkv.at[split:].multiply(2.0**-14)
        norms = {"q_norm": layer.q_norm * 2.0**-12, "k_norm": layer.k_norm * 2.0**12}
        return layer._replace(qkv=qkv, out=layer.out * 2.0**14, **norms)

    odd = params._replace(layers=tuple(scaled(layer) for layer in params.layers))
    prompt = [int(token) for token in np.random.default_rng(0).integers(0, SPEC.vocab_size, 24)]

    def logprobs(runner: Any) -> NDArray[np.float64]:
        found = first_token(runner, Placed(), prompt).logprobs
        assert found is not None
        ids = dict(found.top)
        return np.array([ids[token] for token in sorted(ids)])

    # Powers of two go in and out again: with scales that fit, the same numbers are rounded, but for
    # those near the smallest ones.
    expected = logprobs(make_runner(CONFIG, params))
    runner = make_runner(CONFIG, odd)
    cut_off = logprobs(runner)
    runner.reset()
    kv_scales.calculated(runner, CONFIG, prompt)
    before = COMPILES.count
    np.testing.assert_allclose(logprobs(runner), expected, rtol=0, atol=1e-3)
    assert cut_off.shape != expected.shape or np.abs(cut_off - expected).max() > 1e-2
    runner.reset()
    np.testing.assert_allclose(logprobs(runner), expected, rtol=0, atol=1e-3)
    assert COMPILES.count == before, "something was compiled while serving"

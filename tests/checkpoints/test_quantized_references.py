"""What is read of quantised checkpoints against what their makers' own packages make of them.

For a machine with torch and transformers; compressed-tensors and hqq are used where they are
installed. Tests are skipped where a package is missing.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from jaxserve_checkpoints.quantized.compressed_tensors import Nvfp4Packed, PackQuantized
from jaxserve_checkpoints.quantized.format import Format
from jaxserve_checkpoints.quantized.fp8 import Fp8
from jaxserve_checkpoints.quantized.hqq import Hqq
from jaxserve_checkpoints.quantized.mxfp4 import Mxfp4
from tests.checkpoints import quantized_files as files

pytestmark = pytest.mark.gpu

OUT, DEPTH = 128, 256


def read(format: Format, tensors: files.Tensors) -> NDArray[np.float32]:
    def dequantize(arrays: dict[str, jax.Array]) -> jax.Array:
        return format.decode(arrays, (OUT, DEPTH), None).pack().dequantize()

    return np.asarray(jax.jit(dequantize)(tensors))


def to_torch(array: NDArray[Any]) -> Any:
    import torch

    array = np.ascontiguousarray(array)
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    if array.dtype == ml_dtypes.float8_e4m3fn:
        return torch.from_numpy(array.view(np.uint8)).view(torch.float8_e4m3fn)
    return torch.from_numpy(array)


def test_mxfp4_as_transformers_reads_gpt_oss() -> None:
    pytest.importorskip("torch")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    import torch

    written = files.mxfp4(np.random.default_rng(0), OUT, DEPTH, blocks=True)
    blocks, scales = (to_torch(written.tensors[f".weight_{n}"])[None] for n in ("blocks", "scales"))
    theirs = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)[0]
    theirs = theirs.float().cpu().numpy()
    ours = read(Mxfp4(), written.tensors)
    np.testing.assert_array_equal(ours, theirs if theirs.shape == ours.shape else theirs.T)


def test_fp8_blocks_as_torch_multiplies_them() -> None:
    torch = pytest.importorskip("torch")
    written = files.fp8(np.random.default_rng(1), OUT, DEPTH, scales="block")
    values = to_torch(written.tensors[".weight"]).to(torch.float32)
    scale = to_torch(written.tensors[".weight_scale"]).repeat_interleave(128, 0)
    theirs = (values * scale.repeat_interleave(128, 1)).numpy()
    np.testing.assert_array_equal(read(Fp8(name="fp8", blocks=True), written.tensors), theirs)


@pytest.mark.parametrize("symmetric", [True, False])
def test_integers_as_compressed_tensors_unpacks_them(symmetric: bool) -> None:
    torch = pytest.importorskip("torch")
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    written = files.packed(np.random.default_rng(2), OUT, DEPTH, symmetric=symmetric)
    packed = to_torch(written.tensors[".weight_packed"])
    codes = helpers.unpack_from_int32(packed, 4, torch.Size((OUT, DEPTH))).float()
    scale = to_torch(written.tensors[".weight_scale"]).float()
    zero = torch.zeros_like(scale)
    if not symmetric:
        stored = to_torch(written.tensors[".weight_zero_point"])
        zero = helpers.unpack_from_int32(stored, 4, torch.Size(scale.shape), packed_dim=0).float()
    each = [values.repeat_interleave(128, 1) for values in (zero, scale)]
    theirs = ((codes - each[0]) * each[1]).numpy()
    np.testing.assert_array_equal(
        read(PackQuantized(group_size=128, symmetric=symmetric), written.tensors), theirs
    )


def test_nvfp4_as_compressed_tensors_unpacks_it() -> None:
    torch = pytest.importorskip("torch")
    helpers = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    written = files.nvfp4(np.random.default_rng(3), OUT, DEPTH, modelopt=False)
    packed = to_torch(written.tensors[".weight_packed"])
    values = helpers.unpack_fp4_from_uint8(packed, OUT, DEPTH, dtype=torch.float32)
    scale = to_torch(written.tensors[".weight_scale"]).float().repeat_interleave(16, 1)
    theirs = (values * scale / to_torch(written.tensors[".weight_global_scale"])).numpy()
    # They divide by the inverse of the tensor's scale, we multiply by it: one rounding more.
    np.testing.assert_allclose(read(Nvfp4Packed(), written.tensors), theirs, rtol=3e-7)


@pytest.mark.parametrize("axis", [0, 1])
def test_hqq_as_its_own_package_dequantises_it(axis: int) -> None:
    torch = pytest.importorskip("torch")
    quantizer = pytest.importorskip("hqq.core.quantize").Quantizer
    weight = torch.randn(OUT, DEPTH, dtype=torch.float32)
    packed, meta = quantizer.quantize(
        weight, nbits=4, group_size=64, axis=axis, compute_dtype=torch.float32, device="cpu"
    )
    meta = SimpleNamespace(**meta)
    tensors = {
        ".W_q": packed.numpy(),
        ".scale": meta.scale.numpy(),
        ".zero": meta.zero.numpy(),
    }
    theirs = quantizer.dequantize(packed, vars(meta)).float().numpy()
    ours = read(Hqq(group_size=64, axis=axis), tensors)
    if axis == 1:
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)
    else:
        error = np.sqrt(((ours - theirs) ** 2).mean() / (theirs**2).mean())
        assert error < 1e-2

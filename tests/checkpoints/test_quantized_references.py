"""What is read of quantised checkpoints against what their makers' own packages make of them.

    pip install -e .[references]
    python -m pytest -m slow tests/checkpoints/test_quantized_references.py

A CPU is enough. Tests are skipped where a package is missing: autoawq, gptqmodel and
nvidia-modelopt are not in the extra, because of what they ask for beside themselves. Of autoawq
one file is read (`pip install --no-deps autoawq` is enough).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from jaxserve_checkpoints.quantized.awq import Awq
from jaxserve_checkpoints.quantized.compressed_tensors import (
    IntQuantized,
    Mxfp4Packed,
    Nvfp4Packed,
    PackQuantized,
)
from jaxserve_checkpoints.quantized.format import Format
from jaxserve_checkpoints.quantized.fp8 import Fp8
from jaxserve_checkpoints.quantized.gptq import Gptq
from jaxserve_checkpoints.quantized.hqq import Hqq
from jaxserve_checkpoints.quantized.modelopt import ModeloptNvfp4
from jaxserve_checkpoints.quantized.mxfp4 import Mxfp4
from jaxserve_kernels.weights import pack_mxfp4, pack_nvfp4
from lab.embedded.iq2_xxs import BLOCK_BYTES, read_iq2_xxs
from tests.checkpoints import quantized_files as files

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # theirs are not ours
]

OUT, DEPTH = 128, 256


def read(format: Format, tensors: files.Tensors, order: Any = None) -> NDArray[np.float32]:
    """The weight; its inputs in `order` if one is given."""

    def dequantize(arrays: dict[str, jax.Array]) -> jax.Array:
        return format.decode(arrays, (OUT, DEPTH), order).pack().dequantize()

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


def module_file(package: str, name: str) -> ModuleType:
    """One file of a package whose own imports are not wanted."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"{package} is not installed")
    spec = importlib.util.spec_from_file_location(name, Path(found.origin).parent / name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("group", [64, 128])
def test_awq_as_its_own_package_dequantises_it(group: int) -> None:
    pytest.importorskip("torch")
    packing = module_file("awq", "utils/packing_utils.py")
    written = files.awq(np.random.default_rng(4), OUT, DEPTH, group=group)
    names = (".qweight", ".qzeros", ".scales")
    qweight, qzeros, scales = (to_torch(written.tensors[name]) for name in names)
    theirs = packing.dequantize_gemm(qweight, qzeros, scales.float(), 4, group).numpy().T
    np.testing.assert_array_equal(read(Awq(group_size=group), written.tensors), theirs)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("permute", [None, 5], ids=["in-order", "act-order"])
def test_gptq_as_gptqmodel_dequantises_it(version: int, permute: int | None) -> None:
    pytest.importorskip("torch")
    linear = pytest.importorskip(
        "gptqmodel.nn_modules.qlinear.torch", exc_type=ImportError
    ).TorchLinear
    written = files.gptq(np.random.default_rng(5), OUT, DEPTH, version=version, permute=permute)
    module = linear(4, 128, False, permute is not None, DEPTH, OUT)
    for name, array in written.tensors.items():
        getattr(module, name[1:]).copy_(to_torch(array))
    if version == 1:  # what loading a file of that version does: zero points count from 1
        module.qzeros += 0x11111111
    module.post_init()
    theirs = module.dequantize_weight().float().numpy().T
    format = Gptq(group_size=128, symmetric=False, version=version)
    order = format.order(written.tensors.get)
    assert (order is None) == (permute is None)
    ours = read(format, written.tensors, order)
    # They multiply in float16.
    np.testing.assert_allclose(ours, theirs[:, order] if permute else theirs, rtol=2**-10)


def test_nvfp4_as_modelopt_dequantises_it() -> None:
    torch = pytest.importorskip("torch")
    qtensor = pytest.importorskip(
        "modelopt.torch.quantization.qtensor.nvfp4_tensor", exc_type=ImportError
    ).NVFP4QTensor
    written = files.nvfp4(np.random.default_rng(6), OUT, DEPTH, modelopt=True)
    packed = qtensor(torch.Size((OUT, DEPTH)), torch.float32, to_torch(written.tensors[".weight"]))
    theirs = packed.dequantize(
        scale=to_torch(written.tensors[".weight_scale"]),
        double_scale=to_torch(written.tensors[".weight_scale_2"]),
        block_sizes={-1: 16},
    ).numpy()
    # They multiply the scales first: one rounding at another place.
    np.testing.assert_allclose(read(ModeloptNvfp4(), written.tensors), theirs, rtol=3e-7)


def test_mxfp4_as_compressed_tensors_unpacks_it() -> None:
    torch = pytest.importorskip("torch")
    helpers = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    scales = pytest.importorskip("compressed_tensors.compressors.mx_utils")
    written = files.mxfp4(np.random.default_rng(7), OUT, DEPTH, blocks=False)
    packed = to_torch(written.tensors[".weight_packed"])
    values = helpers.unpack_fp4_from_uint8(packed, OUT, DEPTH, dtype=torch.float32)
    power = scales.decompress_mx_scale(to_torch(written.tensors[".weight_scale"])).float()
    theirs = (values * power.repeat_interleave(32, 1)).numpy()
    np.testing.assert_array_equal(read(Mxfp4Packed(), written.tensors), theirs)


def test_int8_as_compressed_tensors_dequantises_it() -> None:
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    arguments = pytest.importorskip("compressed_tensors.quantization").QuantizationArgs
    written = files.int8(np.random.default_rng(8), OUT, DEPTH)
    scale = to_torch(written.tensors[".weight_scale"]).float()
    values = to_torch(written.tensors[".weight"])
    theirs = forward.dequantize(values, scale, args=arguments(num_bits=8, strategy="channel"))
    theirs = theirs.float().numpy()
    np.testing.assert_array_equal(read(IntQuantized(), written.tensors), theirs)


def test_iq2_xxs_as_gguf_dequantises_it() -> None:
    gguf = pytest.importorskip("gguf")
    rng = np.random.default_rng(9)
    data = rng.integers(0, 256, (OUT, 2, BLOCK_BYTES), np.uint8)
    data[..., :2] = rng.uniform(1e-4, 1e-2, (OUT, 2, 1)).astype("<f2").view(np.uint8)
    data = data.reshape(OUT, -1)
    theirs = gguf.dequantize(data, gguf.GGMLQuantizationType.IQ2_XXS)
    np.testing.assert_array_equal(read_iq2_xxs(data).dequantize(), theirs)


def test_fp4_values_as_gguf_dequantises_them() -> None:
    """Its files hold the nibbles in another order; the numbers are the same."""
    gguf = pytest.importorskip("gguf")
    rng = np.random.default_rng(10)
    codes = rng.integers(0, 16, (OUT, DEPTH), np.uint8)
    exponents = rng.integers(100, 140, (OUT, DEPTH // 32), np.uint8)
    halves = codes.reshape(OUT, -1, 2, 16)
    blocks = np.concatenate([exponents[..., None], halves[:, :, 0] | halves[:, :, 1] << 4], axis=-1)
    theirs = gguf.dequantize(blocks.reshape(OUT, -1), gguf.GGMLQuantizationType.MXFP4)
    np.testing.assert_array_equal(pack_mxfp4(codes, exponents).dequantize(), theirs)

    scale = np.abs(files.e4m3(rng, OUT, DEPTH // 16))
    eighths = codes.reshape(OUT, -1, 2, 8)
    packed = (eighths[:, :, 0] | eighths[:, :, 1] << 4).reshape(OUT, -1, 32)
    blocks = np.concatenate([scale.view(np.uint8).reshape(OUT, -1, 4), packed], axis=-1)
    theirs = gguf.dequantize(blocks.reshape(OUT, -1), gguf.GGMLQuantizationType.NVFP4)
    ours = pack_nvfp4(codes, scale, np.ones(OUT, np.float32)).dequantize()
    np.testing.assert_array_equal(ours, theirs)


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

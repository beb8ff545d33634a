"""Writes a Hugging Face folder with a model's published shape and random weights.

    python scripts/random_checkpoint.py qwen3-4b /tmp/qwen3-4b
    python scripts/random_checkpoint.py gpt-oss-20b /tmp/gpt-oss-20b --layers 2

For measuring starts and conversions. Sizes: 8 GB for qwen3-4b, 61 for qwen3-30b-a3b, 14 for
gpt-oss-20b. Families: Qwen3, Qwen3-MoE and gpt-oss, in bfloat16 except for gpt-oss's experts, which
are in MXFP4. Instead of a name, give a folder with a config.json. The tokenizer is the embedded
model's. A folder that already has the weights is kept. The script needs memory for a few rows only.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from jaxserve.layer_spec import ExpertsSpec, YarnScaling
from jaxserve.model_spec import ModelSpec
from jaxserve.models.registry import NAMED_MODELS, spec_of
from jaxserve_checkpoints import resolve
from jaxserve_checkpoints.reader import SINGLE_FILE

_GPT_OSS = "GptOssForCausalLM"
_ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", _GPT_OSS)
_NAMES = sorted(name for name, spec in NAMED_MODELS.items() if spec.architecture in _ARCHITECTURES)

_POOL = 1 << 24
"""Size of the pool of random numbers, from which all tensors are taken."""
_SHARD = 16 << 30
"""The most bytes of a file; larger models have several files."""
_INDEX = "model.safetensors.index.json"


class Tensor(NamedTuple):
    """Shape and dtype of a tensor. U8: MXFP4 codes, two per byte; E8M0: their scales, stored as
    bytes."""

    shape: tuple[int, ...]
    kind: str = "BF16"

    @property
    def stored(self) -> str:
        return "BF16" if self.kind == "BF16" else "U8"

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape))

    @property
    def nbytes(self) -> int:
        return self.size * (2 if self.kind == "BF16" else 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("model", help=f"a folder with config.json, or {', '.join(_NAMES)}")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, help="fewer layers, for a quick look")
    options = parser.parse_args()
    settings = Path(options.model) / "config.json"
    if options.model not in _NAMES and not settings.is_file():
        parser.error(f"{options.model} is neither a folder with config.json nor a known name")
    known = NAMED_MODELS.get(options.model)
    spec = spec_of(json.loads(settings.read_text())) if known is None else known
    if spec.architecture not in _ARCHITECTURES:
        parser.error(f"{options.model} is {spec.architecture}, not of {', '.join(_ARCHITECTURES)}")
    if options.layers:
        spec = replace(spec, layers=spec.layers[: options.layers])
    make(spec, options.folder)


def make(spec: ModelSpec, folder: Path) -> None:
    """Writes the folder, or keeps it if it is complete and has this shape."""
    config = json.dumps(hf_config(spec), indent=1)
    written = folder / "config.json"
    complete = any((folder / name).exists() for name in (SINGLE_FILE, _INDEX))
    if complete and written.exists() and written.read_text() == config:
        print(f"{folder} exists already")
        return
    folder.mkdir(parents=True, exist_ok=True)
    written.write_text(config)
    tokenizer = Path(resolve.__file__).parent / "embedded"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / name, folder / name)
    files = shards(dict(tensors(spec)))
    for name, held in files.items():
        unfinished = folder / f".{name}.{os.getpid()}"
        write(unfinished, held)
        unfinished.replace(folder / name)
    if len(files) > 1:
        places = {tensor: name for name, held in files.items() for tensor in held}
        (folder / _INDEX).write_text(json.dumps({"weight_map": places}))


def shards(held: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Tensors by file, in order."""
    ends = itertools.accumulate(tensor.nbytes for tensor in held.values())
    numbers = [(end - 1) // _SHARD for end in ends]
    count = numbers[-1] + 1
    files: dict[str, dict[str, Tensor]] = {}
    for number, (name, tensor) in zip(numbers, held.items(), strict=True):
        file = SINGLE_FILE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        files.setdefault(file, {})[name] = tensor
    return files


def hf_config(spec: ModelSpec) -> dict[str, object]:
    return {
        "architectures": [spec.architecture],
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.embed,
        "intermediate_size": spec.ffn or spec.embed,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.q_heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.attention.rope.theta,
        "max_position_embeddings": spec.max_position,
        "tie_word_embeddings": spec.tie_embeddings,
        "torch_dtype": "bfloat16",
        **(_gpt_oss_config(spec) if spec.architecture == _GPT_OSS else _experts_config(spec)),
    }


def _experts_config(spec: ModelSpec) -> dict[str, object]:
    if spec.experts is None:
        return {}
    return {
        "num_experts": spec.experts.num_experts,
        "num_experts_per_tok": spec.experts.top_k,
        "moe_intermediate_size": spec.experts.width,
        "norm_topk_prob": spec.experts.normalize,
    }


def _gpt_oss_config(spec: ModelSpec) -> dict[str, object]:
    experts, scaling = spec.experts, spec.attention.rope.scaling
    assert experts is not None and isinstance(scaling, YarnScaling)
    windows = [layer.attention.window for layer in spec.layers if layer.attention is not None]
    return {
        "intermediate_size": experts.width,
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "attention_bias": True,
        "sliding_window": next(each for each in windows if each),
        "layer_types": [("sliding" if each else "full") + "_attention" for each in windows],
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_max_position,
            "truncate": scaling.truncate,
        },
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
                "lm_head",
            ],
        },
    }  # fmt: skip


def tensors(spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """Tensors by name, in the order of the files."""
    yield "model.embed_tokens.weight", Tensor((spec.vocab_size, spec.embed))
    for index, layer in enumerate(spec.layers):
        block = f"model.layers.{index}."
        for norm in ("input", "post_attention"):
            yield f"{block}{norm}_layernorm.weight", Tensor((spec.embed,))
        yield from _attention(spec, block + "self_attn.")
        own = layer.feed_forward
        if not isinstance(own, ExpertsSpec):
            yield from _feed_forward(spec, block + "mlp.", own.width)
        elif spec.architecture == _GPT_OSS:
            yield from _gpt_oss_experts(spec, own, block + "mlp.")
        else:
            yield block + "mlp.gate.weight", Tensor((own.num_experts, spec.embed))
            for each in range(own.num_experts):
                yield from _feed_forward(spec, f"{block}mlp.experts.{each}.", own.width)
    yield "model.norm.weight", Tensor((spec.embed,))
    if not spec.tie_embeddings:
        yield "lm_head.weight", Tensor((spec.vocab_size, spec.embed))


def _attention(spec: ModelSpec, name: str) -> Iterator[tuple[str, Tensor]]:
    sizes = {"q": spec.q_size, "k": spec.kv_size, "v": spec.kv_size}
    for each, size in sizes.items():
        yield f"{name}{each}_proj.weight", Tensor((size, spec.embed))
        if spec.attention.qkv_bias:
            yield f"{name}{each}_proj.bias", Tensor((size,))
        if spec.attention.qk_norm and each != "v":
            yield f"{name}{each}_norm.weight", Tensor((spec.head_dim,))
    yield name + "o_proj.weight", Tensor((spec.embed, spec.q_size))
    if spec.attention.out_bias:
        yield name + "o_proj.bias", Tensor((spec.embed,))
    if spec.attention.sinks:
        yield name + "sinks", Tensor((spec.q_heads,))


def _feed_forward(spec: ModelSpec, name: str, width: int) -> Iterator[tuple[str, Tensor]]:
    for each in ("gate", "up"):
        yield f"{name}{each}_proj.weight", Tensor((width, spec.embed))
    yield name + "down_proj.weight", Tensor((spec.embed, width))


def _gpt_oss_experts(
    spec: ModelSpec, experts: ExpertsSpec, name: str
) -> Iterator[tuple[str, Tensor]]:
    """All experts of a layer in one tensor. Each block of 32 numbers has 16 bytes of codes and a
    scale."""
    count, width = experts.num_experts, experts.width
    yield name + "router.weight", Tensor((count, spec.embed))
    yield name + "router.bias", Tensor((count,))
    for matrix, out, depth in (("gate_up", 2 * width, spec.embed), ("down", spec.embed, width)):
        both = f"{name}experts.{matrix}_proj"
        yield both + "_blocks", Tensor((count, out, depth // 32, 16), "U8")
        yield both + "_scales", Tensor((count, out, depth // 32), "E8M0")
        yield both + "_bias", Tensor((count, out))


def write(file: Path, held: dict[str, Tensor]) -> None:
    """Writes the tensors in small parts, to need little memory."""
    header: dict[str, object] = {}
    end = 0
    for name, tensor in held.items():
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": tensor.stored, "shape": tensor.shape, "data_offsets": [start, end],
        }  # fmt: skip
    text = json.dumps(header).encode()
    pools = _Pools()
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for name, tensor in held.items():
            pool, left = pools.of(name, tensor), tensor.size
            while left:  # from another offset each time, so that layers differ
                first = int(pools.rng.integers(0, _POOL))
                piece = pool[first : first + left]
                stream.write(piece.data)
                left -= len(piece)


class _Pools:
    """Pools of random numbers, distributed as each kind of tensor needs."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self._normal = self.rng.standard_normal(_POOL, np.float32)
        self._made: dict[tuple[str, int, float], NDArray[np.uint8] | NDArray[np.uint16]] = {}

    def of(self, name: str, tensor: Tensor) -> NDArray[np.uint8] | NDArray[np.uint16]:
        """The pool for a tensor: matrices N(0, 1/in), norms around 1, biases around 0, any codes,
        and scales that give codes the size of matrices with some thousand inputs."""
        vector = len(tensor.shape) == 1 or name.endswith("bias")
        width = 0 if vector or tensor.kind != "BF16" else tensor.shape[-1]
        mean = 0.0 if name.endswith("bias") else 1.0
        key = tensor.kind, width, mean
        if key not in self._made:
            self._made[key] = self._numbers(*key)
        return self._made[key]

    def _numbers(
        self, kind: str, width: int, mean: float
    ) -> NDArray[np.uint8] | NDArray[np.uint16]:
        if kind == "U8":
            return self.rng.integers(0, 256, _POOL, np.uint8)
        if kind == "E8M0":
            return self.rng.integers(118, 121, _POOL, np.uint8)
        values = self._normal * width**-0.5 if width else mean + 0.02 * self._normal
        return values.astype(ml_dtypes.bfloat16).view(np.uint16)


if __name__ == "__main__":
    main()

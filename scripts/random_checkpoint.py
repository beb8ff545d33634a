"""Write a Hugging Face folder of a Qwen3 model's shape with random bfloat16 weights.

    python scripts/random_checkpoint.py qwen3-4b /tmp/qwen3-4b

For measuring starts and conversions: 8 GB for qwen3-4b. A folder with a config.json may stand for
a name. The tokenizer is the embedded model's. A folder that has the weights already is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxserve.model_spec import ModelSpec
from jaxserve.models.registry import NAMED_MODELS, spec_of
from jaxserve_checkpoints import resolve
from jaxserve_checkpoints.reader import SINGLE_FILE

_ARCHITECTURE = "Qwen3ForCausalLM"
_NAMES = sorted(name for name, spec in NAMED_MODELS.items() if spec.architecture == _ARCHITECTURE)

_POOL = 1 << 24
"""Random numbers that all tensors are taken from."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help=f"a folder with config.json, or {', '.join(_NAMES)}")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    settings = Path(options.model) / "config.json"
    if options.model not in _NAMES and not settings.is_file():
        parser.error(f"{options.model} is neither a folder with config.json nor a known name")
    known = NAMED_MODELS.get(options.model)
    spec = spec_of(json.loads(settings.read_text())) if known is None else known
    if spec.architecture != _ARCHITECTURE:
        parser.error(f"{options.model} is {spec.architecture}, not {_ARCHITECTURE}")
    make(spec, options.folder)


def make(spec: ModelSpec, folder: Path) -> None:
    """Write the folder, or keep it if it is complete and of that shape."""
    config = json.dumps(hf_config(spec), indent=1)
    written = folder / "config.json"
    if (folder / SINGLE_FILE).exists() and written.exists() and written.read_text() == config:
        print(f"{folder} is there already")
        return
    folder.mkdir(parents=True, exist_ok=True)
    written.write_text(config)
    tokenizer = Path(resolve.__file__).parent / "embedded"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / name, folder / name)
    unfinished = folder / f".{SINGLE_FILE}.{os.getpid()}"
    write(unfinished, dict(shapes(spec)))
    unfinished.replace(folder / SINGLE_FILE)


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
        **_experts_config(spec),
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


def shapes(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (spec.vocab_size, spec.embed)
    for layer in range(spec.num_layers):
        block = f"model.layers.{layer}."
        attention, mlp = block + "self_attn.", block + "mlp."
        yield block + "input_layernorm.weight", (spec.embed,)
        yield attention + "q_proj.weight", (spec.q_size, spec.embed)
        yield attention + "k_proj.weight", (spec.kv_size, spec.embed)
        yield attention + "v_proj.weight", (spec.kv_size, spec.embed)
        yield attention + "q_norm.weight", (spec.head_dim,)
        yield attention + "k_norm.weight", (spec.head_dim,)
        yield attention + "o_proj.weight", (spec.embed, spec.q_size)
        yield block + "post_attention_layernorm.weight", (spec.embed,)
        blocks = [(mlp, spec.ffn)]
        if spec.experts:
            yield mlp + "gate.weight", (spec.experts.num_experts, spec.embed)
            names = (f"{mlp}experts.{each}." for each in range(spec.experts.num_experts))
            blocks = [(name, spec.experts.width) for name in names]
        for name, width in blocks:
            yield name + "gate_proj.weight", (width, spec.embed)
            yield name + "up_proj.weight", (width, spec.embed)
            yield name + "down_proj.weight", (spec.embed, width)
    yield "model.norm.weight", (spec.embed,)
    if not spec.tie_embeddings:
        yield "lm_head.weight", (spec.vocab_size, spec.embed)


def write(file: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Tensor after tensor, so that the memory needed is that of some rows."""
    header: dict[str, object] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    rng = np.random.default_rng(0)
    normal = rng.standard_normal(_POOL, np.float32)
    pools: dict[int, np.ndarray] = {}
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for shape in shapes.values():
            width = shape[-1] if len(shape) > 1 else 0
            if width not in pools:
                values = normal * width**-0.5 if width else 1.0 + 0.02 * normal
                pools[width] = values.astype(ml_dtypes.bfloat16).view(np.uint16)
            left = int(np.prod(shape))
            while left:  # from another place each time, so that layers differ
                first = int(rng.integers(0, _POOL))
                piece = pools[width][first : first + left]
                stream.write(piece.tobytes())
                left -= len(piece)


if __name__ == "__main__":
    main()

"""Measures the embedded model's accuracy with its layers in each weight format, beside bfloat16.

    python scripts/eval_formats.py --out formats.json
    python scripts/eval_formats.py --formats int4-rtn,int4-awq --limit 20

The plain flax model answers the stored evaluation set greedily with each format's dequantised
weights, in bfloat16: what a format loses, without what a kernel adds (e4m3 tokens, for one).
AWQ is calibrated on 8,192 tokens of training chats of another seed than the evaluation's.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from embedded_chat import Encoder
from embedded_data import tokenizer_texts
from embedded_model import ModelConfig, Qwen3, from_huggingface
from eval_embedded import (
    MODEL_FOLDER,
    Scores,
    accuracy,
    answer_locally,
    judge,
    load_cases,
    print_table,
    select,
)

from jaxserve.config import ModelSpec
from jaxserve.models import qwen3
from jaxserve.models.awq import quantize_layer_awq
from jaxserve.models.calibration import layer_statistics
from jaxserve_checkpoints.load import load_params
from jaxserve_checkpoints.reader import open_checkpoint
from jaxserve_kernels import weights
from jaxserve_kernels.weights.hqq import quantize_int4_hqq

MATRICES = ("qkv", "out", "gate_up", "down")
ROUNDED: dict[str, Callable[[jax.Array], Any]] = {
    "fp8-rtn": weights.quantize_fp8,
    "nvfp4-rtn": weights.quantize_nvfp4,
    "mxfp4-rtn": weights.quantize_mxfp4,
    "int4-rtn": weights.quantize_int4,
    "int4-g64-rtn": functools.partial(weights.quantize_int4, group=64),
    "int4-hqq": quantize_int4_hqq,
    "int4-g64-hqq": functools.partial(quantize_int4_hqq, group=64),
}
FORMATS = ("bf16", *ROUNDED, "int4-awq")
CALIBRATION_SEED, SEQUENCES, LENGTH = 11, 32, 256


def main() -> None:
    args = parse_args()
    spec = ModelSpec.from_hf(json.loads((MODEL_FOLDER / "config.json").read_text()))
    plain = load_params(
        open_checkpoint(MODEL_FOLDER), qwen3.rules(spec), qwen3.abstract(spec, jnp.float32)
    )
    cases = select(load_cases(MODEL_FOLDER / "eval.jsonl.gz"), args.tasks, args.limit)
    model = Qwen3(ModelConfig.load(MODEL_FOLDER))
    found: dict[str, Scores] = {}
    for name in args.formats:
        begin = time.perf_counter()
        params = from_huggingface(tensors_of(in_format(name, plain, spec), spec))
        answers = answer_locally(cases, MODEL_FOLDER, args.batch_tokens, (model, params))
        found[name] = accuracy(judge(cases, answers))
        mean = sum(score["accuracy"] for score in found[name].values()) / len(found[name])
        print(f"{name}: {mean:.2%}, {time.perf_counter() - begin:.0f} s", flush=True)
        if args.out:
            report = {"device": jax.devices()[0].device_kind, "cases": len(cases), "formats": found}
            args.out.write_text(json.dumps(report, indent=1) + "\n")
    (first, scores), *others = found.items()
    print_table(scores, f"{len(cases)} cases; first column: {first}", dict(others))


def parse_args() -> argparse.Namespace:
    def formats(text: str) -> list[str]:
        names = text.split(",")
        if unknown := set(names) - set(FORMATS):
            raise argparse.ArgumentTypeError(f"{sorted(unknown)}; known: {FORMATS}")
        return ["bf16", *(name for name in names if name != "bf16")]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", type=formats, default=list(FORMATS))
    parser.add_argument("--tasks", nargs="+", help="only tasks whose name begins with one of these")
    parser.add_argument("--limit", type=int, help="at most this many cases of each task")
    parser.add_argument("--batch-tokens", type=int, default=16_384, help="prompt tokens")
    parser.add_argument("--out", type=Path, help="where to write the accuracies as JSON")
    return parser.parse_args()


def in_format(name: str, plain: qwen3.Params, spec: ModelSpec) -> qwen3.Params:
    """The model with the values that a format's weights have, in float32."""
    if name == "bf16":
        return plain
    if name == "int4-awq":
        statistics = layer_statistics(plain, calibration(), spec)
        pairs = zip(qwen3.layer_views(plain.layers), statistics, strict=True)
        layers = [quantize_layer_awq(layer, inputs, spec).layer for layer, inputs in pairs]
    else:
        quantize = jax.jit(ROUNDED[name])
        layers = [
            layer._replace(**{each: quantize(getattr(layer, each)) for each in MATRICES})
            for layer in qwen3.layer_views(plain.layers)
        ]
    return plain._replace(
        layers=tuple(
            layer._replace(**{each: getattr(layer, each).dequantize() for each in MATRICES})
            for layer in layers
        )
    )


def calibration() -> jax.Array:
    """Token ids [sequences, tokens]."""
    encoder = Encoder.load(MODEL_FOLDER)
    ids: list[int] = []
    for text in tokenizer_texts(CALIBRATION_SEED, 2_000):
        ids += encoder.ids(text)
        if len(ids) >= SEQUENCES * LENGTH:
            break
    return jnp.array(ids[: SEQUENCES * LENGTH], jnp.int32).reshape(SEQUENCES, LENGTH)


def tensors_of(params: qwen3.Params, spec: ModelSpec) -> dict[str, np.ndarray]:
    """Under their Hugging Face names."""
    tensors: dict[str, Any] = {
        "model.embed_tokens.weight": params.embedding,
        "model.norm.weight": params.final_norm,
    }
    for index, layer in enumerate(qwen3.layer_views(params.layers)):
        q, k, v = np.split(np.asarray(layer.qkv), [spec.q_size, spec.q_size + spec.kv_size])
        gate, up = np.split(np.asarray(layer.gate_up), 2)
        parts = {
            "input_layernorm": layer.attention_norm,
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.q_norm": layer.q_norm,
            "self_attn.k_norm": layer.k_norm,
            "self_attn.o_proj": layer.out,
            "post_attention_layernorm": layer.mlp_norm,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": layer.down,
        }
        tensors |= {f"model.layers.{index}.{name}.weight": each for name, each in parts.items()}
    return {name: np.asarray(array, np.float32) for name, array in tensors.items()}


if __name__ == "__main__":
    main()

"""Compares jaxserve's logits with transformers' on the same weights, with teacher forcing.

    python scripts/gpu_parity.py --model-config qwen3-4b --json parity.json
    python scripts/gpu_parity.py --model-config tiny          # seconds, on a CPU
    python scripts/gpu_parity.py --model FOLDER               # real weights

Needs torch and transformers. jaxserve may be on PYTHONPATH=.:kernels:checkpoints instead of being
installed. transformers runs first, in a child process that frees the device memory when it ends: in
bfloat16, and in float32 as the reference. The error of transformers in bfloat16 is the noise floor
for jaxserve's differences:

    regret      the reference's logprob of its own most likely token minus that of ours
    |dlogprob|  over the reference's 64 most likely tokens

The exit status is 1 if a bound does not hold. The maximum is printed but not bounded: it grows with
the number of positions.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve_kernels.target import Target

TOP = 64
DECODED_TAIL = 16
"""Number of last tokens of each sequence that run through jaxserve's decode step, one at a time."""
MAX_REGRET = 0.20
MAX_MEAN_OF_FLOOR = 2.0
MAX_P99_OF_FLOOR = 1.6

LENGTHS = {"tiny": (1, 20, 65), "full": (1, 20, 65, 257, 1025)}
"""Sequence lengths: a single token, only decoded tokens, and just past page and bucket sizes."""

_ARCHITECTURE = "Qwen3ForCausalLM"
LOGIT_STD = 4.0
"""Standard deviation of the logits. The best token then has a probability of about 0.2, not
1/vocab."""


def hf_settings(name: str) -> dict[str, Any]:
    """Keyword arguments of Qwen3Config for a named shape."""
    from jaxserve.layer_spec import AttentionSpec, Rope
    from jaxserve.model_spec import ModelSpec
    from jaxserve.models.registry import NAMED_MODELS

    heads = AttentionSpec(q_heads=4, kv_heads=2, head_dim=32, rope=Rope(theta=1e6), qk_norm=True)
    tiny = ModelSpec.dense(
        architecture=_ARCHITECTURE,
        vocab_size=1024,
        embed=128,
        ffn=256,
        num_layers=3,
        attention=heads,
        max_position=40_960,
        tie_embeddings=True,
    )
    spec = tiny if name == "tiny" else NAMED_MODELS[name]
    if spec.architecture != _ARCHITECTURE:
        raise SystemExit(f"{name} is no {_ARCHITECTURE}")
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.embed,
        "intermediate_size": spec.ffn,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.q_heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "rms_norm_eps": spec.norm_eps,
        "max_position_embeddings": spec.max_position,
        "tie_word_embeddings": spec.tie_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.attention.rope.theta},
        "bos_token_id": None,
        "eos_token_id": None,
    }


def reference_process(
    folder: Path, settings: dict[str, Any] | None, lengths: tuple[int, ...], seed: int, out: Path
) -> None:
    """Writes weights to `folder` (unless `settings` is None), and tokens and transformers' logits
    to `out`."""
    import torch
    from transformers import Qwen3ForCausalLM

    torch.backends.cuda.matmul.allow_tf32 = False
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if settings is not None:
        write_random_model(folder, settings, seed, device)
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    generator = np.random.default_rng(seed)
    for i, length in enumerate(lengths):
        np.save(out / f"tokens_{i}.npy", generator.integers(0, vocab, length, dtype=np.int32))
    for name, dtype in (("bf16", torch.bfloat16), ("f32", torch.float32)):
        model = Qwen3ForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
        for i in range(len(lengths)):
            tokens = torch.tensor(np.load(out / f"tokens_{i}.npy"))[None].long().to(device)
            with torch.no_grad():
                logits = model(tokens, use_cache=False).logits[0]
            np.save(out / f"{name}_{i}.npy", logits.float().cpu().numpy())
        del model


def write_random_model(folder: Path, settings: dict[str, Any], seed: int, device: str) -> None:
    """Writes seeded bfloat16 weights that preserve the size of activations and spread the
    logits."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = Qwen3ForCausalLM(Qwen3Config(**settings))
    torch.set_default_dtype(torch.float32)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator, device=device)
            if weight.ndim == 1:
                weight.copy_(1.0 + 0.1 * noise)
                continue
            gain = LOGIT_STD if "embed_tokens" in name or "lm_head" in name else 1.0
            weight.copy_(noise * (gain / math.sqrt(weight.shape[1])))
    model.save_pretrained(folder, max_shard_size="4GB")


def jaxserve_logits(folder: Path, sequences: list[np.ndarray], dtype: str) -> Iterator[np.ndarray]:
    """Yields float32 logits [length, vocab] of each sequence. The last tokens are decoded one by
    one, the others prefilled."""
    import functools

    from jaxserve.startup.environment import prepare

    prepare(gpu_memory_utilization=0.9)

    import jax
    import jax.numpy as jnp

    from jaxserve.config import CacheConfig
    from jaxserve.models import decoder, registry
    from jaxserve.runner import kv_cache
    from jaxserve_checkpoints.load import load_params
    from jaxserve_checkpoints.reader import open_checkpoint
    from jaxserve_kernels.kv_format import Dense

    spec = registry.spec_of(json.loads((folder / "config.json").read_text()))
    started = time.perf_counter()
    stacked = jax.default_backend() == "gpu"  # as in serving
    abstract = decoder.abstract(spec, jnp.dtype(dtype), stacked=stacked)
    params = load_params(open_checkpoint(folder), registry.rules(spec), abstract)
    print(f"jaxserve: weights on the device in {time.perf_counter() - started:.1f} s")

    @functools.partial(jax.jit, static_argnames="tile_size", donate_argnames="kv")
    def run(params: Any, kv: Any, tokens: Any, tile_size: int) -> Any:
        if tile_size == 1:
            hidden, kv = decoder.decode(params, kv, tokens, spec, target=Target.here())
        else:
            pre_mlp, kv = decoder.forward(
                params, kv, tokens, spec, tile_size=tile_size, target=Target.here()
            )
            hidden = decoder.finish(params, pre_mlp, spec, target=Target.here())
        return decoder.logits(params, hidden, target=Target.here()), kv

    for sequence in sequences:
        cache = CacheConfig(num_pages=2 + len(sequence) // 64, page_size=64)
        kv = tuple(Dense().allocate(each, dtype) for each in kv_cache.shapes(spec, cache, 1))
        table = np.random.default_rng(0).permutation(np.arange(1, cache.num_pages))
        prefilled = max(len(sequence) - DECODED_TAIL, 0)
        parts = []
        starts = [0] * (prefilled > 0) + list(range(prefilled, len(sequence)))
        for start in starts:
            end = prefilled if start < prefilled else start + 1
            tile_size = 32 if start < prefilled else 1
            tokens = step_tokens(sequence[:end], start, table, cache.page_size, tile_size)
            logits, kv = run(params, kv, tokens, tile_size=tile_size)
            parts.append(np.asarray(logits[: end - start]))
        yield np.concatenate(parts)


def step_tokens(
    sequence: np.ndarray, start: int, table: np.ndarray, page_size: int, tile_size: int
) -> Any:
    """The tokens of a sequence from `start` on as a step, padded to 64 if it is a prefill."""
    from jaxserve.models.layer import StepTokens
    from jaxserve_kernels.kv_format import AttentionStep
    from jaxserve_kernels.paged_attention import QueryTiles

    count = len(sequence) - start
    padding = (0, -count % 64 if tile_size > 1 else 0)
    positions = np.pad(np.arange(start, len(sequence), dtype=np.int32), padding)
    real = np.arange(len(positions)) < count
    first = np.arange(0, count, tile_size, dtype=np.int32)
    tiles = QueryTiles(
        first=first,
        length=np.minimum(count - first, tile_size).astype(np.int32),
        slot=np.zeros_like(first),
        position=first + np.int32(start),
    )
    places: Any = AttentionStep(
        slots=np.where(real, 0, 1).astype(np.int32),
        positions=positions,
        pages=np.where(real, table[positions // page_size], 0).astype(np.int32),
        offsets=positions % page_size,
        tiles=tiles,
        page_table=np.stack([table, np.zeros_like(table)]).astype(np.int32),
    )
    ids: Any = np.pad(sequence[start:].astype(np.int32), padding)
    return StepTokens(ids, (places,))


def compare(reference: np.ndarray, ours: np.ndarray) -> dict[str, np.ndarray]:
    """Regret [length] and |dlogprob| [length, TOP] of logits [length, vocab], row by row."""
    regrets, deltas, same = [], [], []
    for wanted, got in zip(reference, ours, strict=True):
        wanted, got = log_softmax(wanted), log_softmax(got)
        top = np.argpartition(wanted, -TOP)[-TOP:]
        choice = got.argmax()
        regrets.append(wanted.max() - wanted[choice])
        deltas.append(np.abs(wanted[top] - got[top]))
        same.append(choice == wanted.argmax())
    return {"regret": np.array(regrets), "delta": np.array(deltas), "same": np.array(same)}


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def summary(parts: list[dict[str, np.ndarray]]) -> dict[str, float]:
    regret = np.concatenate([part["regret"] for part in parts])
    delta = np.concatenate([part["delta"].ravel() for part in parts])
    return {
        "positions": len(regret),
        "same_top1": float(np.concatenate([part["same"] for part in parts]).mean()),
        "regret_mean": float(regret.mean()),
        "regret_max": float(regret.max()),
        "dlogprob_mean": float(delta.mean()),
        "dlogprob_p99": float(np.quantile(delta, 0.99)),
        "dlogprob_max": float(delta.max()),
    }


def problems(results: dict[str, dict[str, float]], floor: str, judged: str) -> list[str]:
    """Returns a line for each bound that does not hold."""
    base, ours = results[floor], results[judged]
    bounds = {
        "regret_max": max(MAX_REGRET, 2 * base["regret_max"]),
        "dlogprob_mean": MAX_MEAN_OF_FLOOR * base["dlogprob_mean"],
        "dlogprob_p99": MAX_P99_OF_FLOOR * base["dlogprob_p99"],
    }
    return [
        f"{name} is {ours[name]:.4f}, allowed {limit:.4f}"
        for name, limit in bounds.items()
        if not ours[name] <= limit
    ]


def evaluate(folder: Path, out: Path, count: int, dtype: str) -> dict[str, dict[str, float]]:
    """Makes all comparisons, with one sequence in memory at a time."""
    pairs: dict[str, list[dict[str, np.ndarray]]] = {
        "transformers bf16 vs f32": [],
        "jaxserve vs transformers bf16": [],
        "jaxserve vs transformers f32": [],
    }
    sequences = [np.load(out / f"tokens_{i}.npy") for i in range(count)]
    for i, ours in enumerate(jaxserve_logits(folder, sequences, dtype)):
        bf16, f32 = np.load(out / f"bf16_{i}.npy"), np.load(out / f"f32_{i}.npy")
        for rows, (reference, got) in zip(
            pairs.values(), ((f32, bf16), (bf16, ours), (f32, ours)), strict=True
        ):
            rows.append(compare(reference, got))
    return {name: summary(rows) for name, rows in pairs.items()}


def report(results: dict[str, dict[str, float]]) -> str:
    columns = list(next(iter(results.values())))
    lines = [" " * 30 + "".join(f"{column:>15}" for column in columns)]
    for name, values in results.items():
        lines.append(f"{name:30}" + "".join(f"{values[column]:15.4g}" for column in columns))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-config", default="qwen3-4b", help="tiny, or a named shape")
    parser.add_argument("--model", type=Path, help="a folder with real weights, instead of random")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args()
    lengths = LENGTHS["tiny" if args.model_config == "tiny" else "full"]
    settings = None if args.model else hf_settings(args.model_config)
    with tempfile.TemporaryDirectory() as scratch:
        folder, out = args.model or Path(scratch) / "model", Path(scratch)
        context = multiprocessing.get_context("spawn")
        arguments = (folder, settings, lengths, args.seed, out)
        process = context.Process(target=reference_process, args=arguments)
        process.start()
        process.join()
        if process.exitcode:
            print(f"transformers failed with exit status {process.exitcode}", file=sys.stderr)
            return 2
        results = evaluate(folder, out, len(lengths), args.dtype)
    print(report(results))
    failed = problems(results, "transformers bf16 vs f32", "jaxserve vs transformers bf16")
    for problem in failed:
        print(f"FAILED: {problem}")
    if args.json:
        write_json(args, results, failed)
    return 1 if failed else 0


def write_json(args: argparse.Namespace, results: dict[str, Any], failed: list[str]) -> None:
    import jax

    found = {
        "model": str(args.model or args.model_config),
        "dtype": args.dtype,
        "seed": args.seed,
        "device": jax.devices()[0].device_kind,
        "versions": {
            name: importlib.metadata.version(name) for name in ("jax", "torch", "transformers")
        },
        "results": results,
        "failed": failed,
    }
    args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())

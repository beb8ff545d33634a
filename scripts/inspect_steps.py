"""Compiles the steps of a model for a GPU that is not present, and describes the programs.

    python scripts/inspect_steps.py --target tests/aot/h100_80gb_hbm3.textproto --layers 4

Needs no GPU, but XLA's compiler for GPUs (jax-cuda13-plugin), Triton with jax-triton, and the CUDA
toolkit's ptxas. Without the device XLA cannot tune, so products may use other kernels than on the
device. The content of the CUDA graph, the copies and the scratch memory are the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from jaxserve.startup.environment import prepare

DUMP = tempfile.TemporaryDirectory()
os.environ["JAX_PLATFORMS"] = "cpu"  # no GPU client is created
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={DUMP.name}"
prepare(gpu_memory_utilization=0.9)

import jax
import jax.numpy as jnp
from head_shapes import HEADS
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec
from random_weights import LAYER_FORMATS, encoder

from jaxserve.model_spec import ModelSpec
from jaxserve.models import decoder, delta_net
from jaxserve.models.drafts import loading
from jaxserve.models.drafts.spec import DraftSpec, Eagle3Draft, MtpDraft
from jaxserve.models.registry import NAMED_MODELS
from jaxserve.runner import batch, draft_cache, kv_cache, sequence_state, slot_tables, verify
from jaxserve.runner.batch import Bucket
from jaxserve.runner.draft_step import WithHead
from jaxserve.runner.step import DeviceState, run_step
from jaxserve.runner.verify import VerifyBucket
from jaxserve.runner.verify_step import run_verify_step
from jaxserve_checkpoints.load import Encode, encoded_abstract
from jaxserve_kernels.kv_format import NAMES, named
from jaxserve_kernels.paged_attention import tile_tokens
from jaxserve_kernels.target import Target

MAX_SEQS, MAX_TOKENS, PAGE_SIZE, PAGES = 256, 2048, 64, 2000


def main() -> None:
    args = parse_args()
    spec = NAMED_MODELS[args.model]
    spec = dataclasses.replace(spec, layers=spec.layers[: args.layers])
    sharding = topology_sharding(args.target.read_text())
    buckets: list[Bucket | VerifyBucket] = [Bucket.decode(rows) for rows in args.decode]
    tile_size = tile_tokens(spec.q_heads // spec.kv_heads)
    buckets += [
        Bucket.mixed(
            tokens, max_rows=MAX_SEQS, tile_size=tile_size, updates=2 * min(tokens, MAX_SEQS)
        )
        for tokens in args.prefill
    ]
    buckets += verify.buckets(args.verify, groups=1)
    encode = encoder(spec, args.quantization, args.lm_head_dtype)
    draft = HEADS[args.draft_head](spec) if args.draft_head else None
    reports = [
        inspect(spec, encode, bucket, sharding, args.kv_cache_dtype, draft) for bucket in buckets
    ]
    print(json.dumps(reports, indent=1))


def parse_args() -> argparse.Namespace:
    def sizes(text: str) -> list[int]:
        return [int(part) for part in text.split(",") if part]

    def shapes(text: str) -> list[tuple[int, int]]:
        pairs = (part.split("x") for part in text.split(","))
        return [(int(rows), int(positions)) for rows, positions in pairs]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, required=True, help="XLA's description of the GPU")
    parser.add_argument("--model", choices=sorted(NAMED_MODELS), default="qwen3-4b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--quantization", choices=LAYER_FORMATS)
    parser.add_argument("--lm-head-dtype", choices=("int8", "fp8"))
    parser.add_argument("--kv-cache-dtype", choices=NAMES, default="auto")
    parser.add_argument("--decode", type=sizes, default=[1, 64])
    parser.add_argument("--prefill", type=sizes, default=[512])
    parser.add_argument("--verify", type=shapes, default=[], help="rows x positions: 8x8,32x2")
    parser.add_argument("--draft-head", choices=HEADS, help="a head beside the model")
    return parser.parse_args()


def topology_sharding(description: str) -> NamedSharding:
    """A sharding that puts everything on the one GPU of the description."""
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="gpu", topology="1x1x1", target_config=description
    )
    mesh = topologies.make_mesh(topo=topology, mesh_shape=(1,), axis_names=("gpu",))
    return NamedSharding(mesh, PartitionSpec())


def inspect(
    spec: ModelSpec,
    encode: Encode,
    bucket: Bucket | VerifyBucket,
    sharding: NamedSharding,
    kv_cache_dtype: str,
    draft: DraftSpec | None,
) -> dict[str, Any]:
    """Compiles the step of a bucket, and describes its program."""
    for old in Path(DUMP.name).iterdir():
        old.unlink()
    groups = len(spec.cache_groups)
    kv_format = named(kv_cache_dtype)
    page_size = kv_format.page_size or PAGE_SIZE
    cache = kv_cache.cache_config(spec, [PAGES] * groups, page_size)
    recurrent = delta_net.abstract_state(spec, jnp.bfloat16, MAX_SEQS + 1)
    shapes = kv_cache.shapes(spec, cache, MAX_SEQS)
    state = DeviceState(
        kv=(
            *(kv_format.abstract(each, jnp.bfloat16) for each in shapes),
            *(() if recurrent is None else (recurrent,)),
        ),
        sequences=jax.ShapeDtypeStruct(
            sequence_state.shape(MAX_SEQS, spec.max_position // page_size, groups), jnp.int32
        ),
        tables=slot_tables.abstract(MAX_SEQS, spec.vocab_size),
        pre_mlp=decoder.abstract_pre_mlp(spec, jnp.bfloat16, max(bucket.tokens, MAX_TOKENS)),
        results=jax.ShapeDtypeStruct((MAX_SEQS + 1, batch.RESULT_COLUMNS), jnp.int32),
        draft_kv=draft_cache.abstract(draft, shapes[0], jnp.bfloat16),
        draft_states=jax.ShapeDtypeStruct((MAX_SEQS + 1, spec.embed), jnp.bfloat16)
        if isinstance(draft, Eagle3Draft | MtpDraft)
        else None,
    )
    plain = decoder.abstract(spec, jnp.bfloat16, stacked=True)
    params = encoded_abstract(plain, encode)
    if draft is not None:
        params = WithHead(params, loading.abstract(draft, jnp.bfloat16, stacked=True))
    packed = jax.ShapeDtypeStruct((bucket.packed_size,), jnp.int32)
    verifies = isinstance(bucket, VerifyBucket)
    step = functools.partial(
        run_verify_step if verifies else run_step,
        spec=spec,
        draft=draft,
        bucket=bucket,
        sampled_vocab=spec.vocab_size,
        target=Target.for_gpu(90),
    )
    states: tuple[Any, ...] = (state,)
    if verifies:
        words = state.tables.masks.shape[1]
        states += (verify.abstract([(bucket.rows, bucket.positions)], MAX_SEQS, words),)
    arguments = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        (params, *states, packed),
    )
    donated = tuple(range(1, 1 + len(states)))
    program = jax.jit(step, donate_argnums=donated).lower(*arguments).compile()
    memory = program.memory_analysis()
    (thunks,) = Path(DUMP.name).glob("*.thunk_sequence_after_thunk_passes.txt")
    lines = thunks.read_text().splitlines()
    (buffers,) = Path(DUMP.name).glob("*after_optimizations-buffer-assignment.txt")
    allocations = buffers.read_text().split("\nallocation ")
    (results,) = (each for each in allocations if " state_results" in each)
    text = program.as_text()
    counts = ",".join(map(str, state.tables.counts.shape))
    caches = jax.tree.leaves((state.kv, state.draft_kv))
    if state.draft_kv is not None:
        caches.append(jax.eval_shape(draft_cache.as_pages, state.draft_kv))
    kv_shapes = [",".join(map(str, leaf.shape)) for leaf in caches]
    return {
        "bucket": bucket.name,
        "arguments": len(jax.tree.leaves(arguments)),
        "outside_graph": re.findall(r"^\d+: (k\w+)", "\n".join(lines), re.M),
        "inside_graph": sum(bool(re.match(r"\s+\d+: k\w+", line)) for line in lines),
        "kv_copies": sum(len(re.findall(rf"\[{shape}\]\S* copy\(", text)) for shape in kv_shapes),
        "chains": len(re.findall(r'custom_call_target="jaxserve_pdl_launches"', text)),
        "kernels_alone": len(re.findall(r'custom_call_target="triton_kernel_call"', text)),
        "calls_with_input": sum(map(_reads_input, text[text.index("\nENTRY") :].splitlines())),
        "weight_copies": len(_WEIGHT_COPY.findall(text)),
        "adding_products": len(re.findall(r'custom-call.*"beta":1', text)),
        "table_copies": len(re.findall(rf"\[{counts}\]\S* copy\(", text)),
        "state_bytes": sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(states)),
        "aliased_bytes": memory.alias_size_in_bytes,
        "other_output_bytes": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "written_to_results": results.count(" value: ") - 1,
        "scratch_bytes": memory.temp_size_in_bytes,
    }


_WEIGHT_COPY = re.compile(r" fusion\(%params_layers[^,)]*\), kind=kLoop")
"""A kernel that reads a weight of the layers, and nothing else."""


def _reads_input(line: str) -> bool:
    """Returns whether an instruction is a foreign call, or a fusion of one and its operands'
    slices, that reads the step's input itself."""
    calls = " custom-call(" in line or '"dynamic_slice_fusion"' in line
    return calls and re.search(r"%packed\b", line) is not None


if __name__ == "__main__":
    main()

"""Flags of weights, the engine, `jaxserve plan` and `kernels`. Other flags are in flags.py."""

from __future__ import annotations

import argparse
from pathlib import Path

from jaxserve.cli.flag_values import (
    above_0,
    kv_events,
    positive,
    power_of_2,
    share,
    size_in_bytes,
    sizes,
    speculation,
    tokens,
)
from jaxserve.cli.flags import AddArgument
from jaxserve.cli.gpus import GPUS
from jaxserve.config import KV_CACHE_DTYPES, POLICIES


def add_plan_flags(add: AddArgument) -> None:
    """Adds the flags of `jaxserve plan`."""
    add(
        "--gpu",
        choices=GPUS,
        help="GPU to plan for",
    )
    add(
        "--gpu-memory",
        type=size_in_bytes,
        help="memory of the GPU, if unusual, e.g. 40Gi",
    )
    add(
        "--json",
        action="store_true",
        help="print the plan as JSON",
    )


def add_kernels_flags(add: AddArgument) -> None:
    """Adds the flags of `jaxserve kernels`."""
    add(
        "--device",
        dest="gpu",
        choices=GPUS,
        help="GPU to choose kernels for",
    )
    add(
        "--all",
        action="store_true",
        help="also print the implementations that refused, and why",
    )
    add(
        "--json",
        action="store_true",
        help="print the choices as JSON",
    )


def add_weight_flags(add: AddArgument, auto_dtype: str) -> None:
    """Adds the flags for the format of the weights."""
    add(
        "--dtype",
        choices=("auto", "bfloat16", "float32"),
        default="auto",
        help=f"type of weights and KV cache; auto: {auto_dtype}",
    )
    add(
        "--quantization",
        choices=("int4", "fp8", "nvfp4"),
        help="quantise the layers' weights at load (default: as the checkpoint is)",
    )
    add(
        "--lm-head-dtype",
        choices=("auto", "unquantized", "int8", "fp8"),
        default="auto",
        help="type of the output matrix, and of a tied embedding; auto: int8 with --quantization, "
        "else unquantized",
    )


def add_engine_flags(add: AddArgument) -> None:
    """Adds the flags for memory, shapes, scheduling and compiled programs."""
    add_weight_flags(add, "bfloat16 on a GPU, float32 on a CPU")
    add(
        "--keep-converted",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep weights quantised at load in --cache-dir, for later starts",
    )
    add(
        "--fp8-copy",
        choices=("auto", "on", "off"),
        default="auto",
        help="fp8 copy of 4-bit weights, for steps of more than 64 tokens; auto: on GPUs with fp8, "
        "if it takes at most a tenth of the KV cache's memory",
    )
    add(
        "--max-model-len",
        type=tokens,
        help="most tokens of prompt plus output, e.g. 8192 or 32k (default: the model's limit, or "
        "what the KV cache holds)",
    )
    add(
        "--max-num-seqs",
        type=positive,
        help="most sequences that run at once (default: the largest decode bucket; fewer on a "
        "small GPU)",
    )
    add(
        "--max-num-batched-tokens",
        type=positive,
        help="most tokens of one step (default: the largest prefill bucket)",
    )
    add(
        "--max-itl-ms",
        type=above_0,
        help="most milliseconds between two tokens while a prompt is computed (default: 50 on a "
        "GPU, 1000 on a CPU)",
    )
    add(
        "--kv-cache-dtype",
        choices=KV_CACHE_DTYPES,
        default="auto",
        help="format of keys and values; auto: as --dtype",
    )
    add(
        "--calculate-kv-scales",
        action="store_true",
        help="choose the scales of an fp8 KV cache at the start",
    )
    add(
        "--calibration",
        type=Path,
        help="text file for --calculate-kv-scales, UTF-8 (default: a short built-in text)",
    )
    add(
        "--scheduling-policy",
        choices=POLICIES,
        default="slo",
        help="who is served next: fcfs by arrival, priority with ageing, slo by deadline, cost and "
        "fairness between API keys",
    )
    add(
        "--slo-ttft-ms",
        type=above_0,
        help="deadline of the first token for requests without x-slo-ttft-ms, with policy slo "
        "(default: none)",
    )
    add(
        "--block-size",
        type=power_of_2,
        help="tokens per page of the KV cache, a power of two (default: 64 on a GPU, 16 on a "
        "CPU, 128 with KVarN)",
    )
    add(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="reuse the KV cache of equal prefixes",
    )
    add(
        "--kv-events-config",
        type=kv_events,
        help="publish KV cache events over ZMQ: vLLM's JSON, e.g. "
        "'{\"enable_kv_cache_events\": true}' (default: no events)",
    )
    add(
        "--kv-cache-memory-bytes",
        type=size_in_bytes,
        help="size of the KV cache, e.g. 512M or 20Gi (default: what is left on a GPU, 512Mi on a "
        "CPU)",
    )
    add(
        "--kv-offload-size",
        type=size_in_bytes,
        help="host memory for prefixes that leave the GPU, e.g. 64Gi; pinned at the start "
        "(default: none)",
    )
    add(
        "--kv-offload-path",
        type=Path,
        help="folder for prefixes that leave host memory; later starts find them (default: none)",
    )
    add(
        "--kv-offload-disk-size",
        type=size_in_bytes,
        help="largest size of --kv-offload-path (default: 100G)",
    )
    add(
        "--kv-offload-verify",
        action="store_true",
        help="compare a checksum of each page that comes back from host memory; files always have "
        "one",
    )
    add(
        "--kv-offload-load-rate",
        type=size_in_bytes,
        help="most bytes per second that loads from lower tiers take while other sequences run, on "
        "average, e.g. 10G (default: as fast as the link)",
    )
    add(
        "--gpu-memory-utilization",
        type=share,
        default=0.9,
        help="share of the GPU's memory to use",
    )
    add(
        "--decode-buckets",
        type=sizes,
        help="rows of the compiled decode steps (default: 1,2,4,8,16,32,64,96,128,160,192,256 "
        "on a GPU, 1,4,16,64 on a CPU)",
    )
    add(
        "--prefill-buckets",
        type=sizes,
        help="tokens of the compiled mixed steps (default: "
        "64,128,256,384,512,768,1024,1536,2048 on a GPU, 16,64,256 on a CPU)",
    )
    add(
        "--speculative-config",
        "-sc",
        type=speculation,
        help="verify drafts of next tokens where that is faster: off, or vLLM's JSON, e.g. "
        '\'{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 3}\' or '
        '\'{"method": "dspark", "model": FOLDER_OR_ID}\'; method "mtp" uses the model\'s own '
        "weights (default: ngram with 7 tokens on a GPU, off on a CPU)",
    )
    add(
        "--compile-workers",
        type=positive,
        help="threads that compile (default: one per core)",
    )
    add(
        "--cache-dir",
        type=Path,
        help="folder for compiled programs and converted weights (default: ~/.cache/jaxserve)",
    )
    add(
        "--require-precompiled",
        action="store_true",
        help="refuse to start if a program is not precompiled",
    )
    add(
        "--forbid-compiles",
        action="store_true",
        help="debugging: fail a step that compiles while serving",
    )

"""The flags of weights, the engine, `jaxserve plan` and `kernels`; the others are in flags.py."""

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
        help="its memory, if it differs from the usual, e.g. 40Gi",
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
        help="GPU whose kernels are asked for",
    )
    add(
        "--all",
        action="store_true",
        help="print the implementations that refused, too, and why",
    )
    add(
        "--json",
        action="store_true",
        help="print the choices as JSON",
    )


def add_weight_flags(add: AddArgument, auto_dtype: str) -> None:
    """Adds the flags that say how weights are held."""
    add(
        "--dtype",
        choices=("auto", "bfloat16", "float32"),
        default="auto",
        help=f"type of weights and KV cache; auto: {auto_dtype}",
    )
    add(
        "--quantization",
        choices=("int4", "fp8", "nvfp4"),
        help="quantise the layers' matrices at load, by rounding to nearest (default: as the "
        "checkpoint is)",
    )
    add(
        "--lm-head-dtype",
        choices=("auto", "unquantized", "int8", "fp8"),
        default="auto",
        help="type of the output matrix, and of the embedding if both are one; auto: int8 with "
        "--quantization, else unquantized",
    )


def add_engine_flags(add: AddArgument) -> None:
    """Adds the flags of memory, shapes, scheduling and compiled programs."""
    add_weight_flags(add, "bfloat16 on a GPU, float32 on a CPU")
    add(
        "--keep-converted",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep weights that were quantised at load in --cache-dir for the next start",
    )
    add(
        "--fp8-copy",
        choices=("auto", "on", "off"),
        default="auto",
        help="copy in fp8 beside 4-bit weights, for steps of more than 64 tokens; auto: on "
        "GPUs with fast fp8, if it takes at most a tenth of the KV cache's memory",
    )
    add(
        "--max-model-len",
        type=tokens,
        help="longest prompt plus output, e.g. 8192 or 32k (default: the model's limit, or "
        "what the KV cache holds if that is less)",
    )
    add(
        "--max-num-seqs",
        type=positive,
        help="sequences that run at once (default: the largest decode bucket; on a GPU with "
        "little memory, the largest that leaves each sequence 512 tokens of KV cache)",
    )
    add(
        "--max-num-batched-tokens",
        type=positive,
        help="tokens that one step may compute (default: the largest prefill bucket)",
    )
    add(
        "--max-itl-ms",
        type=above_0,
        help="milliseconds that a step with a prefill chunk may take while sequences decode "
        "(default: 50 on a GPU, 1000 on a CPU)",
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
        help="choose the scales of an fp8 KV cache from a text that the model reads at the start",
    )
    add(
        "--calibration",
        type=Path,
        help="UTF-8 file with the text for --calculate-kv-scales (default: a short built-in text)",
    )
    add(
        "--scheduling-policy",
        choices=POLICIES,
        default="slo",
        help="who is admitted next: fcfs by arrival, priority with ageing, slo by deadline and "
        "cost, fair between API keys",
    )
    add(
        "--slo-ttft-ms",
        type=above_0,
        help="policy slo: milliseconds to the first token for requests without x-slo-ttft-ms "
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
        help="share the KV pages of equal prefixes",
    )
    add(
        "--kv-events-config",
        type=kv_events,
        help="tell routers over ZMQ which pages are cached: vLLM's JSON, e.g. "
        "'{\"enable_kv_cache_events\": true}' (default: nothing is told)",
    )
    add(
        "--kv-cache-memory-bytes",
        type=size_in_bytes,
        help="size of the KV cache, e.g. 512M or 20Gi (default: on a GPU what is left, on a "
        "CPU 512Mi)",
    )
    add(
        "--gpu-memory-utilization",
        type=share,
        default=0.9,
        help="share of the GPU's memory that the process takes",
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
        '\'{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 3}\' (default: '
        "ngram with 7 tokens on a GPU, off on a CPU)",
    )
    add(
        "--compile-workers",
        type=positive,
        help="threads that compile (default: one per processor core)",
    )
    add(
        "--cache-dir",
        type=Path,
        help="folder for compiled programs and converted weights (default: ~/.cache/jaxserve)",
    )
    add(
        "--require-precompiled",
        action="store_true",
        help="refuse to start if a program would have to be compiled",
    )
    add(
        "--forbid-compiles",
        action="store_true",
        help="debugging: a compilation while serving fails its step",
    )

"""The command line's flags: names, defaults and help. Flags that vLLM has, too, have its names."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from jaxserve.cli.flag_values import (
    above_0,
    from_0,
    model_name,
    port,
    positive,
    power_of_2,
    root_path,
    seconds,
    share,
    size_in_bytes,
    size_or_0,
    sizes,
    template_variables,
    tokens,
    url,
    whole,
)
from jaxserve.config import KV_CACHE_DTYPES, POLICIES, REASONING_FIELDS
from jaxserve.logs import FORMATS
from jaxserve.model_spec import NAMED_MODELS

type AddArgument = Callable[..., argparse.Action]
"""`add_argument` of a parser, or of a group of one."""

MODEL_HELP = (
    "a folder with config.json and safetensors, a Hugging Face id, jaxserve-embedded, or one of "
    f"{', '.join(NAMED_MODELS)}"
)


def add_model_flags(add: AddArgument) -> None:
    add("--model", help=f"{MODEL_HELP} (default: jaxserve-embedded, a small demonstration model)")
    add("--tokenizer", help="folder with tokenizer files (default: the model's)")
    add(
        "--served-model-name",
        type=model_name,
        nargs="+",
        help="names of the model for clients; the first is reported (default: from --model)",
    )
    add(
        "--generation-config",
        default="auto",
        help="source of default sampling parameters. auto: the model's generation_config.json; "
        "vllm: OpenAI's defaults; or a folder with a generation_config.json",
    )
    add("--chat-template", type=Path, help="Jinja chat template file (default: the model's)")
    add(
        "--default-chat-template-kwargs",
        type=template_variables,
        help="default template variables of chats, as JSON: '{\"enable_thinking\": false}'",
    )
    add(
        "--load-format",
        choices=("auto", "dummy"),
        default="auto",
        help="dummy: seeded random weights, for benchmarks; needs no files",
    )
    add_hub_flags(add)
    add("--seed", type=whole, default=0, help="seed of dummy weights")


def add_hub_flags(add: AddArgument) -> None:
    add("--revision", help="branch, tag or commit on the Hugging Face hub")
    add("--download-dir", type=Path, help="folder for downloads from the Hugging Face hub")


def add_server_flags(add: AddArgument) -> None:
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=port, default=8000, help="port to listen on; 0 picks a free one")
    add("--uds", type=Path, help="listen on this Unix domain socket instead of a port")
    add(
        "--root-path",
        type=root_path,
        help="also serve all routes below this path, such as /llm, for a proxy that keeps it",
    )
    add(
        "--max-num-queued-reqs",
        type=positive,
        default=1024,
        help="answer 429 when this many requests wait",
    )
    add(
        "--shutdown-timeout",
        type=from_0,
        default=30.0,
        help="seconds that running requests get to finish after SIGTERM or Ctrl-C",
    )
    add(
        "--max-num-queued-tokens",
        type=positive,
        help="answer 429 when this many prompt tokens wait for a first output token (default: no "
        "limit)",
    )
    add(
        "--request-timeout",
        type=seconds,
        help="seconds that a request may take (default: no limit)",
    )
    add(
        "--max-queue-time",
        type=seconds,
        help="answer 503 if the first token takes this many seconds (default: no limit)",
    )
    add(
        "--max-request-bytes",
        type=size_in_bytes,
        default=16 * 2**20,
        help="largest request body; larger ones get 413",
    )
    add(
        "--response-store-bytes",
        type=size_or_0,
        default=64 * 2**20,
        help="memory for stored responses (previous_response_id); 0 turns the store off",
    )
    add(
        "--header-timeout",
        type=seconds,
        default=75.0,
        help="close a connection whose next request header takes this many seconds",
    )
    add(
        "--write-timeout",
        type=seconds,
        default=60.0,
        help="abort a request if its client reads nothing for this many seconds",
    )
    add(
        "--stall-timeout",
        type=seconds,
        default=120.0,
        help="answer 503 on /health after this many seconds with work and without progress",
    )
    add(
        "--keep-alive-interval",
        type=seconds,
        default=15.0,
        help="send an SSE comment after this many seconds without a token on a stream",
    )
    add(
        "--profile-startup",
        action="store_true",
        help="print a table of start-up times once the server is ready",
    )
    add(
        "--reasoning-field",
        choices=REASONING_FIELDS,
        default="both",
        help="field of chat answers that holds the reasoning: vLLM's reasoning, SGLang's "
        "reasoning_content, or both",
    )
    add(
        "--enable-force-include-usage",
        action="store_true",
        help="end every stream of chats and completions with usage",
    )
    add(
        "--legacy-metrics",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also export metrics under vLLM's former names",
    )
    add(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="least level that is logged",
    )
    add("--log-format", choices=FORMATS, default="text", help="json: one object per line")
    add("--enable-log-requests", action="store_true", help="log one line per finished request")
    add(
        "--otlp-traces-endpoint",
        type=url,
        help="send OpenTelemetry spans of requests to this URL, e.g. http://localhost:4318/v1/traces",
    )


def add_access_flags(add: AddArgument) -> None:
    add(
        "--api-key",
        action="extend",
        nargs="+",
        help="API keys; every request must carry one. Other users of the machine can read the "
        "command line: prefer --api-key-file or the environment's JAXSERVE_API_KEY",
    )
    add("--api-key-file", type=Path, help="file with API keys, one per line")
    add(
        "--admin-api-key",
        action="extend",
        nargs="+",
        help="keys that also open the admin routes; without one these routes do not exist",
    )
    add("--admin-api-key-file", type=Path, help="file with admin keys, one per line")
    add(
        "--isolate-cache-by-key",
        action="store_true",
        help="share cached prefixes and grammars only among requests with the same API key",
    )
    add(
        "--reasoning-key-file",
        type=Path,
        help="file with keys that encrypt reasoning which clients keep, one per line, at least 32 "
        "characters each. The first encrypts, all decrypt (default: a random key per start)",
    )
    add("--open-metrics", action="store_true", help="serve /metrics without a key")
    add(
        "--allowed-origins",
        nargs="+",
        help="origins of web pages that may call the server (CORS); *: all",
    )
    add(
        "--ssl-keyfile",
        type=Path,
        help="private key, PEM; with --ssl-certfile the server speaks HTTPS",
    )
    add("--ssl-certfile", type=Path, help="certificate with its chain, PEM")
    add("--ssl-ca-certs", type=Path, help="require client certificates signed by these, PEM")


def add_weight_flags(add: AddArgument, auto_dtype: str) -> None:
    add(
        "--dtype",
        choices=("auto", "bfloat16", "float32"),
        default="auto",
        help=f"dtype of weights and KV cache; auto: {auto_dtype}",
    )
    add(
        "--quantization",
        choices=("int4", "fp8", "nvfp4"),
        help="quantise the layers' matrices at load, by rounding to nearest (default: as in the "
        "checkpoint)",
    )
    add(
        "--lm-head-dtype",
        choices=("auto", "unquantized", "int8", "fp8"),
        default="auto",
        help="format of the output matrix, and of the embedding if tied; auto: int8 with "
        "--quantization, else unquantized",
    )


def add_engine_flags(add: AddArgument) -> None:
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
        help="hold an fp8 copy beside 4-bit weights, for steps of more than 64 tokens; auto: on a "
        "GPU, if it takes at most a tenth of the KV cache's memory",
    )
    add(
        "--max-model-len",
        type=tokens,
        help="longest prompt plus output in tokens, e.g. 8192 or 32k (default: auto, the model's "
        "limit, or what the KV cache holds if that is less)",
    )
    add(
        "--max-num-seqs",
        type=positive,
        help="sequences that run at once (default: the largest decode bucket that leaves each "
        "sequence 512 tokens of the KV cache)",
    )
    add(
        "--max-num-batched-tokens",
        type=positive,
        help="most tokens of one step (default: the largest prefill bucket)",
    )
    add(
        "--max-itl-ms",
        type=above_0,
        help="longest time between tokens that prefill chunks may cause (default: 50, on a CPU "
        "1000)",
    )
    add(
        "--kv-cache-dtype",
        choices=KV_CACHE_DTYPES,
        default="auto",
        help="format of keys and values; auto: --dtype",
    )
    add(
        "--calculate-kv-scales",
        action="store_true",
        help="compute the fp8 KV cache's scales from a text instead of the checkpoint's (or 1)",
    )
    add(
        "--calibration",
        type=Path,
        help="UTF-8 text file for --calculate-kv-scales (default: a short built-in text)",
    )
    add(
        "--scheduling-policy",
        choices=POLICIES,
        default="slo",
        help="order of waiting requests. fcfs: arrival; priority: priority with ageing; slo: "
        "deadlines, fair among API keys, refusing requests that cannot meet theirs",
    )
    add(
        "--slo-ttft-ms",
        type=above_0,
        help="policy slo: first-token deadline of requests without x-slo-ttft-ms (default: none)",
    )
    add(
        "--block-size",
        type=power_of_2,
        help="tokens per page of the KV cache, a power of two (default: by device and KV format)",
    )
    add(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="share the KV pages of equal prefixes among requests",
    )
    add(
        "--kv-cache-memory-bytes",
        type=size_in_bytes,
        help="size of the KV cache, e.g. 512M or 20Gi (default: all that --gpu-memory-utilization "
        "leaves)",
    )
    add(
        "--gpu-memory-utilization",
        type=share,
        default=0.9,
        help="share of the GPU's memory that the server uses",
    )
    add(
        "--decode-buckets",
        type=sizes,
        help="compiled sizes of decode steps, in rows, e.g. 1,4,16 (default: by device)",
    )
    add(
        "--prefill-buckets",
        type=sizes,
        help="compiled sizes of steps with prefill, in tokens, e.g. 64,512 (default: by device)",
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
        help="refuse to start if a program is not in --cache-dir",
    )
    add(
        "--forbid-compiles",
        action="store_true",
        help="debugging: fail if anything is compiled while serving",
    )

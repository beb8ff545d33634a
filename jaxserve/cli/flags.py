"""The flags: names, defaults, values and meaning. vLLM's spelling where vLLM has the flag."""

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
from jaxserve.config import (
    KV_CACHE_DTYPES,
    POLICIES,
    REASONING_FIELDS,
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
)
from jaxserve.logs import FORMATS
from jaxserve.model_spec import NAMED_MODELS

type AddArgument = Callable[..., argparse.Action]
"""`add_argument` of a parser, or of a group of one."""

MODEL_HELP = (
    "a local folder with config.json and safetensors, jaxserve-embedded, one of "
    f"{', '.join(NAMED_MODELS)}, or a Hugging Face id"
)


def add_model_flags(add: AddArgument) -> None:
    add("--model", help=f"{MODEL_HELP}; the embedded demonstration model if not given")
    add("--tokenizer", help="folder with tokenizer files, if not the model's own")
    add(
        "--served-model-name",
        type=model_name,
        nargs="+",
        help="names that clients may use for the model",
    )
    add(
        "--generation-config",
        default="auto",
        help="where unset sampling fields come from; auto: the model's generation_config.json; "
        "vllm: OpenAI's defaults; or a folder that has such a file",
    )
    add("--chat-template", type=Path, help="a Jinja file for chats, instead of the model's own")
    add(
        "--default-chat-template-kwargs",
        type=template_variables,
        help="of chats that do not set them, as JSON, e.g. '{\"enable_thinking\": false}'",
    )
    add(
        "--load-format",
        choices=("auto", "dummy"),
        default="auto",
        help="dummy: seeded random weights made on the device, for benchmarks; needs no files",
    )
    add_hub_flags(add)
    add("--seed", type=whole, default=0, help="of dummy weights")


def add_hub_flags(add: AddArgument) -> None:
    add("--revision", help="branch, tag or commit on the Hugging Face hub")
    add("--download-dir", type=Path, help="where downloads from the hub go")


def add_server_flags(add: AddArgument) -> None:
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=port, default=8000, help="port to listen on; 0 picks one")
    add("--uds", type=Path, help="listen on this Unix domain socket, and on no port")
    add(
        "--root-path",
        type=root_path,
        help="a path such as /llm under which a proxy shows the server: routes answer there, too",
    )
    add("--max-num-queued-reqs", type=positive, default=1024, help="waiting requests before 429")
    add(
        "--shutdown-timeout",
        type=from_0,
        default=30.0,
        help="seconds that running requests get to finish on SIGTERM or Ctrl-C",
    )
    add(
        "--max-num-queued-tokens",
        type=positive,
        help="prompt tokens that wait for their first output token before 429",
    )
    add("--request-timeout", type=seconds, help="seconds that a request may take in all")
    add("--max-queue-time", type=seconds, help="seconds until a request's first token before 503")
    add(
        "--max-request-bytes",
        type=size_in_bytes,
        default=16 * 2**20,
        help="size of a request's body before 413",
    )
    add(
        "--response-store-bytes",
        type=size_or_0,
        default=64 * 2**20,
        help="memory for responses that later requests may name by their ids; 0: none is kept",
    )
    add(
        "--header-timeout",
        type=seconds,
        default=75.0,
        help="seconds that a connection may wait for the whole header of its first or next request "
        "before it is closed",
    )
    add(
        "--write-timeout",
        type=seconds,
        default=60.0,
        help="seconds in which a client has to take a part of its answer before the request is "
        "aborted",
    )
    add(
        "--stall-timeout",
        type=seconds,
        default=120.0,
        help="seconds without progress, with work to do, after which /health is 503",
    )
    add(
        "--keep-alive-interval",
        type=seconds,
        default=15.0,
        help="seconds of silence on a stream before a comment is sent",
    )
    add(
        "--profile-startup",
        action="store_true",
        help="print a table of what the start took, once it serves",
    )
    add(
        "--reasoning-field",
        choices=REASONING_FIELDS,
        default="both",
        help="where chats have thoughts: reasoning as in vLLM, reasoning_content as in SGLang",
    )
    add(
        "--tool-call-parser",
        choices=TOOL_CALL_PARSERS,
        help="how the model writes tool calls, by vLLM's names; else as its chat template or its "
        "architecture says. none: calls are text",
    )
    add(
        "--reasoning-parser",
        choices=REASONING_PARSERS,
        help="how the model marks reasoning; else as its chat template or its tokenizer says. "
        "none: reasoning is text",
    )
    add(
        "--enable-force-include-usage",
        action="store_true",
        help="streams of chats and completions end with usage, asked for or not",
    )
    add(
        "--legacy-metrics",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="export metrics under vLLM's former names, too",
    )
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    add("--log-format", choices=FORMATS, default="text", help="json: one object per line")
    add("--enable-log-requests", action="store_true", help="log a line per request")
    add(
        "--otlp-traces-endpoint",
        type=url,
        help="URL that takes OpenTelemetry spans of requests, e.g. http://localhost:4318/v1/traces",
    )


def add_access_flags(add: AddArgument) -> None:
    add(
        "--api-key",
        action="extend",
        nargs="+",
        help="keys, one of which every request must carry; other users of the machine can read "
        "the command line: prefer --api-key-file or JAXSERVE_API_KEY in the environment",
    )
    add("--api-key-file", type=Path, help="more keys, one per line")
    add(
        "--admin-api-key",
        action="extend",
        nargs="+",
        help="keys that open the routes of administrators, too, which do not exist without any",
    )
    add("--admin-api-key-file", type=Path, help="more of them, one per line")
    add(
        "--isolate-cache-by-key",
        action="store_true",
        help="prefixes and compiled grammars are shared only among requests with the same API key",
    )
    add(
        "--reasoning-key-file",
        type=Path,
        help="keys that seal the thoughts which clients keep, one per line, at least 32 characters "
        "each; the first seals, all open. Without any, a key of this start",
    )
    add("--open-metrics", action="store_true", help="/metrics needs no key")
    add("--allowed-origins", nargs="+", help="origins whose web pages may use the server; *: all")
    add("--ssl-keyfile", type=Path, help="private key, PEM; with --ssl-certfile: serve HTTPS")
    add("--ssl-certfile", type=Path, help="certificate with its chain, PEM")
    add("--ssl-ca-certs", type=Path, help="demand client certificates signed by these, PEM")


def add_weight_flags(add: AddArgument, auto_dtype: str) -> None:
    add(
        "--dtype",
        choices=("auto", "bfloat16", "float32"),
        default="auto",
        help=f"of weights and KV cache; auto: {auto_dtype}",
    )
    add(
        "--quantization",
        choices=("int4", "fp8", "nvfp4"),
        help="quantise the matrices of the layers at load, by rounding to nearest",
    )
    add(
        "--lm-head-dtype",
        choices=("auto", "unquantized", "int8", "fp8"),
        default="auto",
        help="of the output matrix, and of the embedding where both are one; auto: int8 with "
        "--quantization, else unquantized",
    )


def add_engine_flags(add: AddArgument) -> None:
    add_weight_flags(add, "bfloat16 on a GPU, float32 on a CPU")
    add(
        "--keep-converted",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="weights that are quantised at load are kept in --cache-dir for the next start",
    )
    add(
        "--fp8-copy",
        choices=("auto", "on", "off"),
        default="auto",
        help="a copy in fp8 beside weights of 4 bits, for steps of more than 64 tokens; auto: on a "
        "GPU, if it takes at most a tenth of the memory for keys and values",
    )
    add(
        "--max-model-len",
        type=tokens,
        help="longest prompt plus output, e.g. 8192, 32k; auto, as without it: the model's own "
        "limit, or what the KV cache holds, if that is less",
    )
    add(
        "--max-num-seqs",
        type=positive,
        help="sequences that run at once; without it the largest decode bucket, on a GPU with "
        "little memory one that leaves each of them 512 tokens of the KV cache",
    )
    add("--max-num-batched-tokens", type=positive, help="tokens computed in one step at most")
    add(
        "--max-itl-ms",
        type=above_0,
        help="milliseconds that a prefill chunk may make running streams wait for a token",
    )
    add(
        "--kv-cache-dtype",
        choices=KV_CACHE_DTYPES,
        default="auto",
        help="how keys and values are kept; auto: in --dtype",
    )
    add(
        "--calculate-kv-scales",
        action="store_true",
        help="the KV cache's scales in fp8 by what the model computes for a text, in place of the "
        "checkpoint's, or of 1",
    )
    add("--calibration", type=Path, help="the text for it, a UTF-8 file; without one a short one")
    add(
        "--scheduling-policy",
        choices=POLICIES,
        default="slo",
        help="who is next: in order of arrival, by priority with ageing, or by deadline, fair "
        "between API keys, without those whose deadline cannot be met",
    )
    add(
        "--slo-ttft-ms",
        type=above_0,
        help="policy slo: deadline of the first token for requests without x-slo-ttft-ms",
    )
    add("--block-size", type=power_of_2, help="tokens per page of the KV cache, a power of two")
    add(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="requests share the KV pages of equal prefixes",
    )
    add(
        "--kv-cache-memory-bytes", type=size_in_bytes, help="size of the KV cache, e.g. 512M or 20G"
    )
    add(
        "--gpu-memory-utilization",
        type=share,
        default=0.9,
        help="fraction of the GPU's memory that the process takes",
    )
    add("--decode-buckets", type=sizes, help="rows of the compiled decode steps, e.g. 1,4,16")
    add("--prefill-buckets", type=sizes, help="tokens of the compiled mixed steps, e.g. 64,512")
    add("--compile-workers", type=positive, help="threads that compile buckets")
    add(
        "--cache-dir",
        type=Path,
        help="where compiled programs are kept (default: ~/.cache/jaxserve)",
    )
    add(
        "--require-precompiled",
        action="store_true",
        help="refuse to start where a program would have to be compiled",
    )
    add(
        "--forbid-compiles",
        action="store_true",
        help="debugging: a compilation while serving is an error",
    )

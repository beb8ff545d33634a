"""Flags: their names, defaults and meaning. vLLM's spelling where vLLM has the flag."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxserve import __version__
from jaxserve.config import KV_CACHE_DTYPES, NAMED_MODELS, POLICIES, REASONING_FIELDS
from jaxserve.flag_values import (
    positive,
    root_path,
    seconds,
    size_in_bytes,
    sizes,
    template_variables,
    tokens,
    url,
)
from jaxserve.logs import FORMATS


@dataclass(frozen=True, kw_only=True)
class Options:
    """The parsed command line; None means: choose by model and device."""

    model: str | None
    tokenizer: str | None
    served_model_name: list[str] | None
    load_format: str
    revision: str | None
    download_dir: Path | None
    seed: int
    host: str
    port: int
    uds: Path | None
    root_path: str | None
    header_timeout: float
    enable_force_include_usage: bool
    dtype: str
    quantization: str | None
    lm_head_dtype: str
    keep_converted: bool
    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    max_itl_ms: float | None
    max_num_queued_reqs: int
    scheduling_policy: str
    slo_ttft_ms: float | None
    kv_cache_dtype: str
    calculate_kv_scales: bool
    block_size: int | None
    enable_prefix_caching: bool
    kv_cache_memory_bytes: int | None
    gpu_memory_utilization: float
    decode_buckets: tuple[int, ...] | None
    prefill_buckets: tuple[int, ...] | None
    compile_workers: int | None
    cache_dir: Path | None
    require_precompiled: bool
    forbid_compiles: bool
    shutdown_timeout: float
    profile_startup: bool
    log_level: str
    api_key: list[str] | None = field(repr=False)
    api_key_file: Path | None
    admin_api_key: list[str] | None = field(repr=False)
    admin_api_key_file: Path | None
    open_metrics: bool
    allowed_origins: list[str] | None
    ssl_keyfile: Path | None
    ssl_certfile: Path | None
    ssl_ca_certs: Path | None
    log_format: str
    enable_log_requests: bool
    otlp_traces_endpoint: str | None
    generation_config: str
    chat_template: Path | None
    default_chat_template_kwargs: dict[str, Any] | None
    reasoning_field: str
    isolate_cache_by_key: bool
    legacy_metrics: bool
    max_num_queued_tokens: int | None
    request_timeout: float | None
    max_queue_time: float | None
    max_request_bytes: int
    stall_timeout: float
    keep_alive_interval: float
    out: Path | None = None
    """Of `convert`: where the converted checkpoint goes."""
    quantization_method: str | None = None
    calibration: Path | None = None
    """A text that the model reads, for `convert` or for scales of the KV cache."""


type _AddArgument = Callable[..., argparse.Action]

_MODEL_HELP = (
    "a local folder with config.json and safetensors, jaxserve-embedded, one of "
    f"{', '.join(NAMED_MODELS)}, or a Hugging Face id"
)
_DESCRIPTION = "Serve a Qwen3-class language model behind an OpenAI-compatible API."
_EPILOG = "`jaxserve precompile` with the same flags makes later starts fast."


COMMANDS = {
    "precompile": "Compile every program that serving with these flags needs, and keep them.",
    "convert": "Write a model's weights as the engine holds them, quantised if asked. Killed at "
    "any moment, it goes on from there the next time.",
}
"""What else than serving the program does, by the first word of the command line."""


def parse_args(argv: list[str], command: str | None = None) -> Options:
    """Flags to Options; exits with a message on wrong ones.

    `precompile` knows all flags of serving, `convert` those that its result depends on.
    """
    if command == "convert":
        others = vars(_parser(None).parse_args([]))
        return Options(**others | vars(_convert_parser().parse_args(argv)))
    return Options(**vars(_parser(command).parse_args(argv)))


def _convert_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxserve convert",
        description=COMMANDS["convert"],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        epilog="Serve the result with `jaxserve --model OUT`.",
    )
    add = parser.add_argument
    add("--model", required=True, help=_MODEL_HELP)
    add("--out", type=Path, required=True, help="a folder for the converted checkpoint")
    _add_hub_flags(add)
    _add_weight_flags(add, "as the checkpoint has it")
    add(
        "--quantization-method",
        choices=("rtn", "hqq", "awq"),
        default="rtn",
        help="of the layers' matrices: round to nearest; with int4 half-quadratic zero points, or "
        "factors and clipping by what a text activates (needs --calibration)",
    )
    add("--calibration", type=Path, help="a text file that the model reads for awq, UTF-8")
    return parser


def _parser(command: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"jaxserve {command}" if command else "jaxserve",
        description=COMMANDS[command] if command else _DESCRIPTION,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        epilog=None if command else _EPILOG,
    )
    parser.add_argument("--version", action="version", version=__version__)
    _add_model_flags(parser.add_argument_group("model").add_argument)
    _add_server_flags(parser.add_argument_group("server").add_argument)
    _add_access_flags(parser.add_argument_group("access").add_argument)
    _add_engine_flags(parser.add_argument_group("engine").add_argument)
    return parser


def _add_model_flags(add: _AddArgument) -> None:
    add("--model", help=f"{_MODEL_HELP}; the embedded demonstration model if not given")
    add("--tokenizer", help="folder with tokenizer files, if not the model's own")
    add("--served-model-name", nargs="+", help="names that clients may use for the model")
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
    _add_hub_flags(add)
    add("--seed", type=int, default=0, help="of dummy weights")


def _add_hub_flags(add: _AddArgument) -> None:
    add("--revision", help="branch, tag or commit on the Hugging Face hub")
    add("--download-dir", type=Path, help="where downloads from the hub go")


def _add_server_flags(add: _AddArgument) -> None:
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=8000, help="port to listen on; 0 picks one")
    add("--uds", type=Path, help="listen on this Unix domain socket, and on no port")
    add(
        "--root-path",
        type=root_path,
        help="a path such as /llm under which a proxy shows the server: routes answer there, too",
    )
    add("--max-num-queued-reqs", type=positive, default=1024, help="waiting requests before 429")
    add(
        "--shutdown-timeout",
        type=float,
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
        "--header-timeout",
        type=seconds,
        default=75.0,
        help="seconds that a connection may wait for the whole header of its first or next request "
        "before it is closed",
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


def _add_access_flags(add: _AddArgument) -> None:
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
        help="prefixes are shared only among requests with the same API key",
    )
    add("--open-metrics", action="store_true", help="/metrics needs no key")
    add("--allowed-origins", nargs="+", help="origins whose web pages may use the server; *: all")
    add("--ssl-keyfile", type=Path, help="private key, PEM; with --ssl-certfile: serve HTTPS")
    add("--ssl-certfile", type=Path, help="certificate with its chain, PEM")
    add("--ssl-ca-certs", type=Path, help="demand client certificates signed by these, PEM")


def _add_weight_flags(add: _AddArgument, auto_dtype: str) -> None:
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


def _add_engine_flags(add: _AddArgument) -> None:
    _add_weight_flags(add, "bfloat16 on a GPU, float32 on a CPU")
    add(
        "--keep-converted",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="weights that are quantised at load are kept in --cache-dir for the next start",
    )
    add("--max-model-len", type=tokens, help="longest prompt plus output, e.g. 8192, 32k, auto")
    add("--max-num-seqs", type=positive, help="sequences that run at once")
    add("--max-num-batched-tokens", type=positive, help="tokens computed in one step at most")
    add(
        "--max-itl-ms",
        type=float,
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
        type=float,
        help="policy slo: deadline of the first token for requests without x-slo-ttft-ms",
    )
    add("--block-size", type=positive, help="tokens per page of the KV cache")
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
        type=float,
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

"""The flags: names, defaults, values and help texts. Flags that vLLM has too use its spelling."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from jaxserve.cli.flag_values import (
    from_0,
    model_name,
    objective,
    port,
    positive,
    root_path,
    seconds,
    size_in_bytes,
    size_or_0,
    template_variables,
    url,
    whole,
)
from jaxserve.config import HEALTH_MEANINGS, REASONING_FIELDS, REASONING_PARSERS, TOOL_CALL_PARSERS
from jaxserve.logs import FORMATS

type AddArgument = Callable[..., argparse.Action]
"""`add_argument` of a parser or of an argument group."""

MODEL_HELP = (
    "a folder with safetensors or an Orbax checkpoint, a Hugging Face id, or a short name such as "
    "qwen3-8b"
)


def add_model_flags(add: AddArgument) -> None:
    """Adds the flags that name a model and its files."""
    add(
        "--model",
        help=f"{MODEL_HELP} (default: the embedded demonstration model)",
    )
    add(
        "--tokenizer",
        help="folder with tokenizer files (default: the model's folder)",
    )
    add(
        "--served-model-name",
        type=model_name,
        nargs="+",
        help="names that clients may use for the model; answers have the first (default: the value "
        "of --model)",
    )
    add(
        "--generation-config",
        default="auto",
        help="defaults of sampling fields: auto takes the model's generation_config.json, vllm "
        "takes OpenAI's; or a folder with such a file",
    )
    add(
        "--chat-template",
        type=Path,
        help="file with a Jinja template for chats (default: the model's own)",
    )
    add(
        "--default-chat-template-kwargs",
        type=template_variables,
        help="default chat_template_kwargs, as JSON, e.g. '{\"enable_thinking\": false}' (default: "
        "none)",
    )
    add(
        "--load-format",
        choices=("auto", "dummy"),
        default="auto",
        help="source of the weights; dummy makes random ones, and needs no files",
    )
    add_hub_flags(add)
    add_orbax_flags(add)
    add(
        "--seed",
        type=whole,
        default=0,
        help="seed of dummy weights",
    )


def add_hub_flags(add: AddArgument) -> None:
    """Adds the flags for downloads from the Hugging Face Hub."""
    add(
        "--revision",
        help="branch, tag or commit on the Hugging Face hub (default: the hub's default branch)",
    )
    add(
        "--download-dir",
        type=Path,
        help="folder for downloads from the hub (default: the Hugging Face cache)",
    )


def add_orbax_flags(add: AddArgument) -> None:
    """Adds the flags for Orbax checkpoints."""
    add(
        "--hf-config",
        type=Path,
        help="config.json of an Orbax checkpoint, or a folder with it and the tokenizer (default: "
        "beside the checkpoint)",
    )
    add(
        "--from-step",
        type=whole,
        help="step of a folder of Orbax checkpoints (default: the newest complete one)",
    )


def add_server_flags(add: AddArgument) -> None:
    """Adds the flags for HTTP, limits, logs and traces."""
    add(
        "--host",
        default="127.0.0.1",
        help="address to listen on; 0.0.0.0 or :: lets other machines connect",
    )
    add(
        "--port",
        type=port,
        default=8000,
        help="port to listen on; 0 picks a free one",
    )
    add(
        "--uds",
        type=Path,
        help="Unix domain socket to listen on instead of a port (default: none)",
    )
    add(
        "--root-path",
        type=root_path,
        help="path under which a proxy shows the server, such as /llm (default: none)",
    )
    add(
        "--ui",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="serve the chat at / and the engine's page at /ui/engine",
    )
    add(
        "--max-num-queued-reqs",
        type=positive,
        default=1024,
        help="most waiting sequences; further requests get 429",
    )
    add(
        "--shutdown-timeout",
        type=from_0,
        default=30.0,
        help="seconds for running requests to finish after SIGTERM or Ctrl-C",
    )
    add(
        "--max-num-queued-tokens",
        type=positive,
        help="most waiting prompt tokens; further requests get 429 (default: no limit)",
    )
    add(
        "--request-timeout",
        type=seconds,
        help="most seconds for a whole request; then 504 (default: no limit)",
    )
    add(
        "--max-queue-time",
        type=seconds,
        help="most seconds to a request's first token; then 503 (default: no limit)",
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
        help="memory for stored responses; 0 stores none",
    )
    add(
        "--header-timeout",
        type=seconds,
        default=75.0,
        help="most seconds until a connection's next request; more than a proxy's idle timeout",
    )
    add(
        "--write-timeout",
        type=seconds,
        default=60.0,
        help="most seconds for a client to read 32 KiB; then its request is aborted",
    )
    add(
        "--stall-timeout",
        type=seconds,
        default=120.0,
        help="seconds without a finished step, despite work, after which probes answer 503",
    )
    add(
        "--health-means",
        choices=HEALTH_MEANINGS,
        default="ready",
        help="when /health answers 200: ready, while requests are served; live, as /live does",
    )
    add(
        "--probe-port",
        type=port,
        help="extra port for probes and metrics, without keys or TLS; 0 picks a free one (default: "
        "none)",
    )
    add(
        "--keep-alive-interval",
        type=seconds,
        default=15.0,
        help="seconds of silence before a stream gets a comment line",
    )
    add(
        "--profile-startup",
        action="store_true",
        help="print how long each phase of the start took",
    )
    add(
        "--reasoning-field",
        choices=REASONING_FIELDS,
        default="both",
        help="field of chats for reasoning: vLLM's reasoning, SGLang's reasoning_content, or both",
    )
    add(
        "--tool-call-parser",
        choices=TOOL_CALL_PARSERS,
        help="format of tool calls; with none they stay text (default: by the chat template or the "
        "architecture)",
    )
    add(
        "--reasoning-parser",
        choices=REASONING_PARSERS,
        help="format of reasoning; with none it stays text (default: by the chat template or the "
        "tokenizer)",
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
        help="lowest level that is logged",
    )
    add(
        "--log-format",
        choices=FORMATS,
        default="text",
        help="format of the log; json is one object per line",
    )
    add(
        "--enable-log-requests",
        action="store_true",
        help="log a line per request, without its text",
    )
    add(
        "--otlp-traces-endpoint",
        type=url,
        help="URL for OpenTelemetry spans, e.g. http://localhost:4318/v1/traces "
        "(default: no traces)",
    )


def add_access_flags(add: AddArgument) -> None:
    """Adds the flags for keys, origins and certificates."""
    add(
        "--api-key",
        action="extend",
        nargs="+",
        help="keys; every request needs one. Other users of the machine can read command lines: "
        "prefer --api-key-file or the variable JAXSERVE_API_KEY (default: no keys)",
    )
    add(
        "--api-key-file",
        type=Path,
        help="file with more keys, one per line (default: none)",
    )
    add(
        "--admin-api-key",
        action="extend",
        nargs="+",
        help="keys that also open administrators' routes (default: none; these routes are off)",
    )
    add(
        "--admin-api-key-file",
        type=Path,
        help="file with more administrators' keys, one per line (default: none)",
    )
    add(
        "--isolate-cache-by-key",
        action="store_true",
        help="share prefixes and compiled grammars only within an API key",
    )
    add(
        "--reasoning-key-file",
        type=Path,
        help="file with keys for encrypted reasoning, one per line, at least 32 characters each; "
        "the first encrypts, all decrypt (default: a new key at each start)",
    )
    add(
        "--open-metrics",
        action="store_true",
        help="serve /metrics without a key",
    )
    add(
        "--open-render",
        action="store_true",
        help="serve the render routes without a key",
    )
    add(
        "--trust-gateway",
        action="store_true",
        help="share fairly by a gateway's header x-llm-d-inference-fairness-id; only if clients "
        "cannot go around the gateway",
    )
    add(
        "--inference-objectives",
        type=objective,
        nargs="+",
        help="priorities of llm-d's objectives, e.g. interactive=10 batch=-10; higher goes first, "
        "with --scheduling-policy priority (default: none)",
    )
    add(
        "--allowed-origins",
        nargs="+",
        help="origins of web pages that may use the server (CORS); * allows all (default: none)",
    )
    add(
        "--ssl-keyfile",
        type=Path,
        help="private key for HTTPS, PEM, not encrypted (default: none)",
    )
    add(
        "--ssl-certfile",
        type=Path,
        help="certificate for HTTPS with its chain, PEM (default: none)",
    )
    add(
        "--ssl-ca-certs",
        type=Path,
        help="authorities whose client certificates are required, PEM (default: none)",
    )

"""The flags: names, defaults, values and meaning. vLLM's spelling where vLLM has the flag."""

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
from jaxserve.models.registry import NAMED_MODELS

type AddArgument = Callable[..., argparse.Action]
"""`add_argument` of a parser, or of a group of one."""

MODEL_HELP = (
    "a local folder with config.json and safetensors or an Orbax checkpoint, jaxserve-embedded, "
    f"one of {', '.join(NAMED_MODELS)}, or a Hugging Face id"
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
        help="names that clients may use for the model; the first is reported (default: what "
        "--model says)",
    )
    add(
        "--generation-config",
        default="auto",
        help="source of unset sampling fields: auto is the model's generation_config.json, "
        "vllm is OpenAI's defaults, anything else a folder with such a file",
    )
    add(
        "--chat-template",
        type=Path,
        help="file with a Jinja template for chats (default: the model's own)",
    )
    add(
        "--default-chat-template-kwargs",
        type=template_variables,
        help="variables of the chat template for chats that do not set chat_template_kwargs, as "
        "JSON, e.g. '{\"enable_thinking\": false}' (default: none)",
    )
    add(
        "--load-format",
        choices=("auto", "dummy"),
        default="auto",
        help="where weights come from; dummy makes seeded random ones on the device, and a named "
        "model then needs no files",
    )
    add_hub_flags(add)
    add_orbax_flags(add)
    add(
        "--seed",
        type=whole,
        default=0,
        help="seed of dummy weights; requests have seeds of their own",
    )


def add_hub_flags(add: AddArgument) -> None:
    """Adds the flags of downloads from the Hugging Face hub."""
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
    """Adds the flags of checkpoints by Orbax."""
    add(
        "--hf-config",
        type=Path,
        help="the config.json of an Orbax checkpoint, or a folder with it and the tokenizer "
        "(default: beside the checkpoint)",
    )
    add(
        "--from-step",
        type=whole,
        help="the step to take of a folder of Orbax checkpoints (default: the newest complete one)",
    )


def add_server_flags(add: AddArgument) -> None:
    """Adds the flags of HTTP, limits, logs and traces."""
    add(
        "--host",
        default="127.0.0.1",
        help="address to listen on; 0.0.0.0 or :: to be reached from other machines",
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
        help="Unix domain socket to listen on instead of a port; a stale socket is replaced "
        "(default: none)",
    )
    add(
        "--root-path",
        type=root_path,
        help="path such as /llm under which a proxy shows the server; routes answer with and "
        "without it (default: none)",
    )
    add(
        "--ui",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="serve a chat at / and a view of the engine at /ui/engine",
    )
    add(
        "--max-num-queued-reqs",
        type=positive,
        default=1024,
        help="sequences that may wait; further requests get 429",
    )
    add(
        "--shutdown-timeout",
        type=from_0,
        default=30.0,
        help="seconds that running requests get to finish on SIGTERM or Ctrl-C",
    )
    add(
        "--max-num-queued-tokens",
        type=positive,
        help="prompt tokens that may wait for their first output token; further requests get "
        "429 (default: no limit)",
    )
    add(
        "--request-timeout",
        type=seconds,
        help="seconds that a request may take in all; then 504 (default: no limit)",
    )
    add(
        "--max-queue-time",
        type=seconds,
        help="seconds until a request's first token; then 503 (default: no limit)",
    )
    add(
        "--max-request-bytes",
        type=size_in_bytes,
        default=16 * 2**20,
        help="size of a request's body; larger ones get 413",
    )
    add(
        "--response-store-bytes",
        type=size_or_0,
        default=64 * 2**20,
        help="memory for responses that later requests may name by id; 0 keeps none",
    )
    add(
        "--header-timeout",
        type=seconds,
        default=75.0,
        help="seconds that a connection may take to send the header of its first or next "
        "request; make it longer than the idle timeout of a proxy in front",
    )
    add(
        "--write-timeout",
        type=seconds,
        default=60.0,
        help="seconds in which a client must take 32 KiB of waiting output; else its request "
        "is aborted",
    )
    add(
        "--stall-timeout",
        type=seconds,
        default=120.0,
        help="seconds without a finished step, with work to do, until /live, /health and /ready "
        "answer 503",
    )
    add(
        "--health-means",
        choices=HEALTH_MEANINGS,
        default="ready",
        help="what 200 of /health says: ready, that requests are served now, or live, the same as "
        "/live",
    )
    add(
        "--probe-port",
        type=port,
        help="another port for /health, /live, /ready and /metrics, plain HTTP and without keys, "
        "answered by a thread of its own however busy the server is; 0 picks a free one "
        "(default: none)",
    )
    add(
        "--keep-alive-interval",
        type=seconds,
        default=15.0,
        help="seconds of silence on a stream until a comment line is sent",
    )
    add(
        "--profile-startup",
        action="store_true",
        help="print a table of the start's phases once the server is ready",
    )
    add(
        "--reasoning-field",
        choices=REASONING_FIELDS,
        default="both",
        help="field for the model's thoughts in chats: reasoning as in vLLM, reasoning_content "
        "as in SGLang, or both",
    )
    add(
        "--tool-call-parser",
        choices=TOOL_CALL_PARSERS,
        help="how the model writes tool calls, by vLLM's names; with none they stay text "
        "(default: what the chat template or the architecture says)",
    )
    add(
        "--reasoning-parser",
        choices=REASONING_PARSERS,
        help="how the model marks reasoning; with none it stays text "
        "(default: what the chat template or the tokenizer says)",
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
        help="export metrics under vLLM's former names, too",
    )
    add(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="lowest level of lines in the log",
    )
    add(
        "--log-format",
        choices=FORMATS,
        default="text",
        help="form of the log; json is one object per line",
    )
    add(
        "--enable-log-requests",
        action="store_true",
        help="log a line per request, without its text",
    )
    add(
        "--otlp-traces-endpoint",
        type=url,
        help="URL that takes OpenTelemetry spans, e.g. http://localhost:4318/v1/traces "
        "(default: no traces)",
    )


def add_access_flags(add: AddArgument) -> None:
    """Adds the flags of keys, origins and certificates."""
    add(
        "--api-key",
        action="extend",
        nargs="+",
        help="keys; every request must carry one. Other users of the machine can read the "
        "command line: prefer --api-key-file or JAXSERVE_API_KEY in the environment "
        "(default: no keys)",
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
        help="keys that also open the routes of administrators, which do not exist without any "
        "(default: none)",
    )
    add(
        "--admin-api-key-file",
        type=Path,
        help="file with more of them, one per line (default: none)",
    )
    add(
        "--isolate-cache-by-key",
        action="store_true",
        help="share prefixes and compiled grammars only among requests with the same API key",
    )
    add(
        "--reasoning-key-file",
        type=Path,
        help="keys that seal the thoughts which clients of /v1/responses keep, one per line, "
        "at least 32 characters each; the first seals, all open (default: a key of this "
        "start)",
    )
    add(
        "--open-metrics",
        action="store_true",
        help="serve /metrics without a key",
    )
    add(
        "--open-render",
        action="store_true",
        help="serve /v1/chat/completions/render and /v1/completions/render without a key",
    )
    add(
        "--trust-gateway",
        action="store_true",
        help="share fairly between the names that a gateway writes into "
        "x-llm-d-inference-fairness-id, and not between keys; only where no client can go around "
        "the gateway",
    )
    add(
        "--inference-objectives",
        type=objective,
        nargs="+",
        help="priorities of llm-d's objectives, such as interactive=10 batch=-10; higher goes "
        "first, with --scheduling-policy priority (default: none)",
    )
    add(
        "--allowed-origins",
        nargs="+",
        help="origins whose web pages may use the server (CORS); * allows all (default: none)",
    )
    add(
        "--ssl-keyfile",
        type=Path,
        help="private key, PEM, not encrypted; with --ssl-certfile the port speaks HTTPS "
        "(default: none)",
    )
    add(
        "--ssl-certfile",
        type=Path,
        help="certificate with its chain, PEM (default: none)",
    )
    add(
        "--ssl-ca-certs",
        type=Path,
        help="demand client certificates signed by these authorities, PEM (default: none)",
    )

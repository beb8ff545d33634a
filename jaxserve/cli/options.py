"""Parses the command line to Options. Knows which flags each command takes."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxserve import __version__
from jaxserve.cli.engine_flags import (
    add_engine_flags,
    add_kernels_flags,
    add_plan_flags,
    add_weight_flags,
)
from jaxserve.cli.flag_parser import FlagParser
from jaxserve.cli.flag_values import positive
from jaxserve.cli.flags import (
    MODEL_HELP,
    add_access_flags,
    add_hub_flags,
    add_model_flags,
    add_orbax_flags,
    add_server_flags,
)
from jaxserve.kv_events.config import KVEventsConfig
from jaxserve.speculation_config import SpeculationConfig


@dataclass(frozen=True, kw_only=True)
class Options:
    """The parsed command line. None means that model and device decide."""

    model: str | None
    tokenizer: str | None
    served_model_name: list[str] | None
    load_format: str
    revision: str | None
    download_dir: Path | None
    hf_config: Path | None
    from_step: int | None
    seed: int
    host: str
    port: int
    uds: Path | None
    root_path: str | None
    ui: bool
    header_timeout: float
    write_timeout: float
    enable_force_include_usage: bool
    dtype: str
    quantization: str | None
    lm_head_dtype: str
    keep_converted: bool
    fp8_copy: str
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
    kv_events_config: KVEventsConfig | None
    kv_cache_memory_bytes: int | None
    kv_offload_size: int | None
    kv_offload_path: Path | None
    kv_offload_disk_size: int | None
    kv_offload_verify: bool
    kv_offload_load_rate: int | None
    gpu_memory_utilization: float
    decode_buckets: tuple[int, ...] | None
    prefill_buckets: tuple[int, ...] | None
    speculative_config: SpeculationConfig | None
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
    reasoning_key_file: Path | None
    open_metrics: bool
    open_render: bool
    trust_gateway: bool
    inference_objectives: list[tuple[str, int]] | None
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
    tool_call_parser: str | None
    reasoning_parser: str | None
    isolate_cache_by_key: bool
    legacy_metrics: bool
    max_num_queued_tokens: int | None
    request_timeout: float | None
    max_queue_time: float | None
    max_request_bytes: int
    response_store_bytes: int
    stall_timeout: float
    health_means: str
    probe_port: int | None
    keep_alive_interval: float
    out: Path | None = None
    """For `convert`: the folder of the converted checkpoint."""
    to: str = "native"
    """For `convert`: native, orbax or safetensors."""
    keep: int | None = None
    """For `convert`: how many steps an Orbax folder keeps; None: all."""
    quantization_method: str | None = None
    calibration: Path | None = None
    """A text file that the model reads, for `convert` or for the scales of the KV cache."""
    gpu: str | None = None
    """For `plan` and `kernels`: the GPU to plan for."""
    gpu_memory: int | None = None
    """For `plan`: the GPU's memory in bytes, if it is not the usual size."""
    json: bool = False
    """For `plan` and `kernels`: print JSON."""
    all: bool = False
    """For `kernels`: also print the implementations that refused."""


_DESCRIPTION = "Serve a language model behind an OpenAI-compatible API."
_EPILOG = """commands, by the first word, each with its own --help:
  serve [MODEL]   serve, as without a command
  precompile      compile what serving with the same flags needs, so that later starts are fast
  convert         convert or quantise a checkpoint
  plan            print memory, sequences and step times of a model on a GPU; needs no GPU
  kernels         print which kernel serves each operation of a model on a GPU; needs no GPU
  bench           measure an OpenAI-compatible server under load

Flags may also be in JAXSERVE_FLAGS in the environment; the command line wins.
"""


COMMANDS = {
    "precompile": "Compile and keep every program that serving with these flags needs.",
    "convert": "Convert or quantise a checkpoint. A conversion that was killed continues the next "
    "time.",
    "plan": "Print weights, KV cache tokens, sequences, context and decode steps of a model on a "
    "GPU. Needs no GPU. Also takes the flags of serving.",
    "kernels": "Print which implementation serves each operation of a model on a GPU, with its "
    "configuration. Needs Triton, but no GPU. Also takes the flags of serving.",
}
"""Descriptions of the commands besides serving, by the first word of the command line."""


FLAGS_VARIABLE = "JAXSERVE_FLAGS"
"""Environment variable with flags of serving, quoted as for a shell. Flags on the command line
win."""


def parse_args(argv: list[str], command: str | None = None, defaults: str = "") -> Options:
    """Parses flags to Options. Wrong flags print a message and exit.

    `precompile` takes all flags of serving. `convert` takes only the flags that change its result.

    Args:
      defaults: the value of FLAGS_VARIABLE; `convert` ignores it.
    """
    if command == "convert":
        others = vars(_parser(None).parse_args([]))
        return Options(**others | vars(_convert_parser().parse_args(argv)))
    parser = _parser(command)
    try:
        given = shlex.split(defaults)
    except ValueError as error:
        parser.error(f"{FLAGS_VARIABLE} in the environment: {error}")
    return Options(**vars(parser.parse_args(argv, parser.parse_args(given))))


def _convert_parser() -> FlagParser:
    parser = FlagParser(
        prog="jaxserve convert",
        description=COMMANDS["convert"],
        epilog="Serve the result with `jaxserve --model OUT`.",
    )
    add = parser.add_argument
    add("--model", required=True, help=MODEL_HELP)
    add("--out", type=Path, required=True, help="folder for the converted checkpoint")
    add_hub_flags(add)
    add_orbax_flags(add)
    add(
        "--to",
        choices=("native", "orbax", "safetensors"),
        default="native",
        help="what to write: native, the engine's own file; orbax, a step of a folder of Orbax "
        "checkpoints; safetensors, with Hugging Face's names",
    )
    add(
        "--keep",
        type=positive,
        help="with --to orbax: newest steps to keep in --out (default: all)",
    )
    add_weight_flags(add, "as the checkpoint has it")
    add(
        "--quantization-method",
        choices=("rtn", "hqq", "awq"),
        default="rtn",
        help="how to quantise: rtn rounds to nearest; hqq and awq are more exact int4; awq needs "
        "--calibration",
    )
    add("--calibration", type=Path, help="UTF-8 text file that awq reads")
    return parser


def _parser(command: str | None) -> FlagParser:
    parser = FlagParser(
        prog=f"jaxserve {command}" if command else "jaxserve",
        description=COMMANDS[command] if command else _DESCRIPTION,
        epilog=None if command else _EPILOG,
        usage=None if command else "jaxserve [command] [flags]",
        commands="" if command else "serve, precompile, convert, plan, kernels and bench",
    )
    parser.add_argument("--version", action="version", version=__version__)
    if command == "plan":
        add_plan_flags(parser.add_argument_group("plan").add_argument)
    if command == "kernels":
        add_kernels_flags(parser.add_argument_group("kernels").add_argument)
    add_model_flags(parser.add_argument_group("model").add_argument)
    add_server_flags(parser.add_argument_group("server").add_argument)
    add_access_flags(parser.add_argument_group("access").add_argument)
    add_engine_flags(parser.add_argument_group("engine").add_argument)
    return parser

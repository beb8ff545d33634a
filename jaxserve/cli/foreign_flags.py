"""Translates command lines of vLLM and SGLang: flags with another name here, or without effect."""

from __future__ import annotations

from typing import NamedTuple

from jaxserve.cli.config_file import with_config_file

SAME = {
    "--model-path": "--model",
    "--tokenizer-path": "--tokenizer",
    "--context-length": "--max-model-len",
    "--max-running-requests": "--max-num-seqs",
    "--max-queued-requests": "--max-num-queued-reqs",
    "--mem-fraction-static": "--gpu-memory-utilization",
    "--page-size": "--block-size",
    "--chunked-prefill-size": "--max-num-batched-tokens",
    "--fastapi-root-path": "--root-path",
    "--sampling-defaults": "--generation-config",
    "--log-requests": "--enable-log-requests",
    "--stream-response-default-include-usage": "--enable-force-include-usage",
    "--sse-keep-alive-interval": "--keep-alive-interval",
    "--compile-cache-dir": "--cache-dir",
    "--forbid-recompile": "--forbid-compiles",
    "--disable-radix-cache": "--no-enable-prefix-caching",
    "--random-seed": "--seed",
    "-q": "--quantization",
}
"""vLLM's and SGLang's names of flags that exist here."""

SAME_VALUES = {
    ("--kv-cache-dtype", "fp8"): "fp8_e4m3",
    ("--kv-cache-dtype", "bfloat16"): "bf16",
    ("--generation-config", "model"): "auto",
    ("--generation-config", "openai"): "vllm",
    ("--load-format", "safetensors"): "auto",
    ("--dtype", "float"): "float32",
    ("--tool-call-parser", "llama3"): "llama3_json",
    ("--tool-call-parser", "qwen"): "hermes",
    ("--tool-call-parser", "qwen25"): "hermes",
    ("--reasoning-parser", "deepseek-r1"): "deepseek_r1",
    ("--reasoning-parser", "qwen3-thinking"): "deepseek_r1",
}

SIZES = {
    "--kv-offloading-size": ("--kv-offload-size", "Gi"),
    "--hicache-size": ("--kv-offload-size", "G"),
}
"""Flags whose value is a number in a fixed unit: the flag here, and the unit to append."""

OBVIOUS = {
    "--kv-offloading-backend": frozenset({"native"}),
    "--quantization": frozenset(
        {
            *("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors"),
            *("modelopt", "modelopt_fp4", "hqq", "mxfp4", "fbgemm_fp8"),
        }
    ),
    "--hf-overrides": frozenset({"{}"}),
    "--cpu-offload-gb": frozenset({"0", "0.0"}),
    "--runner": frozenset({"auto", "generate"}),
    "--task": frozenset({"auto", "generate"}),
    "--convert": frozenset({"auto", "none"}),
}
"""Flag values that ask for the behaviour that is always on. They are dropped."""

REFUSED = {
    ("--dtype", "half"): "models run in bfloat16; leave --dtype out, or use float32",
    ("--dtype", "float16"): "models run in bfloat16; leave --dtype out, or use float32",
    ("--kv-offloading-backend", None): "pages go to this host's memory and disk only; leave it out",
    ("--hf-overrides", None): "change config.json instead",
    ("--cpu-offload-gb", None): "weights stay on the GPU; use --quantization int4 to save memory",
    ("--runner", None): "not supported; jaxserve only generates text",
    ("--task", None): "not supported; jaxserve only generates text",
    ("--convert", None): "not supported; jaxserve only generates text",
}
"""Advice for refused flag values, by flag and value. Value None stands for every other value."""

_ONE_PROCESS = "one process serves one GPU; start one per GPU, behind a router"
_NO_TRANSFER = (
    "leave it out: each server computes its prompts itself, and none sends keys and values to "
    "another; route to all servers alike"
)
NOT_HERE = {
    "--kv-transfer-config": _NO_TRANSFER,
    "--ec-transfer-config": _NO_TRANSFER,
    "--disaggregation-mode": _NO_TRANSFER,
    "--headless": _ONE_PROCESS,
    "--data-parallel-address": _ONE_PROCESS,
    "--data-parallel-rpc-port": _ONE_PROCESS,
    "--data-parallel-size-local": _ONE_PROCESS,
    "--data-parallel-start-rank": _ONE_PROCESS,
    "--ssl-ciphers": "leave it out: Python's TLS, from version 1.2, chooses the ciphers",
    "--middleware": "leave it out: no flag may load code",
    "--enable-lora": "LoRA adapters are not served; merge them into the model",
    "--lora-modules": "LoRA adapters are not served; merge them into the model",
    "--lora-paths": "LoRA adapters are not served; merge them into the model",
}
"""Advice for flags that are refused with any value."""

OTHER_COMMANDS = {
    "launch": "every server answers /v1/chat/completions/render and /v1/completions/render; use a "
    "server's URL as the tokenizer's",
    "run-batch": "batch files are not supported; send the requests to a server",
    "chat": "open the server's page in a browser, or use any client of OpenAI's API",
    "complete": "use any client of OpenAI's API",
}
"""Advice for vLLM commands that are not supported."""

CHECKED = {"--dtype", *OBVIOUS}
"""Flags whose value decides whether they are translated, dropped or refused."""

ONE = frozenset(
    {
        *("--tensor-parallel-size", "-tp", "--tp-size", "--tp"),
        *("--pipeline-parallel-size", "-pp", "--pp-size"),
        *("--data-parallel-size", "-dp", "--dp-size", "--dp"),
        *("--ep-size", "--nnodes"),
    }
)
"""Flags for numbers of GPUs, processes and hosts. Only the value 1 is accepted."""

SWITCHES = frozenset(
    {
        *("--async-scheduling", "--disable-log-requests", "--disable-log-stats", "--enforce-eager"),
        *("--enable-auto-tool-choice", "--enable-cache-report", "--enable-chunked-prefill"),
        *("--enable-metrics", "--enable-prompt-tokens-details", "--enable-request-id-headers"),
        *("--enable-server-load-tracking", "--enable-ssl-refresh", "--trust-remote-code"),
        *("--disable-cuda-graph", "--disable-overlap-schedule", "--enable-expert-parallel"),
        *("--disable-cuda-graph-padding", "--disable-custom-all-reduce", "--disable-fastapi-docs"),
        *("--disable-frontend-multiprocessing", "--disable-uvicorn-access-log"),
        *(
            "--enable-hierarchical-cache",
            "--enable-mixed-chunk",
            "--enable-reasoning",
            "--enable-torch-compile",
        ),
        *("--enable-sleep-mode", "--no-enable-log-requests"),
        *("--skip-server-warmup", "-O0", "-O1", "-O2", "-O3"),
    }
)
VALUED = frozenset(
    {
        *("--hicache-io-backend", "--hicache-mem-layout", "--hicache-write-policy"),
        *("--api-server-count", "--compilation-config", "--grammar-backend", "--jit-monitor-mode"),
        *("--max-log-len", "--max-logprobs", "--num-scheduler-steps", "--optimization-level"),
        *("--prefix-caching-hash-algo", "--structured-outputs-config"),
        *("--swap-space", "--uvicorn-log-level"),
        *("--collect-detailed-traces", "--disable-access-log-for-endpoints", "--stream-interval"),
        *("--log-requests-format", "--log-requests-level", "--long-prefill-token-threshold"),
        *("--max-prefill-tokens", "--max-total-tokens", "--num-gpu-blocks-override"),
        *("--schedule-policy", "--speculative-algorithm"),
        *("--spec-method", "--spec-model", "--spec-tokens", "-cc", "-O"),
        *("--master-addr", "--node-rank", "--dist-init-addr", "--distributed-executor-backend"),
        *("--attention-backend", "--cuda-graph-max-bs", "--guided-decoding-backend"),
        *("--limit-mm-per-prompt", "--log-level-http", "--max-seq-len-to-capture"),
        *("--schedule-conservativeness", "--tokenizer-mode", "--watchdog-timeout"),
        *("--max-loras", "--max-lora-rank", "--max-cpu-loras", "--lora-dtype"),
    }
)
"""Flags that are dropped together with their value: nothing here depends on them."""


class Translated(NamedTuple):
    """The translated command line of vLLM or SGLang."""

    argv: list[str]
    without_effect: list[str]
    """Flags that were dropped."""


def translated(argv: list[str]) -> Translated:
    """Translates a command line to jaxserve's flags.

    Raises:
      ValueError: a flag in NOT_HERE, a value in REFUSED, more than one GPU, a command that only
      vLLM has, or a --config file that cannot be read.
    """
    if argv and argv[0] in OTHER_COMMANDS:
        raise ValueError(f"{argv[0]}: {OTHER_COMMANDS[argv[0]]}")
    ours: list[str] = []
    without_effect: list[str] = []
    words = iter(with_config_file(argv))
    for word in words:
        name, equals, value = word.partition("=")
        name = _our_name(name)
        if name in NOT_HERE:
            raise ValueError(f"{name}: {NOT_HERE[name]}")
        if name in SIZES:
            value = value if equals else next(words, "")
            ours += [SIZES[name][0], value + SIZES[name][1]]
        elif name in CHECKED:
            value = value if equals else next(words, "")
            refusal = REFUSED.get((name, value)) or REFUSED.get((name, None))
            if value in OBVIOUS.get(name, ()):
                without_effect.append(f"{name} {value}")
            elif refusal:
                raise ValueError(f"{name} {value}: {refusal}")
            else:
                ours += [name, SAME_VALUES.get((name, value), value)]
        elif name in SWITCHES or f"--{name.removeprefix('--no-')}" in SWITCHES:
            without_effect.append(name)
        elif name in VALUED or name in ONE:
            value = value if equals else next(words, "")
            if name in ONE and value != "1":
                raise ValueError(f"{name} {value}: {_ONE_PROCESS}")
            without_effect.append(name)
        elif equals:
            ours.append(f"{name}={SAME_VALUES.get((name, value), value)}")
        else:
            ours.append(SAME_VALUES.get((ours[-1] if ours else "", name), name))
    return Translated([word if word != "--help=all" else "--help" for word in ours], without_effect)


def _our_name(name: str) -> str:
    """Returns the flag with dashes. vLLM also accepts underscores."""
    dashed = name.replace("_", "-") if name.startswith("--") else name
    return SAME.get(dashed, dashed)

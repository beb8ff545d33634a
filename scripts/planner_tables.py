"""Tables of models and their memory, from the planner."""

from __future__ import annotations

from typing import Any

from jaxserve.cli.options import parse_args
from jaxserve.config import ConfigError
from jaxserve.models.registry import ARCHITECTURES, NAMED_MODELS
from scripts.markdown_tables import table

GIB = 2**30


def planned(gpu: str, line: str) -> Any:
    """The result of `jaxserve plan`."""
    from jaxserve.commands.plan import estimate

    return estimate(parse_args(["--gpu", gpu, "--model", *line.split()], "plan"))


def named_models() -> str:
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in NAMED_MODELS:
        try:
            found = planned("b200", f"{name} --quantization int4 --fp8-copy off")
            four = f"{found.weights / GIB:.1f}"
        except ConfigError:  # its sizes are not multiples that the kernels support
            four = "\u2013"
        plain = planned("b200", f"{name} --gpu-memory 400Gi")
        sizes = (
            f"{plain.weights / GIB:.1f}",
            four,
            f"{plain.kv_bytes_per_token // 1024}",
            f"{plain.model_max_len:,}",
        )
        rows.setdefault(sizes, []).append(f"`{name}`")
    head = ["name", "weights, GiB", "in int4, GiB", "KV cache per token, KiB"]
    return table([*head, "context"], ([", ".join(names), *sizes] for sizes, names in rows.items()))


def families() -> str:
    rows = [
        [f"`{name}`", ", ".join(f"`{short}`" for short in family.NAMED)]
        for name, family in ARCHITECTURES.items()
    ]
    return table(["Hugging Face class", "short names"], rows)


SMALL = (
    ("qwen3-8b", "rtx4090", "24 GB (RTX 3090, RTX 4090)"),
    ("qwen3-8b --kv-cache-dtype int8", "rtx4090", "24 GB (RTX 3090, RTX 4090)"),
    ("qwen3-8b --quantization int4", "rtx3060", "12 GB (RTX 3060)"),
    ("qwen3-4b", "rtx4080", "16 GB (RTX 4080)"),
    ("qwen3-32b --quantization int4", "rtx4090", "24 GB (RTX 4090)"),
    ("qwen3-14b", "l40s", "48 GB (L40S)"),
    ("qwen3-32b", "h100", "80 GB (H100)"),
    ("qwen3-30b-a3b --quantization int4", "rtx4090", "24 GB (RTX 4090)"),
    ("qwen3-30b-a3b", "h200", "141 GB (H200)"),
    ("gpt-oss-20b", "rtx4090", "24 GB (RTX 4090)"),
    ("gpt-oss-120b", "h100", "80 GB (H100)"),
)


def memory() -> str:
    """Commands and their memory according to the planner, also for cards that were never tried."""
    rows: list[list[str]] = []
    for line, gpu, name in SMALL:
        found = planned(gpu, line)
        rows.append(
            [
                f"`jaxserve --model {line}`",
                name,
                f"{found.weights / GIB:.1f}",
                f"{found.kv_tokens:,}",
                f"{found.max_model_len:,}",
                str(found.max_num_seqs),
            ]
        )
    head = ["command", "GPU", "weights, GiB", "tokens in the KV cache", "context"]
    return table([*head, "sequences at once"], rows)

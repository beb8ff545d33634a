"""Checks flags against the model and the KV format. Errors name the flag."""

from __future__ import annotations

from jaxserve.cli.options import Options
from jaxserve.config import ConfigError
from jaxserve.model_spec import ModelSpec
from jaxserve.setting_files import read_text
from jaxserve_kernels.kv_format import KVFormat


def check_calibration(options: Options, kv_format: KVFormat) -> None:
    """Raises ConfigError for calibration flags without effect, and for a text that cannot be read
    or is empty."""
    if options.calculate_kv_scales and not kv_format.has_scales:
        raise ConfigError(
            f"--calculate-kv-scales is for --kv-cache-dtype fp8_e4m3, not for {kv_format.name}"
        )
    if options.calibration and not options.calculate_kv_scales:
        raise ConfigError("--calibration needs --calculate-kv-scales")
    if options.calibration and not read_text(options.calibration, "--calibration"):
        raise ConfigError(f"--calibration {options.calibration} is empty")


def check_length(options: Options, spec: ModelSpec) -> None:
    """Raises ConfigError if --max-model-len is beyond the model's limit."""
    if (options.max_model_len or 0) > spec.max_position:
        raise ConfigError(
            f"--max-model-len {options.max_model_len} is beyond the model's {spec.max_position} "
            "positions"
        )


def check_windows(options: Options, spec: ModelSpec, kv_format: KVFormat, *, gpu: bool) -> None:
    """Raises ConfigError if the longest context exceeds a window and the format's kernels do not
    support windows."""
    length = options.max_model_len or spec.max_position
    window = spec.within(length).smallest_window
    if window is not None and gpu and not kv_format.windows_on_gpus:
        raise ConfigError(
            f"the model attends to the last {window} tokens only (sliding_window), which "
            f"--kv-cache-dtype {kv_format.name} does not on GPUs in contexts of up to {length}: "
            f"use --kv-cache-dtype fp8_e4m3 or int8, or --max-model-len {window}"
        )

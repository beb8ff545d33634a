"""The weights' part of `jaxserve convert`: quantise them once, by one of several methods."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from jaxserve.cli.options import Options
from jaxserve.config import ConfigError
from jaxserve.models import decoder, registry
from jaxserve.models.awq import AwqLayers
from jaxserve.models.quantization import Report, calibrated, reporting
from jaxserve.setting_files import read_text
from jaxserve.weights.model_source import ModelSource
from jaxserve.weights.opening import describe, open_native_of, open_stored_of, quantization
from jaxserve_checkpoints.convert import convert, finished
from jaxserve_checkpoints.load import Progress, load_params

_CALIBRATION_SEQUENCES, _CALIBRATION_TOKENS, _LEAST_TOKENS = 128, 512, 64


def convert_model(
    options: Options,
    source: ModelSource,
    out: Path,
    progress: Progress,
    report: Report = lambda path, error: None,
    begin: Callable[[], None] = lambda: None,
) -> Path:
    """Write the model's weights into `out` as the flags say. Returns the file.

    Args:
      begin: called once flags and files are known to be valid, before anything is written.

    Raises:
      ConfigError: the shapes do not allow the quantisation; the weights are converted already; a
        calibration text is missing, too short or not asked for.
      CheckpointError, OSError: see `jaxserve_checkpoints.convert`.
    """
    if open_native_of(source) is not None:
        raise ConfigError(f"{source.folder} is converted already: convert the original")
    wanted = quantization(options)
    checkpoint = open_stored_of(source, wanted)
    dtype = checkpoint.main_dtype if options.dtype == "auto" else np.dtype(options.dtype)
    made_from = describe(source, wanted, dtype)
    encode = reporting(wanted.encoder(source.spec), report)
    sequences = _calibration(options, source)
    if sequences is not None:
        made_from["calibration"] = hashlib.sha256(sequences.tobytes()).hexdigest()[:16]

        def plain() -> decoder.Params:
            abstract = decoder.abstract(source.spec, dtype)
            return load_params(checkpoint, registry.rules(source.spec), abstract)

        encode = calibrated(encode, AwqLayers(plain, sequences, source.spec, report).part)
    finished(out, made_from)
    begin()
    return convert(
        checkpoint,
        registry.rules(source.spec),
        decoder.abstract(source.spec, dtype, stacked=True),
        encode,
        out,
        made_from=made_from,
        progress=progress,
        by_layer=sequences is not None,
    )


def _calibration(options: Options, source: ModelSource) -> np.ndarray | None:
    """Returns the token ids of the calibration text, int32 [sequences, tokens]; None without a
    text.

    Raises:
      ConfigError: the text is missing although needed, given although not used, or too short.
    """
    needed = options.quantization_method == "awq"
    if options.calibration is None and not needed:
        return None
    if options.calibration is None or not needed:
        raise ConfigError(
            "--quantization-method awq needs --calibration FILE, a text to read, and no other "
            "method does"
        )
    ids = source.tokenizer.encode(read_text(options.calibration, "--calibration"))
    length = min(_CALIBRATION_TOKENS, len(ids))
    if length < _LEAST_TOKENS:
        raise ConfigError(
            f"--calibration {options.calibration} has {length} tokens; at least {_LEAST_TOKENS} "
            f"are needed, {_CALIBRATION_SEQUENCES * _CALIBRATION_TOKENS} are used"
        )
    count = min(len(ids) // length, _CALIBRATION_SEQUENCES)
    return np.array(ids[: count * length], np.int32).reshape(count, length)

"""Scales of an fp8 KV cache: from a checkpoint, or calibrated on a text.

e4m3 keeps four significant bits from 2**-6 to 448 times the scale. Within that range the scale does
not matter. It only has to prevent clipping of large numbers and loss of small ones.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from jaxserve.api import SamplingParams
from jaxserve.config import ConfigError
from jaxserve.model_spec import ModelSpec
from jaxserve.plan import Admission, PageEntry, Row, StepPlan
from jaxserve.runner.programs import RunnerConfig
from jaxserve.runner.runner import Runner
from jaxserve_checkpoints.reader import Checkpoint

type Scales = NDArray[np.float32]
"""[layers, kv_heads, 2]: scales of keys, then of values. The largest magnitude is 448 * scale."""

_LARGEST, _LEAST_NORMAL = 448.0, 2.0**-6
_ROOM = 2.0
"""Headroom above the magnitudes of the text. It costs precision only for the smallest numbers."""

_STORED = re.compile(r"model\.layers\.(\d+)\.self_attn\.(?:k_proj\.|v_proj\.|attn\.)?([kv])_scale")
"""Tensor names of scales in compressed-tensors, ModelOpt and vLLM checkpoints."""

_STEP, _ROUNDS = 2.0**8, 5

TEXT = """A harbour pilot keeps three notebooks: one for tides, one for wrecks, one for debts. \
On 14 March 1897 she wrote: "Depth at the bar 23 1/2 feet; wind NNE, rising." Why did the ship wait?
def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
{"name": "Zoë", "age": 41, "tags": ["a", "b"], "ratio": -0.0025, "active": true}
1. Wash the rice. 2. Add 350 ml of water. 3. Simmer for 12 minutes, then rest; do not stir!
El río cruza la llanura. Der Zug fährt um 7:45 Uhr ab. 今天天气很好 我们去公园散步。 Привет, мир!
The derivative of x^3 - 2x is 3x^2 - 2, so the slope at x = 5 is 73. Is 91 prime? No: 7 * 13 = 91.
SELECT city, COUNT(*) FROM visits WHERE year >= 2019 GROUP BY city ORDER BY 2 DESC LIMIT 10;
"""
"""The built-in calibration text: prose, code, numbers and several scripts."""


def stored(checkpoint: Checkpoint, spec: ModelSpec) -> Scales | None:
    """Returns a checkpoint's scales, per tensor or per KV head; None if it has none.

    Raises:
      ConfigError: only some layers have scales, or a scale is not a positive number.
    """
    scales = np.zeros((spec.num_layers, spec.kv_heads, 2), np.float32)
    found = [(name, match) for name in checkpoint.names if (match := _STORED.fullmatch(name))]
    for name, match in found:
        value = np.asarray(checkpoint.read(name), np.float32).reshape(-1)
        if value.size not in (1, spec.kv_heads) or int(match[1]) >= spec.num_layers:
            raise ConfigError(
                f"{checkpoint.folder}: {name} has {value.size} numbers; one is needed, or one for "
                f"each of {spec.kv_heads} KV heads in {spec.num_layers} layers"
            )
        scales[int(match[1]), :, "kv".index(match[2])] = value
    if not found:
        return None
    if not (np.isfinite(scales) & (scales > 0)).all():
        layers = np.flatnonzero(~(scales > 0).all(axis=(1, 2))).tolist()
        raise ConfigError(
            f"{checkpoint.folder}: scales of the KV cache (k_scale, v_scale) are missing or not "
            f"positive in layers {layers}; --calculate-kv-scales finds others"
        )
    return scales


def calculated(runner: Runner, config: RunnerConfig, ids: Sequence[int]) -> Scales:
    """Returns scales, powers of two, that hold the keys and values of a text with headroom. Sets
    them in the runner.

    The text runs through ordinary steps. If its values exceed the scales, or are small compared
    with them, it runs again with other scales.
    them, it runs again with other scales.

    Args:
      runner: a runner with an empty cache, before any other step.

    Raises:
      ConfigError: keys or values are not finite, or too large for every scale.
    """
    shape = (config.spec.num_layers, config.spec.kv_heads, 2)
    scales, largest = np.ones(shape, np.float32), np.full(shape, np.inf, np.float32)
    for _ in range(_ROUNDS):
        runner.use_kv_scales(scales)
        _read(runner, config, ids)
        largest = runner.largest_magnitudes()
        above = largest >= _LARGEST * scales
        below = largest < _LEAST_NORMAL * scales
        if not (above | below).any():
            break
        scales = np.where(above, scales * _STEP, np.where(below, scales / _STEP, scales))
        largest = np.where(above, np.inf, largest)
    if not np.isfinite(largest).all():
        raise ConfigError(
            "--calculate-kv-scales: the model computes keys or values that are not finite, or "
            f"beyond {_LARGEST * _STEP ** (_ROUNDS - 1):.0e}"
        )
    needed = np.maximum(largest, np.finfo(np.float32).tiny) * (_ROOM / _LARGEST)
    scales = np.where(largest > 0, np.exp2(np.ceil(np.log2(needed))), 1).astype(np.float32)
    runner.use_kv_scales(scales)
    return scales


def _read(runner: Runner, config: RunnerConfig, ids: Sequence[int]) -> None:
    """Computes one sequence in chunks."""
    cache, most = config.cache, config.buckets.prefill[-1]
    usable = min(group.usable_pages for group in cache.groups) * cache.page_size
    ids = ids[: min(config.scheduler.max_model_len, usable)]
    pages = tuple(
        PageEntry(0, i, 1 + i, group)
        for i in range(-(-len(ids) // cache.page_size))
        for group in range(len(cache.groups))
    )
    admissions = (Admission(0, SamplingParams(max_tokens=1, temperature=0.0)),)
    for start in range(0, len(ids), most):
        row = Row(0, 0, start, tuple(ids[start : start + most]), True)
        plan = StepPlan(rows=(row,), admissions=admissions, pages=pages)
        runner.launch(plan).results.block_until_ready()
        admissions, pages = (), ()

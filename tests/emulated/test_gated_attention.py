"""Attention of single tokens with gates and RoPE on a part of each head, on the emulator."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from jaxserve_kernels.target import REFERENCE
from tests.emulated.errors import relative_error
from tests.emulator.targets import PDL
from tests.kernels.gated_steps import CASES, Case, attended, inputs_of
from tests.kernels.kv_steps import AS_WRITTEN, LAYER


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_kernel_equals_the_definition(case: Case) -> None:
    inputs, used = inputs_of(case), len(case.starts)
    definition = functools.partial(attended, case, target=REFERENCE)
    expected, kept = jax.jit(definition, compiler_options=AS_WRITTEN)(*inputs)
    out, left = attended(case, *inputs, target=PDL)
    assert relative_error(out[:used], expected[:used]) < 6e-3
    assert relative_error(left[LAYER, 1:], kept[LAYER, 1:]) < 2e-3
    assert np.isfinite(np.asarray(left, np.float32)).all()

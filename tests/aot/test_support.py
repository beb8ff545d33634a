"""Steps for each generation of GPUs, compiled without one: a part of scripts/support_matrix.py."""

from __future__ import annotations

import argparse

import pytest

from tests.aot.compiled_steps import missing

if lacking := missing():
    pytest.skip(f"missing: {', '.join(lacking)}", allow_module_level=True)

from support_matrix import CAPABILITIES, Bucket, Step, launches, report

OTHERS = [each for each in CAPABILITIES if each != 90]
"""Whole programs are compiled for Hopper elsewhere."""


@pytest.mark.parametrize("capability", OTHERS)
def test_all_kernels_of_a_step_become_machine_code_that_fits_the_card(capability: int) -> None:
    """A decode step and a mixed one: int4 beside plain keys and values, bfloat16 beside int8."""
    args = argparse.Namespace(
        models=["qwen3-4b"], weights=["int4"], kv=["int8"], decode=[16], prefill=[512], sizes=False
    )
    found = report(capability, args)
    assert found["kernels"] > 10
    for formats in (found["weights"], found["kv"]):
        for name, entry in formats.items():
            assert entry["kernels"] > 10, name
            assert not entry["failed"], name


@pytest.mark.parametrize(
    ("model", "weights", "kernel"),
    [
        ("qwen3.5-27b", "int4", "gated_delta_rule"),
        ("qwen3.5-35b-a3b", "fp8", "experts"),
        ("gpt-oss-20b", "mxfp4", "experts"),
    ],
)
def test_steps_of_every_kind_of_model_can_be_traced(model: str, weights: str, kernel: str) -> None:
    step = Step(model=model, weights=weights, kv="bf16", bucket=Bucket.decode(16))
    names = {equation.params["name"] for equation in launches(90, step)}
    assert any(kernel in name for name in names), names


@pytest.mark.parametrize("rows", [9, 64])
@pytest.mark.parametrize("model", ["qwen3-4b", "qwen3.5-27b", "qwen3-30b-a3b"])
def test_norms_make_the_int8_tokens_of_products(model: str, rows: int) -> None:
    """Only the first layer's are made by a kernel of their own: no kernel adds to its norm."""
    step = Step(model=model, weights="int4", kv="bf16", bucket=Bucket.decode(rows))
    names = [equation.params["name"] for equation in launches(90, step)]
    assert names.count("quantize_groups_of_tokens") == 1
    assert any("quantizing" in name for name in names)


@pytest.mark.parametrize(
    ("model", "bucket"),
    [
        ("qwen3-30b-a3b", Bucket.decode(128)),
        ("qwen3-30b-a3b", Bucket.decode(256)),
        ("qwen3.5-35b-a3b", Bucket.decode(256)),
    ],
)
def test_norms_make_the_int8_tokens_of_experts(model: str, bucket: Bucket) -> None:
    """From 5 tokens for each expert on. Gate and up of a shared expert are in the same kernel."""
    step = Step(model=model, weights="int4", kv="bf16", bucket=bucket)
    equations = launches(90, step)
    gates = [each for each in equations if "experts_gate_up" in each.params["name"]]
    assert gates
    assert {each.params["name"] for each in gates} == {"experts_gate_up_streaming_Int4Weight"}
    norms = [each for each in equations if "also_quantizing" in each.params["name"]]
    made = [codes for each in norms for codes in each.outvars if str(codes.aval.dtype) == "int8"]
    assert all(each.invars[0] in made for each in gates)

"""Measured limits come from the nearest card's table, and say where they come from."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import resources
from typing import Any

import pytest

from jaxserve_kernels import tables
from jaxserve_kernels.dense_matmul import config as dense
from jaxserve_kernels.device import card
from jaxserve_kernels.experts import config as experts
from jaxserve_kernels.kv_format import base as kv_format
from jaxserve_kernels.op import Refusal
from jaxserve_kernels.paged_attention import config as attention
from jaxserve_kernels.quantized_matmul import config as quantized
from jaxserve_kernels.target import CPU, Target

OPERATIONS: dict[str, Any] = {
    "dense_matmul": dense, "quantized_matmul": quantized, "paged_attention": attention,
    "kv_format": kv_format, "experts": experts,
}  # fmt: skip
HOPPER = Target.for_gpu(90)


def files() -> list[tuple[str, dict[str, Any]]]:
    root = resources.files(tables.__name__)
    return [
        (operation, json.loads(file.read_text(encoding="utf-8")))
        for operation in OPERATIONS
        for file in (root / operation).iterdir()
    ]


@pytest.mark.parametrize(("operation", "table"), files(), ids=lambda each: str(each)[:40])
def test_a_limit_says_what_it_means_and_where_it_comes_from(
    operation: str, table: dict[str, Any]
) -> None:
    assert set(table) == {"device", "compute_capability", "limits", "launches"}
    if table["limits"]:
        assert set(table["limits"]) == set(OPERATIONS[operation].Limits._fields)
    for limit in table["limits"].values():
        assert set(limit) == {"value", "unit", "meaning", "source"} and all(limit.values())


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("target", [CPU, HOPPER, Target.for_gpu(80)], ids=str)
def test_every_card_has_limits(operation: str, target: Target) -> None:
    assert OPERATIONS[operation].limits_of(target)


def test_the_nearest_card_is_the_same_one_or_of_the_nearest_capability() -> None:
    known = [
        {"device": name, "compute_capability": capability}
        for name, capability in (("A", 80), ("H200", 90), ("H100", 90), ("B", 100))
    ]

    def nearest(name: str, capability: int) -> str:
        return tables.nearest(known, replace(card(capability), name=name))["device"]

    assert nearest("H100", 90) == "H100"
    assert nearest("H20", 90) == "H200"  # the first of its capability
    assert nearest("L4", 89) == "H200"
    assert nearest("RTX 3090", 86) == "H200" and nearest("A40", 85) == "A"  # not the one above
    assert tables.nearest(known, None)["device"] == "A"


def test_a_limit_can_be_overridden() -> None:
    size = {"gated": False, "out": 4096, "depth": 4096}
    assert isinstance(dense.choose(tokens=17, target=HOPPER, **size), Refusal)
    other = HOPPER.with_tuned({("dense_matmul", tables.LIMITS): {"most_tokens": 17}})
    assert isinstance(dense.choose(tokens=17, target=other, **size), dense.Config)


def test_launch_parameters_of_a_shape_go_before_the_rule() -> None:
    shape = ("linear", 4096, 4096)
    chosen = {"rows": 32, "depth": 256, "splits": 2}
    target = HOPPER.with_tuned({("dense_matmul", shape): chosen})
    config = dense.choose(gated=False, tokens=4, out=4096, depth=4096, target=target)
    assert config == dense.Config(**chosen)
    assert tables.launch("dense_matmul", shape, 4, target=HOPPER) is None


def test_programs_follow_the_multiprocessors_of_the_card() -> None:
    half = HOPPER.replace(device=replace(HOPPER.gpu, multiprocessors=66))
    size = {"tiles": 2, "kv_heads": 8, "rows": 4, "pages_per_seq": 512}
    splits = [attention.choose(target=each, **size).splits for each in (HOPPER, half)]
    assert splits == [16, 8]

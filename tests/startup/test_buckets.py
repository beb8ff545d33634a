"""Which shapes are compiled, by the flags that bound them."""

from __future__ import annotations

import pytest

from jaxserve.cli.options import parse_args
from jaxserve.config import Buckets
from jaxserve.startup.buckets import GPU_DECODE, GPU_PREFILL, GPU_VERIFY, buckets_of


def buckets(*flags: str) -> Buckets:
    """Of a GPU."""
    return buckets_of(parse_args([*flags]), gpu=True)


def test_without_flags_they_are_those_that_pay_on_a_gpu() -> None:
    assert buckets() == Buckets(decode=GPU_DECODE, prefill=GPU_PREFILL, verify=GPU_VERIFY)


@pytest.mark.parametrize(
    ("flags", "verify"),
    [
        (("--speculative-config", "off"), ()),
        (("--max-num-seqs", "3"), ((1, 8), (2, 8), (3, 2), (3, 4), (3, 8))),
        (
            ("--speculative-config", '{"num_speculative_tokens": 2}', "--max-num-seqs", "8"),
            ((1, 4), (2, 4), (4, 4), (8, 2), (8, 4)),
        ),
        (
            ("--max-num-batched-tokens", "16", "--max-num-seqs", "4"),
            ((1, 8), (2, 8), (4, 2), (4, 4)),
        ),
    ],
)
def test_steps_verify_as_many_rows_and_drafts_as_there_may_be(
    flags: tuple[str, ...], verify: tuple[tuple[int, int], ...]
) -> None:
    assert buckets(*flags).verify == verify


def test_on_a_cpu_steps_verify_only_if_told_to() -> None:
    def on_a_cpu(*flags: str) -> Buckets:
        return buckets_of(parse_args([*flags]), gpu=False)

    assert not on_a_cpu().verify
    assert on_a_cpu("--speculative-config", "{}").verify


@pytest.mark.parametrize("most", [1, 48, 64, 300])
def test_the_largest_decode_step_holds_as_many_sequences_as_may_run(most: int) -> None:
    found = buckets("--max-num-seqs", str(most))
    assert found.decode == (*(size for size in GPU_DECODE if size < most), most)
    assert found.prefill == GPU_PREFILL


@pytest.mark.parametrize("most", [256, 1000, 8192])
def test_the_largest_mixed_step_holds_as_many_tokens_as_a_step_may_have(most: int) -> None:
    found = buckets("--max-num-batched-tokens", str(most))
    assert found.prefill == (*(size for size in GPU_PREFILL if size < most), most)


def test_a_mixed_step_has_room_for_all_that_may_run() -> None:
    """So every running sequence decodes beside a chunk, however many there are."""
    assert buckets("--max-num-seqs", "4096").prefill == (*GPU_PREFILL, 4096)

"""The compiled steps, as an H100 would get them: compiled here, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from tests.aot.compiled_steps import inspect


@pytest.fixture(scope="module")
def reports() -> dict[str, dict[str, Any]]:
    """Of a Qwen3-4B with four layers, by bucket."""
    buckets = ("--decode", "1,2,16,24,64,256", "--prefill", "16,512,2048")
    return inspect("--layers", "4", *buckets)


def test_a_whole_step_is_one_cuda_graph(reports: dict[str, dict[str, Any]]) -> None:
    for name, report in reports.items():
        assert report["outside_graph"] == ["kCommandBuffer"], name


def test_a_step_has_few_arguments(reports: dict[str, dict[str, Any]]) -> None:
    assert {report["arguments"] for report in reports.values()} == {19}


def test_no_step_copies_the_kv_cache(reports: dict[str, dict[str, Any]]) -> None:
    for name, report in reports.items():
        assert report["kv_copies"] == 0, name
        assert report["aliased_bytes"] == report["state_bytes"], name


def test_a_step_has_no_outputs_but_its_state(reports: dict[str, dict[str, Any]]) -> None:
    """Theirs would be other memory in each step, and XLA keeps intermediates there, so that most
    nodes of the graph would have to be changed before each launch."""
    for name, report in reports.items():
        assert report["other_output_bytes"] < 1024, name  # the tuple's own pointers


def test_results_are_written_once_and_hold_nothing_else(reports: dict[str, dict[str, Any]]) -> None:
    """Two arrays of them take turns: every node that touched them would change in each launch."""
    for name, report in reports.items():
        assert report["written_to_results"] == 1, name


def test_scratch_memory_stays_small(reports: dict[str, dict[str, Any]]) -> None:
    """Activations, and scores of 256 rows twice; a weight converted by mistake takes gigabytes.
    Up to 2 MiB it would lie elsewhere in each launch."""
    for name, report in reports.items():
        assert 2 * 2**20 < report["scratch_bytes"] < 384 * 2**20, name


def test_products_of_many_tokens_add_the_residual_stream(
    reports: dict[str, dict[str, Any]],
) -> None:
    """Two in each of three layers; the last one goes on with few of its tokens."""
    assert reports["mixed_2048"]["adding_products"] == 6
    assert reports["mixed_512"]["adding_products"] == 0


def test_layers_are_one_chain_of_kernels_or_nine_each(reports: dict[str, dict[str, Any]]) -> None:
    """Each is counted with the slice of the stacked weight that it reads, where it has one."""
    for bucket in ("decode_1", "decode_16", "decode_24", "decode_64"):
        assert reports[bucket]["inside_graph"] <= 20, bucket
    assert reports["decode_256"]["inside_graph"] <= 4 * 17 + 20


def test_a_step_with_quantised_weights_is_one_cuda_graph_too() -> None:
    """Products by unpacking, in e4m3, and with the output matrix in int8."""
    flags = ("--layers", "2", "--decode", "1,64", "--prefill", "512")
    reports = inspect(*flags, "--quantization", "int4", "--lm-head-dtype", "int8")
    assert reports["decode_1"]["inside_graph"] <= 20  # the layers are one call
    for name, report in reports.items():
        assert report["outside_graph"] == ["kCommandBuffer"], name
        assert report["kv_copies"] == 0, name
        assert 2 * 2**20 < report["scratch_bytes"] < 384 * 2**20, name


@pytest.mark.parametrize("name", ["fp8", "int4-act-order"])
def test_layers_of_every_format_are_one_chain(name: str) -> None:
    """Activation order too, whose inputs are gathered by a kernel."""
    reports = inspect(
        "--layers", "2", "--decode", "1,64", "--prefill", "16", "--quantization", name
    )
    for bucket in ("decode_1", "decode_64"):
        assert reports[bucket]["inside_graph"] <= 20, bucket
        assert reports[bucket]["outside_graph"] == ["kCommandBuffer"], bucket


def test_layers_of_gpt_oss_are_one_chain() -> None:
    """Output biases, a router of 32 rows, sinks, windows and experts among them."""
    flags = ("--model", "gpt-oss-20b", "--layers", "2", "--decode", "1,8,64", "--prefill", "16")
    reports = inspect(*flags)
    for bucket in ("decode_1", "decode_8", "decode_64"):
        assert reports[bucket]["inside_graph"] <= 20, bucket
        assert reports[bucket]["outside_graph"] == ["kCommandBuffer"], bucket


@pytest.mark.parametrize(("name", "weights"), [("qwen3.5-27b", "int4"), ("qwen3.5-35b-a3b", "fp8")])
def test_layers_of_hybrid_models_are_one_chain_with_few_arguments(name: str, weights: str) -> None:
    """Both kinds of layers, each stacked. None of our kernels reads the step's input: XLA would
    change their nodes of the graph before each launch."""
    flags = ("--layers", "4", "--decode", "1,64", "--prefill", "512", "--quantization", weights)
    reports = inspect("--model", name, *flags)
    for bucket, report in reports.items():
        assert report["arguments"] <= 51, bucket
        assert report["kv_copies"] == 0 and report["calls_with_input"] == 0, bucket
        assert report["outside_graph"] == ["kCommandBuffer"], bucket
    for bucket in ("decode_1", "decode_64"):
        assert reports[bucket]["inside_graph"] <= 20, bucket

"""A start on a GPU says what makes steps fast and is off: pretended versions, no GPU needed."""

from __future__ import annotations

import logging

import pytest

from jaxserve.metrics.metrics import Metrics
from jaxserve.startup import fast_paths
from jaxserve_kernels import ptxas, records, target
from jaxserve_kernels.target import CPU, Target

KNOWN = {"jaxlib": "0.11.2", "jax-triton": "0.4.1", "triton": "3.9.0"}
VERSIONED = ("hopper_kernels", "kernel_chains", "machine_code_records")


def start(capability: int = 90) -> str:
    """The metrics after a start on a GPU of that compute capability."""
    metrics = Metrics("model")
    fast_paths.report(metrics, Target.for_gpu(capability))
    return metrics.exposition().decode()


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> dict[str, str]:
    """What is pretended to be installed."""
    versions = dict(KNOWN)
    monkeypatch.setattr(records, "installed", versions.get)
    monkeypatch.setattr(ptxas, "available", lambda: True)
    monkeypatch.setattr(target, "_import_errors", [])
    caplog.set_level(logging.INFO)
    return versions


def test_everything_is_on_with_the_known_versions(caplog: pytest.LogCaptureFixture) -> None:
    exposition = start()
    for feature in ("triton_kernels", *VERSIONED):
        assert f'jaxserve_fast_path{{feature="{feature}"}} 1.0' in exposition
    assert not caplog.messages


@pytest.mark.parametrize(
    ("package", "version"), [("jaxlib", "0.12.0"), ("jax-triton", "0.5.0"), ("triton", "3.10.0")]
)
def test_a_version_that_nobody_looked_at_turns_off_what_needs_its_private_parts(
    package: str, version: str, installed: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    installed[package] = version
    exposition = start()
    assert 'jaxserve_fast_path{feature="triton_kernels"} 1.0' in exposition
    for feature in VERSIONED:
        assert f'jaxserve_fast_path{{feature="{feature}"}} 0.0' in exposition
    assert len(caplog.records) == len(VERSIONED)
    for record in caplog.records:
        assert record.levelname == "WARNING"
        assert f"{package} {version} is not known" in record.getMessage()


def test_without_ptxas_jaxlib_assembles_and_nothing_is_chained(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ptxas, "available", lambda: False)
    exposition = start()
    assert 'jaxserve_fast_path{feature="hopper_kernels"} 1.0' in exposition
    assert 'jaxserve_fast_path{feature="kernel_chains"} 0.0' in exposition
    assert 'jaxserve_fast_path{feature="machine_code_records"} 0.0' in exposition
    assert caplog.text.count("ptxas is not installed") == 2


def test_what_was_written_for_hopper_is_no_warning_on_other_gpus(
    caplog: pytest.LogCaptureFixture,
) -> None:
    exposition = start(capability=89)
    assert 'jaxserve_fast_path{feature="kernel_chains"} 0.0' in exposition
    assert 'jaxserve_fast_path{feature="machine_code_records"} 1.0' in exposition
    assert {record.levelname for record in caplog.records} == {"INFO"}


def test_triton_that_cannot_be_imported_leaves_everything_to_xla(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(target, "_NEEDED", ("a_module_that_is_not_there",))
    target._import_triton.cache_clear()
    assert not Target.for_gpu(90).uses_triton()
    target._import_triton.cache_clear()
    exposition = start()
    assert 'jaxserve_fast_path{feature="triton_kernels"} 0.0' in exposition
    assert "ModuleNotFoundError: No module named 'a_module_that_is_not_there'" in caplog.text


def test_a_cpu_has_none_of_them() -> None:
    metrics = Metrics("model")
    fast_paths.report(metrics, CPU)
    assert "jaxserve_fast_path{" not in metrics.exposition().decode()

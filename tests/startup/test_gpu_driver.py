"""The GPU's driver is opened early where there is one, and nothing else happens."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import pytest

from jaxserve.startup import gpu_driver
from jaxserve.startup.timeline import Timeline


class Driver:
    """Records the calls; each gives `results[name]`, or success."""

    def __init__(self, **results: int):
        self.calls: list[str] = []
        self._results = results

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any) -> int:
            self.calls.append(name)
            return self._results.get(name, 0)

        return call


def opened(
    monkeypatch: pytest.MonkeyPatch, driver: Driver | None, platforms: str | None = None
) -> Timeline:
    def load(name: str) -> Driver:
        assert name == "libcuda.so.1"
        if driver is None:
            raise OSError
        return driver

    monkeypatch.setattr(ctypes, "CDLL", load)
    timeline = Timeline()
    gpu_driver.open_early(timeline, platforms)
    for thread in threading.enumerate():
        if thread.name == "open-gpu-driver":
            thread.join()
    return timeline


@pytest.mark.parametrize("platforms", [None, "", "cuda", "cuda,cpu", "gpu"])
def test_the_first_gpu_gets_its_context(
    monkeypatch: pytest.MonkeyPatch, platforms: str | None
) -> None:
    driver = Driver()
    timeline = opened(monkeypatch, driver, platforms)
    assert driver.calls == ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]
    assert [span.name for span in timeline.spans()] == ["driver"]


@pytest.mark.parametrize("failing", ["cuInit", "cuDeviceGet"])
def test_what_fails_is_left_to_xla_to_report(monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    driver = Driver(**{failing: 100})
    opened(monkeypatch, driver)
    assert driver.calls[-1] == failing


def test_without_a_driver_or_for_another_platform_nothing_happens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert opened(monkeypatch, None).spans() == []
    driver = Driver()
    opened(monkeypatch, driver, "cpu")
    assert driver.calls == []


def test_the_size_of_the_card_is_the_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sized(Driver):
        def cuDeviceTotalMem_v2(self, size: Any, device: Any) -> int:
            size._obj.value = 80 * 2**30
            return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Sized())
    assert gpu_driver.total_memory() == 80 * 2**30


@pytest.mark.parametrize("failing", ["cuInit", "cuDeviceGet"])
def test_the_size_of_no_card_is_nothing(monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(**{failing: 100}))
    assert gpu_driver.total_memory() == 0


def test_without_a_driver_there_is_no_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> Driver:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert gpu_driver.total_memory() == 0

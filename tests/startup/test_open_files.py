"""The soft limit of open files goes up at the start, and the log says what it is."""

from __future__ import annotations

import logging
import resource

import pytest

from jaxserve.startup import open_files
from tests.e2e.process import finish, read_until, run

WITH_FEW = """
import resource, runpy
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 4096))
runpy.run_module("jaxserve", run_name="__main__")
"""
UNLIMITED = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limits", "raised", "said"),
    [
        ((1024, 524_288), (65_536, 524_288), "open files: at most 65,536"),  # systemd's defaults
        ((1024, UNLIMITED), (65_536, UNLIMITED), "open files: at most 65,536"),
        ((1_048_576, 1_048_576), None, "open files: at most 1,048,576"),  # docker's
        ((UNLIMITED, UNLIMITED), None, "open files: no limit"),
        ((1024, 1200), (1200, 1200), "at most 1,200, but up to 1,280 requests may wait and run"),
        ((1024, 1024), None, "at most 1,024, but up to 1,280 requests may wait and run at once"),
    ],
)
def test_it_becomes_what_the_hard_limit_allows(
    limits: tuple[int, int],
    raised: tuple[int, int] | None,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    changes: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, to: changes.append(to))
    with caplog.at_level(logging.INFO):
        assert open_files.raise_limit(1280) == (raised or limits)[0]
    assert changes == [raised] * (raised is not None)
    (record,) = caplog.records
    assert said in record.message
    assert (record.levelname == "WARNING") == ("but up to" in said)


def test_a_server_started_with_few_allows_itself_more() -> None:
    few = run("-c", WITH_FEW, "--model", "/nowhere")
    read_until(few, "open files: at most 4,096")
    finish(few)

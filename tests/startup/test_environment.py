"""What the environment says goes before the flags, and never keeps the device from opening."""

from __future__ import annotations

import os

import pytest
from jaxlib import xla_client

from jaxserve.config import ConfigError
from jaxserve.startup.environment import memory_share, prepare

NAME, FORMER = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, "XLA_FLAGS": ""})


@pytest.mark.parametrize(
    ("given", "share"),
    [
        ({}, 0.9),
        ({NAME: "0.5"}, 0.5),
        ({NAME: ""}, 0.9),
        ({FORMER: "0.4"}, 0.4),
        ({NAME: "0.5", FORMER: "0.4"}, 0.5),
    ],
)
def test_either_name_of_the_share_is_taken(given: dict[str, str], share: float) -> None:
    os.environ.pop(NAME, None)
    os.environ.update(given)
    prepare(0.9)
    assert memory_share() == share
    assert xla_client.generate_pjrt_gpu_plugin_options()["memory_fraction"] == share


def test_a_share_that_is_no_number_is_refused() -> None:
    os.environ[NAME] = "90%"
    with pytest.raises(ConfigError, match=r"XLA_CLIENT_MEM_FRACTION .* not a number: '90%'"):
        memory_share()

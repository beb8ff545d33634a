"""Programs compiled ahead: killed half-way, completed, required, and then nothing heavy loaded."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.process import SMALL_SHAPES, finish, read_until, run, small_model, start
from tests.fast_compiles import FAST_COMPILES

HEAVY = {"flax", "orbax", "torch", "transformers", "triton", "jax_triton", "huggingface_hub"}
"""What a serving process must not load: seconds of its start, hundreds of megabytes."""

SERVE_AND_LIST_MODULES = """
import os, sys
leave = os._exit
os._exit = lambda status: (print("modules:", *sys.modules, flush=True), leave(status))
from jaxserve.__main__ import main
sys.exit(main())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model in `model`; the programs of two steps are put into `cache`."""
    made = tmp_path_factory.mktemp("precompile")
    small_model(made / "model")
    return made


def flags_for(folder: Path, cache: str = "cache") -> list[str]:
    return ["--model", f"{folder}/model", "--cache-dir", f"{folder}/{cache}", *SMALL_SHAPES]


def steps_in(cache: Path) -> list[Path]:
    return list(cache.glob("executables/*/step_*.exe"))


@pytest.mark.slow  # compiles all programs
def test_precompile_survives_kill_and_serving_then_compiles_nothing(
    folder: Path,
) -> None:
    cache, flags = folder / "cache", flags_for(folder)
    killed = run("-m", "jaxserve", "precompile", "--compile-workers", "1", *flags)
    deadline = time.monotonic() + 120
    while not steps_in(cache) and killed.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert len(steps_in(cache)) == 1

    status, output = finish(start("--require-precompiled", *flags), timeout=60)
    assert status == 1
    assert "not there: step_decode_1, flush, " in output.splitlines()[-1]

    status, output = finish(run("-m", "jaxserve", "precompile", *flags), timeout=120)
    assert status == 0, output
    found = re.search(r"(\d+) of (\d+) programs to compile", output)
    assert found is not None, output
    todo, total = found.groups()
    assert int(todo) == int(total) - 1
    assert "steps are timed" in output.splitlines()[-1]

    arguments = ["--port", "0", "--require-precompiled", "--forbid-compiles", *flags]
    server = run("-c", SERVE_AND_LIST_MODULES, *arguments)
    read_until(server, "step times, from")
    read_until(server, f"{total} of {total} programs loaded, 0 compiled")
    read_until(server, "is ready")
    server.send_signal(signal.SIGTERM)
    status, output = finish(server, timeout=20)
    assert status == 0, output
    modules = output.partition("modules:")[2].split()
    assert "jaxserve.runner.runner" in modules
    assert not HEAVY & {module.partition(".")[0] for module in modules}

    manifest = json.loads(next(cache.glob("executables/*/manifest.json")).read_text())
    assert {"step_mixed_16", "step_decode_1", "flush", "state"} <= set(manifest["programs"])
    assert len(manifest["programs"]) == int(total)


def test_a_cache_that_cannot_be_written_fails_precompile_and_names_the_folder(
    folder: Path,
) -> None:
    (folder / "file").write_text("in the way")
    command = ("-m", "jaxserve", "precompile", *flags_for(folder, cache="file"))
    status, output = finish(run(*command), timeout=120)
    assert status == 1, output
    last = output.splitlines()[-1]
    assert last.startswith("jaxserve: error: ") and str(folder / "file") in last


DEVICE_TAKEN = """
import sys
from jaxserve.startup import build
from jaxserve.__main__ import main

def build_parts(*_, **__):
    raise build.OutOfDeviceMemory("another process has it")

build.build_parts = build_parts
sys.exit(main())
"""


def test_a_device_whose_memory_is_taken_keeps_programs_and_leaves_timing_to_the_first_start(
    folder: Path,
) -> None:
    """After the first test there is nothing left to compile, and steps are timed again."""
    for times in (folder / "cache").glob("executables/*/step_times.json"):
        times.unlink()
    command = ("-c", DEVICE_TAKEN, "precompile", *flags_for(folder))
    status, output = finish(run(*command, environment={"XLA_FLAGS": FAST_COMPILES}), timeout=120)
    assert status == 0, output
    last = output.splitlines()[-1]
    assert last.endswith("not timed, which the first start will do: another process has it")
    assert steps_in(folder / "cache")

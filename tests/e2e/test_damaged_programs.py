"""Real processes on caches of programs that are damaged, foreign, read-only, full, or shared."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from tests.e2e.process import (
    OBEY_PERMISSIONS,
    SMALL_SHAPES,
    files_of_at_most,
    finish,
    read_until,
    run,
    small_model,
    start,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def compiled(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with every program of the model."""
    cache = tmp_path_factory.mktemp("compiled")
    status, output = precompile(model, cache)
    assert status == 0, output
    return cache


@pytest.fixture
def cache(compiled: Path, tmp_path: Path) -> Path:
    """A copy of `compiled`, to be damaged."""
    shutil.copytree(compiled, tmp_path / "cache")
    return tmp_path / "cache"


def flags(model: Path, cache: Path) -> list[str]:
    return ["--model", str(model), "--cache-dir", str(cache), *SMALL_SHAPES]


def precompile(model: Path, cache: Path, before: str = "") -> tuple[int, str]:
    process = run("-m", "jaxserve", "precompile", *flags(model, cache), before=before)
    return finish(process, timeout=240)


def programs(cache: Path) -> dict[str, Path]:
    return {file.stem: file for file in cache.glob("executables/*/*.exe")}


def served(model: Path, cache: Path, *more: str) -> str:
    """The log of a server that must become ready and then ends."""
    process = start(*flags(model, cache), *more)
    try:
        seen: list[str] = []
        assert process.stdout is not None
        for line in process.stdout:
            seen.append(line)
            if "is ready" in line:
                break
        process.send_signal(signal.SIGTERM)
        status, rest = finish(process, timeout=60)
    finally:
        process.kill()
        process.communicate()
    output = "".join(seen) + rest
    assert status == 0 and "is ready" in output, output
    assert "Traceback" not in output
    return output


def refused(model: Path, cache: Path, *more: str) -> str:
    """The last line of a server that must not start."""
    status, output = finish(start(*flags(model, cache), *more), timeout=120)
    assert status == 1, output
    assert "Traceback" not in output
    last = output.splitlines()[-1]
    assert last.startswith("jaxserve: error: "), output
    return last


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def empty(file: Path) -> None:
    os.truncate(file, 0)


def of_another_version(file: Path) -> None:
    head, _, payload = file.read_bytes().partition(b"\n")
    changed = {**json.loads(head), "format": "jaxserve executable 0"}
    file.write_bytes(json.dumps(changed).encode() + b"\n" + payload)


def writable_by_all(file: Path) -> None:
    file.chmod(0o666)


DAMAGE = {
    "step_decode_1": (flip_a_bit, "damaged: its checksum differs"),
    "step_mixed_16": (truncate, r"damaged: \d+ bytes, its header says \d+"),
    "flush": (empty, "damaged: no readable header"),
    "state": (of_another_version, "of another version, device or configuration"),
    "prompt_scores": (writable_by_all, "not trusted: other users may write it"),
}


def test_every_damaged_program_is_refused_by_name_or_compiled_again_and_replaced(
    model: Path, cache: Path
) -> None:
    for name, (damage, _) in DAMAGE.items():
        damage(programs(cache)[name])
    total = len(programs(cache))

    message = refused(model, cache, "--require-precompiled")
    assert re.search(rf"[1-5] of {total} programs are not precompiled in {cache}", message)
    assert "Run `jaxserve precompile` with the same flags on this machine" in message
    assert re.search(r"(damaged|of another version|not trusted).*: \w+", message), message

    output = served(model, cache, "--forbid-compiles")
    assert f"{total - 5} of {total} programs loaded, 5 compiled" in output
    for name, (_, reason) in DAMAGE.items():
        assert re.search(rf"{reason}: [^;]*\b{name}\b", output), name

    output = served(model, cache, "--require-precompiled", "--forbid-compiles")
    assert f"{total} of {total} programs loaded, 0 compiled" in output


def test_precompile_repairs_what_is_damaged_says_why_and_touches_nothing_else(
    model: Path, cache: Path
) -> None:
    total = len(programs(cache))
    whole = {name: file.stat().st_mtime_ns for name, file in programs(cache).items()}
    for name, (damage, _) in DAMAGE.items():
        damage(programs(cache)[name])
    (next(cache.glob("executables/*/manifest.json"))).write_text("{")
    status, output = precompile(model, cache)
    assert status == 0, output
    assert f"5 of {total} programs to compile" in output
    for name, (_, reason) in DAMAGE.items():
        assert re.search(rf"{reason}: [^;]*\b{name}\b", output), name
    for name, file in programs(cache).items():
        assert (file.stat().st_mtime_ns == whole[name]) == (name not in DAMAGE), name
    manifest = json.loads(next(cache.glob("executables/*/manifest.json")).read_text())
    assert manifest["programs"].keys() == whole.keys()


def test_programs_for_other_settings_or_another_device_are_not_used_and_the_difference_is_said(
    model: Path, cache: Path
) -> None:
    """Another device is another key, as other flags are; under this key its files do not count."""
    other = {"NVIDIA_TF32_OVERRIDE": "0"}
    process = start(*flags(model, cache), "--require-precompiled", environment=other)
    status, output = finish(process, timeout=120)
    assert status == 1, output
    assert (
        "There are programs for other settings: NVIDIA_TF32_OVERRIDE is " in output.splitlines()[-1]
    )

    manifest = next(cache.glob("executables/*/manifest.json"))
    key = {**json.loads(manifest.read_text()), "device": "another"}
    manifest.write_text(json.dumps(key))
    for file in programs(cache).values():
        head, _, payload = file.read_bytes().partition(b"\n")
        changed = {**json.loads(head), "key": "0" * 64}
        file.write_bytes(json.dumps(changed).encode() + b"\n" + payload)
    message = refused(model, cache, "--require-precompiled")
    assert "of another version, device or configuration: " in message


def test_two_that_precompile_at_once_leave_whole_files(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    both = [run("-m", "jaxserve", "precompile", *flags(model, cache)) for _ in range(2)]
    for process in both:
        status, output = finish(process, timeout=300)
        assert status == 0, output
    served(model, cache, "--require-precompiled", "--forbid-compiles")
    names = {file.suffix for file in cache.glob("executables/*/*")}
    assert names == {".exe", ".json"}


def test_precompile_on_a_full_disk_says_so_and_leaves_nothing_half_written(
    model: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    status, output = precompile(model, cache, files_of_at_most(10_000))
    assert status == 1, output
    last = output.splitlines()[-1]
    assert last.startswith(f"jaxserve: error: cannot write to {cache}"), output
    assert "File too large" in last
    assert not list(cache.glob("executables/*/.*")), "something half-written is left"


def test_precompile_into_a_folder_that_may_not_be_written_says_so(model: Path, cache: Path) -> None:
    (folder,) = cache.glob("executables/*")
    programs(cache)["flush"].unlink()
    folder.chmod(0o500)
    try:
        status, output = precompile(model, cache, OBEY_PERMISSIONS)
    finally:
        folder.chmod(0o700)
    assert status == 1, output
    last = output.splitlines()[-1]
    assert "Permission denied" in last and str(folder) in last


@pytest.mark.parametrize("missing", [False, True])
def test_a_server_reads_a_folder_that_it_may_not_write(
    model: Path, cache: Path, missing: bool
) -> None:
    """What is missing is compiled at every start, and the log says why."""
    (folder,) = cache.glob("executables/*")
    if missing:
        programs(cache)["flush"].unlink()
    folder.chmod(0o500)
    process = run("-m", "jaxserve", "--port", "0", *flags(model, cache), before=OBEY_PERMISSIONS)
    try:
        if missing:
            read_until(process, "compiled programs cannot be stored, every .* Permission denied")
        read_until(process, f"{int(missing)} compiled")
        read_until(process, "is ready")
        process.send_signal(signal.SIGTERM)
        status, output = finish(process, timeout=60)
        assert status == 0, output
    finally:
        folder.chmod(0o700)
        process.kill()
        process.communicate()

"""Real conversions that are killed, have no room, meet another one, or are damaged later."""

from __future__ import annotations

import filecmp
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.process import (
    OBEY_PERMISSIONS,
    ROOT,
    SMALL_SHAPES,
    files_of_at_most,
    finish,
    run,
    small_model,
    start,
)

pytestmark = pytest.mark.slow

FILE, JOURNAL = "jaxserve.safetensors", ".jaxserve.safetensors.journal"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("model"))


def convert(model: Path, out: Path, *flags: str) -> list[str]:
    return ["-m", "jaxserve", "convert", "--model", str(model), "--out", str(out), *flags]


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 1.2 GB: converting it takes long enough to be killed in."""
    folder = tmp_path_factory.mktemp("larger")
    script = ROOT / "scripts" / "random_checkpoint.py"
    status, output = finish(run(str(script), "qwen3-0.6b", str(folder)), timeout=240)
    assert status == 0, output
    return folder


PUBLIC = ("--to", "safetensors", "--quantization", "int4", "--lm-head-dtype", "unquantized")


@pytest.mark.parametrize(("file", "flags"), [(FILE, ()), ("model.safetensors", PUBLIC)])
def test_a_killed_conversion_is_gone_on_with_and_gives_the_same_file(
    file: str, flags: tuple[str, ...], larger: Path, tmp_path: Path
) -> None:
    out, whole = tmp_path / "out", tmp_path / "whole"
    journal = out / f".{file}.journal"

    def parts() -> int:
        return journal.read_text().count("\n") if journal.exists() else 0

    killed = run(*convert(larger, out, *flags))
    deadline = time.monotonic() + 120
    while parts() < 20 and killed.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert parts() >= 20 and not (out / file).exists()

    status, output = finish(start("--model", str(out), *SMALL_SHAPES), timeout=120)
    assert status == 1
    assert "Traceback" not in output
    assert output.splitlines()[-1].startswith("jaxserve: error: ")

    for folder in (out, whole):
        status, output = finish(run(*convert(larger, folder, *flags)), timeout=240)
        assert status == 0, output
    assert sorted(each.name for each in out.iterdir()) == sorted(
        each.name for each in whole.iterdir()
    )
    assert filecmp.cmp(out / file, whole / file, shallow=False)


def test_a_conversion_without_room_says_how_much_it_needs_and_leaves_nothing(
    model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    limit = files_of_at_most((model / "model.safetensors").stat().st_size - 1000)
    status, output = finish(run(*convert(model, out), before=limit), timeout=120)
    assert status == 1, output
    last = output.splitlines()[-1]
    assert re.search(r"the converted weights take [0-9.]+ [MG]B, [0-9.]+ [MG]B are free", last)
    assert not [file for file in out.iterdir() if "safetensors" in file.name]


def test_a_second_conversion_into_the_folder_is_refused_while_the_first_runs(
    larger: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    first = run(*convert(larger, out))
    try:
        deadline = time.monotonic() + 120
        while not (out / JOURNAL).exists():
            assert first.poll() is None and time.monotonic() < deadline
            time.sleep(0.005)
        os.kill(first.pid, signal.SIGSTOP)
        status, output = finish(run(*convert(larger, out)), timeout=120)
        assert status == 1
        assert "another process is converting into this folder" in output.splitlines()[-1]
    finally:
        os.kill(first.pid, signal.SIGCONT)
    status, output = finish(first, timeout=240)
    assert status == 0, output


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1000)


def empty(file: Path) -> None:
    os.truncate(file, 0)


@pytest.mark.parametrize("damage", [flip_a_bit, truncate, empty])
def test_a_damaged_converted_checkpoint_is_refused_with_its_file(
    model: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    out = tmp_path / "out"
    status, output = finish(run(*convert(model, out)), timeout=120)
    assert status == 0, output
    damage(out / FILE)
    status, output = finish(start("--model", str(out), *SMALL_SHAPES), timeout=120)
    assert status == 1, output
    assert "Traceback" not in output
    last = output.splitlines()[-1]
    assert last.startswith("jaxserve: error: ") and FILE in last


def test_nothing_more_is_compiled_for_weights_that_are_damaged(model: Path, tmp_path: Path) -> None:
    out, cache = tmp_path / "out", tmp_path / "cache"
    status, output = finish(run(*convert(model, out)), timeout=120)
    assert status == 0, output
    flip_a_bit(out / FILE)
    flags = ("--max-model-len", "64", "--kv-cache-memory-bytes", "1M", "--compile-workers", "1")
    buckets = ("--decode-buckets", "1,2,3,4,5,6", "--prefill-buckets", "16,32,64")
    place = ("--model", str(out), "--cache-dir", str(cache))
    status, output = finish(start(*place, *flags, *buckets), timeout=240)
    assert status == 1 and FILE in output.splitlines()[-1]
    planned = re.search(r"compiling (\d+) of", output)
    assert planned, output
    assert len(list(cache.rglob("*.exe"))) < int(planned[1]) - 3


def test_a_file_of_the_original_that_may_not_be_read_is_named(model: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "model"))
    (copy / "vocab.json").touch(mode=0)
    process = run(*convert(copy, tmp_path / "out"), before=OBEY_PERMISSIONS)
    status, output = finish(process, timeout=120)
    assert status == 1
    assert f"{copy}/vocab.json: cannot be read: Permission denied" in output.splitlines()[-1]

"""The cache of compiled programs: what it gives back is what was put in, or nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxserve.cli.options import parse_args
from jaxserve.programs.executable_cache import ExecutableCache, Program, Unusable
from jaxserve.programs.executables import obtain
from jaxserve.startup.engine_plan import plan_engine
from jaxserve.startup.environment import compiler_options
from jaxserve.weights.model_source import find_model
from tests.e2e.process import run
from tests.programs.small_program import (
    KEY,
    cache_at,
    check,
    double,
    entry,
    program,
    solving,
)
from tests.tiny_model import COMPILES


def test_a_loaded_program_computes_what_was_compiled_and_nothing_is_compiled(
    tmp_path: Path, cache: ExecutableCache
) -> None:
    before = COMPILES.count
    obtained = obtain([program()], cache_at(tmp_path), 2, lambda phase, done: None)
    assert COMPILES.count == before
    assert not obtained.compiled and not obtained.unkept
    check(obtained.executables["double"])


SOLVE = """
import sys
from pathlib import Path
import numpy as np
from tests.programs.small_program import cache_at, solving
run = cache_at(Path(sys.argv[1])).load(solving())
print(np.asarray(run(2 * np.eye(4, dtype=np.float32), np.ones((4, 4), np.float32))).sum())
"""


def test_a_process_that_has_lowered_nothing_runs_a_program_that_calls_lapack(
    tmp_path: Path,
) -> None:
    """A hybrid model's prompts do. JAX finds LAPACK's functions while it lowers a call of one."""
    obtain([solving()], cache_at(tmp_path), 1, lambda phase, done: None)
    process = run("-c", SOLVE, str(tmp_path))
    out, _ = process.communicate(timeout=100)
    assert (process.returncode, out.split()[-1:]) == (0, ["8.0"]), out


def test_options_of_the_compiler_reach_it() -> None:
    unknown = dataclasses.replace(program(), compiler_options={"xla_no_such_option": 1})
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        unknown.compile()


@pytest.mark.parametrize(
    ("flags", "level"), [("", 2), ("--xla_backend_optimization_level=0", None)]
)
def test_a_cpus_programs_are_compiled_quickly_unless_xla_flags_say_how(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: str, level: int | None
) -> None:
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.9")  # as environment.prepare leaves it
    monkeypatch.setenv("XLA_FLAGS", flags)
    options = parse_args(["--cache-dir", str(tmp_path)])
    plan = plan_engine(options, find_model(options))
    name = "xla_backend_optimization_level"
    assert {each.compiler_options.get(name) for each in plan.programs} == {level}
    assert compiler_options(gpu=True) == {}


@pytest.mark.parametrize("there", [True, False])
def test_what_is_missing_may_be_refused_before_anything_is_compiled(
    cache: ExecutableCache, there: bool
) -> None:
    class Refused(Exception):
        pass

    def refuse(reasons: Mapping[str, str]) -> None:
        raise Refused(reasons)

    programs = [program()] if there else [program(), program("other")]
    before = COMPILES.count
    with (
        contextlib.nullcontext() if there else pytest.raises(Refused, match="'other': 'not there'")
    ):
        obtain(programs, cache, 2, lambda phase, done: None, on_missing=refuse)
    assert COMPILES.count == before


def test_that_something_compiles_is_said_before_the_first_is_done(
    tmp_path: Path, cache: ExecutableCache
) -> None:
    said: list[tuple[str, float]] = []
    programs = [program(), program("other", size=5)]
    obtain(programs, cache, 1, lambda phase, done: said.append((phase, done)))
    assert said == [("loading", 0.5), ("compiling", 0.5), ("compiling", 1.0)]


def test_progress_counts_programs_by_what_compiling_them_takes(tmp_path: Path) -> None:
    done: list[float] = []
    small = dataclasses.replace(program("small"), work=1.0)
    large = dataclasses.replace(program("large"), work=3.0)
    obtain([large, small], cache_at(tmp_path), 1, lambda phase, fraction: done.append(fraction))
    assert done == [0.0, 0.75, 1.0]


def test_where_programs_must_be_kept_the_first_that_cannot_be_is_the_last(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    cache, finished = cache_at(tmp_path / "file"), list[str]()
    programs = [program(f"{number}") for number in range(3)]
    with pytest.raises(NotADirectoryError):
        obtain(programs, cache, 1, lambda phase, done: None, finished.append, must_keep=True)
    assert not finished


def test_nothing_is_begun_after_a_failure(tmp_path: Path) -> None:
    traced: list[str] = []

    def bad(x: Any) -> Any:
        raise ZeroDivisionError

    def later(x: Any) -> Any:
        traced.append("later")
        return x

    programs = [program("bad", function=bad), *(program(f"{n}", function=later) for n in range(3))]
    with pytest.raises(ZeroDivisionError):
        obtain(programs, cache_at(tmp_path), 1, lambda phase, done: None)
    assert len(traced) <= 1  # the one thread may have taken the next before it was told


@pytest.mark.parametrize("changed", [{"jaxlib": "2.0"}, {"device": "two"}, {"driver": "580"}])
def test_another_version_or_device_finds_nothing_and_is_told_what_differs(
    tmp_path: Path, cache: ExecutableCache, changed: dict[str, str]
) -> None:
    other = cache_at(tmp_path, **changed)
    with pytest.raises(Unusable, match="not there"):
        other.load(program())
    (name,) = changed
    assert name in other.differences()
    assert not cache.differences()


def test_a_file_of_another_key_under_this_key_is_refused(
    tmp_path: Path, cache: ExecutableCache
) -> None:
    other = cache_at(tmp_path, device="two")
    cache.folder.rename(other.folder)
    with pytest.raises(Unusable, match="another version, device or configuration"):
        other.load(program())


def test_other_shapes_or_details_under_the_same_name_are_refused(cache: ExecutableCache) -> None:
    with pytest.raises(Unusable, match="another version"):
        cache.load(program(size=5))
    changed = Program(
        name="double", function=double, arguments=program().arguments, details="tile 32"
    )
    with pytest.raises(Unusable, match="another version"):
        cache.load(changed)


def test_files_that_others_may_write_are_not_loaded(cache: ExecutableCache) -> None:
    entry(cache).chmod(0o620)
    with pytest.raises(Unusable, match="other users may write it"):
        cache.load(program())
    entry(cache).chmod(0o600)
    cache.folder.chmod(0o777)
    with pytest.raises(Unusable, match="other users may write its folder"):
        cache.load(program())


def test_links_are_not_followed(cache: ExecutableCache, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    entry(cache).rename(elsewhere)
    entry(cache).symlink_to(elsewhere)
    with pytest.raises(Unusable, match="cannot be opened"):
        cache.load(program())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_files_of_other_users_are_not_loaded(cache: ExecutableCache) -> None:
    os.chown(entry(cache), 54321, -1)
    with pytest.raises(Unusable, match="belongs to user 54321"):
        cache.load(program())


def test_writers_and_readers_at_the_same_time_see_whole_files_only(tmp_path: Path) -> None:
    executable = program().compile()
    cache_at(tmp_path).store(program(), executable, 0.1)
    failures: list[str] = []
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            cache_at(tmp_path).store(program(), executable, 0.1)
            cache_at(tmp_path).write_manifest()

    def read() -> None:
        for _ in range(60):
            try:
                cache_at(tmp_path).check(program())
            except Unusable as error:
                failures.append(str(error))

    writers = [threading.Thread(target=write) for _ in range(3)]
    readers = [threading.Thread(target=read) for _ in range(2)]
    for thread in writers + readers:
        thread.start()
    for thread in readers:
        thread.join()
    stop.set()
    for thread in writers:
        thread.join()
    assert not failures
    names = {file.name for file in cache_at(tmp_path).folder.iterdir()}
    assert names == {"double.exe", "manifest.json"}


def test_a_folder_that_cannot_be_made_costs_the_cache_not_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = cache_at(tmp_path / "file" / "executables")
    obtained = obtain([program()], cache, 1, lambda phase, done: None)
    check(obtained.executables["double"])
    assert "Not a directory" in obtained.unkept


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_read_and_costs_the_cache_not_the_start(
    cache: ExecutableCache,
) -> None:
    cache.folder.chmod(0o500)
    try:
        check(cache.load(program()))
        obtained = obtain([program("other")], cache, 1, lambda phase, done: None)
        check(obtained.executables["other"])
        assert "Permission denied" in obtained.unkept
    finally:
        cache.folder.chmod(0o700)


def test_a_full_disk_costs_the_cache_not_the_start(cache: ExecutableCache) -> None:
    """A limit on the size of files ends a write in the middle, as a full disk does."""
    other = program("other")
    executable = other.compile()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError):
            cache.store(other, executable, 0.1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {file.name for file in cache.folder.iterdir()} == {"double.exe", "manifest.json"}
    check(cache.load(program()))


def test_what_a_killed_writer_left_is_removed_once_it_is_old(cache: ExecutableCache) -> None:
    left = cache.folder / ".double.exe.1.2.tmp"
    left.write_bytes(b"half")
    cache.prepare()
    assert left.exists(), "its writer may be alive"
    os.utime(left, (0, 0))
    cache.prepare()
    assert not left.exists()


def test_the_manifest_lists_what_is_there_and_what_it_is_for(cache: ExecutableCache) -> None:
    manifest = json.loads((cache.folder / "manifest.json").read_text())
    assert manifest["key"] == KEY
    assert manifest["programs"]["double"]["size"] > 1000
    assert cache.compile_seconds()["double"] >= 0


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "5",
        '{"format": "jaxserve executable 9", "key": [], "programs": {"double": {}}}',
        '{"format": "jaxserve executable 1", "key": {"device": "x"}, "programs": []}',
        '{"format": "jaxserve executable 1", "key": [], "programs": {}}',
        '{"format": "jaxserve executable 1", "key": {}, "programs": {"double": {"seconds": []}}}',
        "[" * 100_000,
    ],
)
def test_manifests_of_other_versions_and_damaged_ones_say_nothing(
    tmp_path: Path, content: str
) -> None:
    (tmp_path / "older").mkdir()
    (tmp_path / "older" / "manifest.json").write_text(content)
    cache = cache_at(tmp_path)
    assert cache.compile_seconds() == {}
    cache.differences()
    (tmp_path / "older").rename(cache.folder)
    (cache.folder / "left.exe").write_text("5\n")
    assert not obtain([program()], cache, 1, lambda phase, done: None).unkept
    assert cache.compile_seconds().keys() == {"double"}
